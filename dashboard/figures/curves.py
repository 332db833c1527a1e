"""How much useful work is left as failures become more frequent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from gockpt import units
from gockpt.dashboard.figures.look import Theme, dress, nothing, strategy_colour, text
from gockpt.goodput import expected_goodput

TITLE = "Useful work, by failure rate"
DAY = 86400.0
RATES = np.geomspace(0.1, 288, 97)
"""Failures a day: from one in ten days to one in five minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What :func:`gockpt.goodput.expected_goodput` needs to know of a strategy; seconds."""

    strategy: str
    interval_s: float
    """Training alone, from one checkpoint to the next; 0: it plays no part."""
    stall_s: float
    """What each checkpoint adds."""
    lag_s: float
    """From the end of the step that a checkpoint holds until it is durable."""
    recovery_s: float

    def at(self, failures_per_day: float) -> float:
        """The share of the time that is useful work."""
        return expected_goodput(
            DAY / failures_per_day,
            interval_s=self.interval_s,
            stall_s=self.stall_s,
            lag_s=self.lag_s,
            recovery_s=self.recovery_s,
        )


def goodput(
    curves: Sequence[Curve], *, theme: Theme = "light", emulated: str | None = None
) -> go.Figure:
    """Expected share of useful work against failures a day, a line for each strategy.

    Args:
        curves: may be empty.
        emulated: name of the profile of an emulated device.
    """
    if not curves:
        return nothing(TITLE, "no strategy to compare", theme=theme, emulated=emulated)
    figure = go.Figure()
    for curve in curves:
        figure.add_trace(_line(curve))
    dress(figure, TITLE, theme=theme, emulated=emulated, inside=300, legend=2)
    figure.update_layout(hovermode="x")
    figure.update_xaxes(
        type="log",
        title="failures",
        range=[math.log10(RATES[0]), math.log10(1.4 * RATES[-1])],
        ticklabeloverflow="allow",
        tickvals=[0.1, 1, 24, 288],
        ticktext=["1 in 10 days", "1 a day", "1 an hour", "12 an hour"],
    )
    figure.update_yaxes(title="useful work, percent of the time", ticksuffix=" %")
    return figure


def _line(curve: Curve) -> go.Scatter:
    shares = np.array([curve.at(rate) for rate in RATES])
    return go.Scatter(
        name=text(curve.strategy),
        x=RATES,
        y=100 * shares,
        mode="lines",
        line={"color": strategy_colour(curve.strategy), "width": 2},
        text=[units.seconds(DAY / rate) for rate in RATES],
        hovertemplate=f"<b>{text(curve.strategy)}</b>: %{{y:.2f}} % useful, "
        "a failure every %{text}<extra></extra>",
    )
