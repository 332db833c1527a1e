"""What each strategy would cost, before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from gockpt import units
from gockpt.dashboard.figures.look import (
    SUBTITLE,
    Stack,
    Theme,
    dress,
    nothing,
    room,
    strategy_colour,
    text,
)

TITLE = "Predicted costs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one strategy."""

    strategy: str
    windows: int
    """K; 0: no checkpoints."""
    traffic_factor: float
    """All bytes over the link, over those of the state."""
    memory_bytes: float
    """Of the host."""
    stall_s: float
    """Of one checkpoint."""
    goodput: float
    """Expected share of the time that is useful work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    title: str
    value: Callable[[Prediction], float]
    words: Callable[[float], str]


_PANELS = (
    _Panel(title="stall of a checkpoint, seconds", value=lambda p: p.stall_s, words=units.seconds),
    _Panel(
        title="useful work, percent of the time",
        value=lambda p: 100 * p.goodput,
        words=lambda v: f"{v:.2f} %",
    ),
    _Panel(title="windows (K)", value=lambda p: p.windows, words=lambda v: f"{v:.0f}"),
    _Panel(
        title="traffic, times the state",
        value=lambda p: p.traffic_factor,
        words=lambda v: f"{v:.2f}×",
    ),
    _Panel(title="host memory, bytes", value=lambda p: p.memory_bytes, words=units.size),
)


def plan(
    predictions: Sequence[Prediction], *, theme: Theme = "light", emulated: str | None = None
) -> go.Figure:
    """Stall, goodput, windows, traffic and memory of each strategy, one above the other.

    Args:
        predictions: one for each strategy.
        emulated: name of the profile whose figures they are made from.
    """
    if not predictions:
        return nothing(TITLE, "nothing to predict", theme=theme)
    stack = Stack(panels=[10 + 28 * len(predictions)] * len(_PANELS), gap=36)
    figure = stack.subplots([one.title for one in _PANELS])
    for row, panel in enumerate(_PANELS, 1):
        figure.add_trace(_bars(panel, predictions), row=row, col=1)
        figure.update_xaxes(range=room(map(panel.value, predictions)), row=row, col=1)
    dress(figure, TITLE, theme=theme, emulated=None, inside=stack.inside, head=16 + SUBTITLE)
    source = "" if emulated is None else f" from the figures of {text(emulated)}"
    figure.update_layout(
        title={"subtitle": {"text": f"calculated{source}, nothing was run"}},
    )
    figure.update_xaxes(
        showticklabels=False,
        showgrid=False,
    )
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _bars(panel: _Panel, predictions: Sequence[Prediction]) -> go.Bar:
    values = [panel.value(one) for one in predictions]
    words = [panel.words(value) for value in values]
    return go.Bar(
        orientation="h",
        x=values,
        y=[text(one.strategy) for one in predictions],
        marker={"color": [strategy_colour(one.strategy) for one in predictions]},
        text=words,
        textposition="outside",
        cliponaxis=False,
        hovertext=[
            f"<b>{text(one.strategy)}</b><br>{panel.title}: {word}"
            for one, word in zip(predictions, words, strict=True)
        ],
        hoverinfo="text",
    )
