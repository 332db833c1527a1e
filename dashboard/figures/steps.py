"""How long each training step took, so that a hiccup is seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from gockpt import units
from gockpt.dashboard.figures.look import Theme, dress, nothing, strategy_colour, text
from gockpt.dashboard.thinning import thin
from gockpt.results import Checkpoint, Step

TITLE = "Step times"
POINTS = 2000
"""Most points drawn of each strategy."""

LINES = 40
"""Up to so many checkpoints are marked by lines across the figure."""


def steps(
    steps_by_strategy: Mapping[str, Sequence[Step]],
    checkpoints: Sequence[Checkpoint] = (),
    *,
    theme: Theme = "light",
    emulated: str | None = None,
    points: int = POINTS,
) -> go.Figure:
    """Seconds of each step, a line for each strategy, the checkpoints marked on it.

    Args:
        steps_by_strategy: of one repeat, in their order.
        checkpoints: of all these strategies; each is marked on the line of its own.
        emulated: name of the profile of an emulated device.
        points: most points of each line; of a longer one the slowest and the fastest step of each
            stretch are drawn.
    """
    series = {name: list(rows) for name, rows in steps_by_strategy.items() if rows}
    if not series:
        return nothing(TITLE, "no steps were recorded", theme=theme, emulated=emulated)
    figure = go.Figure()
    for name, rows in series.items():
        figure.add_trace(_line(name, rows, points))
    for name, rows in series.items():
        mine = [one for one in checkpoints if one.strategy == name]
        if mine:
            figure.add_trace(_marks(name, rows, mine, points))
    dress(figure, TITLE, theme=theme, emulated=emulated, inside=300, legend=2)
    _lines(figure, checkpoints)
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="seconds", ticksuffix=" s", rangemode="tozero")
    return figure


def _line(name: str, rows: Sequence[Step], points: int) -> go.Scatter:
    kept = [rows[at] for at in thin([one.seconds for one in rows], points)]
    return go.Scatter(
        name=text(name),
        legendgroup=text(name),
        x=np.array([one.step for one in kept]),
        y=np.array([one.seconds for one in kept]),
        mode="lines",
        line={"color": strategy_colour(name), "width": 1.5},
        hovertemplate=f"<b>{text(name)}</b><br>step %{{x}}: %{{y:.4f}} s<extra></extra>",
    )


def _marks(
    name: str, rows: Sequence[Step], checkpoints: Sequence[Checkpoint], points: int
) -> go.Scatter:
    """A diamond on the line at each checkpoint's step; of many those with the slowest steps."""
    seconds = {one.step: one.seconds for one in rows}
    there = [one for one in checkpoints if one.step in seconds]
    kept = [there[at] for at in thin([seconds[one.step] for one in there], points)]
    return go.Scatter(
        name="checkpoint",
        legendgroup=text(name),
        showlegend=False,
        x=[one.step for one in kept],
        y=[seconds[one.step] for one in kept],
        mode="markers",
        marker={"color": strategy_colour(name), "symbol": "diamond", "size": 9},
        hovertext=[_words(one) for one in kept],
        hoverinfo="text",
    )


def _words(one: Checkpoint) -> str:
    many = f"{one.windows} window{'' if one.windows == 1 else 's'}"
    lines = [
        f"<b>{text(one.strategy)}</b>, checkpoint of step {one.step}",
        f"over {many}, blocked training for {units.seconds(one.blocked_s)}",
        "never committed" if one.durable_s is None and one.proof is None
        else f"durable after {units.seconds(one.durable_s)}",
    ]  # fmt: skip
    if one.fallback:
        lines.append(f"in one window, because {text(one.fallback)}")
    return "<br>".join(lines)


def _lines(figure: go.Figure, checkpoints: Sequence[Checkpoint]) -> None:
    targets = sorted({one.step for one in checkpoints})
    if len(targets) > LINES:
        return
    line = {"color": strategy_colour("none"), "width": 1, "dash": "dot"}
    figure.update_layout(
        shapes=[
            {"type": "line", "x0": step, "x1": step, "yref": "paper", "y0": 0, "y1": 1,
             "line": line, "opacity": 0.7}
            for step in targets
        ]
    )  # fmt: skip
