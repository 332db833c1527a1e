"""What a strategy takes besides time of training: bytes over the link, memory, and patience."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from gockpt import units
from gockpt.dashboard.figures import rows
from gockpt.dashboard.figures.look import Stack, Theme, dress, nothing, room, strategy_colour, text
from gockpt.results import Result

TITLE = "What it takes besides"
PARTS = ("traffic over the link", "host memory", "time until a checkpoint is safe")


def costs(
    results: Sequence[Result], *, theme: Theme = "light", emulated: str | None = None
) -> go.Figure:
    """Traffic, memory and latency of each strategy, one above the other.

    Traffic in multiples of the state; memory in bytes above a run without checkpoints, beside what
    was planned; latency in seconds from the opening of the first window until the state is
    consistent in host memory, and until it is durable.

    Args:
        results: rows of one bench.
        emulated: name of the profile; the bytes are then those of the shrunk model.
    """
    emulated = rows.profile_of(results, emulated)
    shown = rows.drawn(results)
    if not shown:
        return nothing(TITLE, "no strategy was measured", theme=theme, emulated=emulated)
    stack = Stack(panels=[12 + 34 * len(shown)] * 3)
    figure = stack.subplots(PARTS)
    figure.add_trace(_traffic(shown), row=1, col=1)
    for trace in _memory(shown):
        figure.add_trace(trace, row=2, col=1)
    for trace in _latency(shown):
        figure.add_trace(trace, row=3, col=1)
    dress(figure, TITLE, theme=theme, emulated=emulated, inside=stack.inside, head=16, legend=1)
    small = " (of the shrunk model)" if emulated else ""
    figure.update_xaxes(
        title="times the state", ticksuffix="×", range=room(map(_factor, shown)), row=1, col=1
    )
    figure.update_xaxes(title=f"bytes{small}", tickformat=".3~s", ticksuffix="B", row=2, col=1)
    figure.update_xaxes(title="seconds", ticksuffix=" s", rangemode="tozero", row=3, col=1)
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(barmode="group")
    return figure


def _bar(shown: Sequence[Result], **more: Any) -> go.Bar:
    return go.Bar(
        orientation="h",
        y=rows.labels(shown),
        textposition="auto",
        insidetextanchor="start",
        insidetextfont={"color": "#FFFFFF"},
        cliponaxis=False,
        hoverinfo="text",
        marker={"color": [strategy_colour(one.strategy) for one in shown]},
        **more,
    )


def _traffic(shown: list[Result]) -> go.Bar:
    factors = [_factor(one) for one in shown]
    return _bar(
        shown,
        showlegend=False,
        x=factors,
        text=["–" if one is None else f"{one:.2f}×" for one in factors],
        hovertext=[
            f"<b>{text(one.strategy)}</b><br>state {units.size(rows.get(one, 'bytes', 'state'))}, "
            f"gradients {units.size(rows.get(one, 'bytes', 'gradients'))}, for all checkpoints"
            for one in shown
        ],
    )


def _factor(one: Result) -> float | None:
    state, gradients = rows.get(one, "bytes", "state"), rows.get(one, "bytes", "gradients")
    return None if not state else (state + (gradients or 0)) / state


def _memory(shown: list[Result]) -> tuple[go.Bar, go.Scatter]:
    added = [_added(one) for one in shown]
    planned = [rows.get(one, "memory_bytes", "predicted") for one in shown]
    words = [
        f"<b>{text(one.strategy)}</b><br>{units.size(more)} more than without checkpoints;"
        f"<br>planned were {units.size(plan)}"
        for one, more, plan in zip(shown, added, planned, strict=True)
    ]
    bars = _bar(
        shown, showlegend=False, x=added, text=[units.size(v) for v in added], hovertext=words
    )
    marks = go.Scatter(
        name="planned",
        x=planned,
        y=rows.labels(shown),
        mode="markers",
        marker={
            "symbol": "line-ns-open",
            "size": 26,
            "line": {"width": 3},
            "color": strategy_colour("none"),
        },
        hovertext=words,
        hoverinfo="text",
    )
    return bars, marks


def _added(one: Result) -> float | None:
    parts = [rows.get(one, "memory_bytes", f"{who}_added") for who in ("trainer", "agent")]
    return None if None in parts else max(0, sum(parts))


def _latency(shown: list[Result]) -> tuple[go.Scatter, go.Scatter, go.Scatter]:
    names = rows.labels(shown)
    early = [rows.get(one, "latency_s", "consistent") for one in shown]
    late = [rows.get(one, "latency_s", "durable") for one in shown]
    words = [
        f"<b>{text(one.strategy)}</b><br>after {units.seconds(first)} it survives a crash of the "
        f"training,<br>after {units.seconds(last)} one of the machine;<br>at the end of the run "
        f"{units.seconds(one.drain_s)} of waiting for the disk were left"
        for one, first, last in zip(shown, early, late, strict=True)
    ]
    gaps: list[float | None] = []
    places: list[str | None] = []
    for name, first, last in zip(names, early, late, strict=True):
        gaps += [first, last, None]
        places += [name, name, None]
    line = go.Scatter(
        x=gaps, y=places, mode="lines", showlegend=False, hoverinfo="skip",
        line={"width": 3, "color": strategy_colour("none")},
    )  # fmt: skip
    colours = [strategy_colour(one.strategy) for one in shown]
    shared: dict[str, Any] = {
        "y": names,
        "mode": "markers",
        "hovertext": words,
        "hoverinfo": "text",
    }
    consistent = go.Scatter(
        name="in host memory", x=early, marker={"color": colours, "size": 11, "symbol": "circle"},
        **shared,
    )  # fmt: skip
    durable = go.Scatter(
        name="on the disk", x=late, marker={"color": colours, "size": 12, "symbol": "square"},
        **shared,
    )  # fmt: skip
    return line, consistent, durable
