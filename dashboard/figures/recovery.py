"""Whether recovery held, and where the time went until training was back."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from gockpt import units
from gockpt.dashboard.figures.look import (
    FAILED,
    PASSED,
    SKIPPED,
    Theme,
    dress,
    nothing,
    room,
    text,
)
from gockpt.results import Trial

MATRIX = "Did recovery hold?"
SPLIT = "Way back from a crash"
NAME = {True: "passed", False: "failed", None: "skipped"}

PARTS = {
    "detect": ("detect", "#C23528"),
    "start": ("start", "#E07F10"),
    "open": ("find the agent", "#C040A8"),
    "read": ("read and check", "#2098E0"),
    "to_device": ("to the device", "#7F4BDB"),
    "first_step": ("first step", "#33A566"),
}
"""Part of a trial's ``recovery`` → what the figure calls it, and its colour."""


def recovery_matrix(
    trials: Sequence[Trial], *, theme: Theme = "light", emulated: str | None = None
) -> go.Figure:
    """Scenario × strategy: how many trials passed, failed and were skipped.

    A cell with one failed trial has failed. ``customdata`` of a cell is [scenario, strategy], as
    they are in the database.

    Args:
        trials: of one crash test.
        emulated: name of the profile of an emulated device.
    """
    if not trials:
        return nothing(MATRIX, "no trials; run gockpt crash-test", theme=theme, emulated=emulated)
    scenarios = list(dict.fromkeys(one.scenario for one in trials))
    strategies = list(dict.fromkeys(_strategy(one) for one in trials))
    cells = [[_of(trials, row, name) for name in strategies] for row in scenarios]
    figure = go.Figure(
        go.Heatmap(
            x=[text(name) for name in strategies],
            y=[text(name) for name in scenarios],
            z=[[_verdict(cell) for cell in line] for line in cells],
            text=[[_count(cell) for cell in line] for line in cells],
            hovertext=[[_cell(cell) for cell in line] for line in cells],
            customdata=[[[row, name] for name in strategies] for row in scenarios],
            texttemplate="%{text}",
            textfont={"color": "#FFFFFF", "size": 12},
            hoverinfo="text",
            zmin=0,
            zmax=2,
            colorscale=_steps(FAILED, SKIPPED, PASSED),
            showscale=False,
            xgap=3,
            ygap=3,
        )
    )
    dress(figure, MATRIX, theme=theme, emulated=emulated, inside=30 * len(scenarios), head=28)
    figure.update_xaxes(side="top", showgrid=False, type="category")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    return figure


def _strategy(one: Trial) -> str:
    return one.strategy or "unknown"


def _of(trials: Iterable[Trial], scenario: str, strategy: str) -> list[Trial]:
    return [one for one in trials if (one.scenario, _strategy(one)) == (scenario, strategy)]


def _steps(*colours: str) -> list[tuple[float, str]]:
    """A colour scale of bands instead of shades."""
    size = len(colours)
    edges = [((n / size, colour), ((n + 1) / size, colour)) for n, colour in enumerate(colours)]
    return [edge for pair in edges for edge in pair]


def _verdict(cell: Sequence[Trial]) -> int | None:
    """0 failed, 1 skipped, 2 passed; None: not tried."""
    words = {one.passed for one in cell}
    if not words:
        return None
    return 0 if False in words else 2 if True in words else 1


def _count(cell: Sequence[Trial]) -> str:
    words = [NAME[one.passed] for one in cell]
    return ", ".join(f"{words.count(one)} {one}" for one in NAME.values() if one in words)


def _cell(cell: Sequence[Trial]) -> str:
    """The first failures in words, or what was lost on average."""
    if not cell:
        return "not tried"
    head = f"<b>{text(cell[0].scenario)}</b>, {text(_strategy(cell[0]))}: {_count(cell)}"
    bad = [one for one in cell if one.passed is False]
    lines = [f"at {text(one.point)}: {_short(one.row.get('detail'))}" for one in bad[:3]]
    lost = [one.row["lost_steps"] for one in cell if one.row.get("lost_steps") is not None]
    if lost:
        lines.append(f"steps lost: {statistics.fmean(lost):.1f} on average, {max(lost)} at most")
    return "<br>".join([head, *lines])


def _short(detail: object) -> str:
    words = str(detail or "")
    return text(words if len(words) <= 90 else words[:89] + "…")


def recovery_split(
    trials: Sequence[Trial], *, theme: Theme = "light", emulated: str | None = None
) -> go.Figure:
    """Mean seconds of each part of the way back, for each strategy and source of the state.

    Args:
        trials: of one crash test; those count that were started again.
        emulated: name of the profile of an emulated device.
    """
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for one in trials:
        if one.row.get("recovery"):
            key = (_strategy(one), one.row.get("source") or "nothing")
            groups.setdefault(key, []).append(one.row["recovery"])
    if not groups:
        return nothing(SPLIT, "no trial was started again", theme=theme, emulated=emulated)
    names = [f"{text(strategy)}, from {text(source)}" for strategy, source in groups]
    figure = go.Figure()
    for part, (name, colour) in PARTS.items():
        means = [_mean(group, part) for group in groups.values()]
        figure.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                x=means,
                y=names,
                marker={"color": colour},
                hovertext=[
                    f"<b>{who}</b><br>{name}: {units.seconds(mean)}, mean of {len(group)} trials"
                    for who, mean, group in zip(names, means, groups.values(), strict=True)
                ],
                hoverinfo="text",
            )
        )
    dress(figure, SPLIT, theme=theme, emulated=emulated, inside=40 * len(groups), legend=2)
    totals = [statistics.fmean(map(_total, group)) for group in groups.values()]
    _totals(figure, names, totals)
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_xaxes(title="seconds", ticksuffix=" s", range=room(totals))
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _mean(group: Sequence[dict[str, float]], part: str) -> float:
    return statistics.fmean(one.get(part, 0.0) for one in group)


def _total(recovery: dict[str, float]) -> float:
    return sum(recovery.get(part, 0.0) for part in PARTS)


def _totals(figure: go.Figure, names: Sequence[str], totals: Sequence[float]) -> None:
    figure.add_trace(
        go.Scatter(
            x=totals,
            y=names,
            mode="text",
            text=[f" {units.seconds(total)}" for total in totals],
            textposition="middle right",
            showlegend=False,
            hoverinfo="skip",
            cliponaxis=False,
        )
    )
