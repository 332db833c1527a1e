"""One figure over time and commits, with the limits that a gate sets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from gockpt.dashboard.figures.look import (
    FAILED,
    SKIPPED,
    Theme,
    dress,
    nothing,
    strategy_colour,
    text,
)
from gockpt.dashboard.thinning import thin

POINTS = 500
"""Most points drawn of each strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one run found."""

    created: str
    """UTC, ISO 8601."""
    run_id: str
    commit: str | None
    strategy: str
    value: float
    valid: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A level that the figure is held against."""

    name: str
    value: float
    fails: bool = True
    """Whether it may not be crossed; else it is only where the limits come from."""


def trend(
    points: Sequence[Point],
    limits: Sequence[Limit] = (),
    *,
    metric: str = "relative throughput",
    unit: str = "",
    theme: Theme = "light",
    emulated: str | None = None,
) -> go.Figure:
    """A line for each strategy over the time of its runs; ``customdata`` is the run's id.

    Args:
        points: in any order.
        limits: drawn across the figure, with their names.
        metric: what the values are, in words.
        unit: of the values, for the axis; may be empty.
        emulated: name of the profile, if any run was emulated.
    """
    metric, unit = text(metric), text(unit)
    title = f"{metric[:1].upper()}{metric[1:]} over time"
    if not points:
        return nothing(title, "no runs yet; run gockpt bench", theme=theme, emulated=emulated)
    figure = go.Figure()
    for strategy in dict.fromkeys(one.strategy for one in points):
        mine = sorted((o for o in points if o.strategy == strategy), key=lambda one: one.created)
        figure.add_trace(_line(strategy, mine, unit))
    dress(figure, title, theme=theme, emulated=emulated, inside=300, legend=2)
    for limit in limits:
        figure.add_hline(
            y=limit.value,
            line={
                "color": FAILED if limit.fails else SKIPPED,
                "width": 1.5,
                "dash": "dash" if limit.fails else "dot",
            },
            annotation={"text": text(limit.name), "font": {"size": 11}},
            annotation_position="top left" if limit.fails else "top right",
        )
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(title="time of the run (UTC)", type="date")
    figure.update_yaxes(title=f"{metric}, {unit}" if unit else metric)
    return figure


def _line(strategy: str, mine: Sequence[Point], unit: str) -> go.Scatter:
    kept = [mine[at] for at in thin([one.value for one in mine], POINTS)]
    return go.Scatter(
        name=text(strategy),
        x=[one.created for one in kept],
        y=[one.value for one in kept],
        customdata=[one.run_id for one in kept],
        mode="lines+markers",
        line={"color": strategy_colour(strategy), "width": 1.5},
        marker={"size": 8, "symbol": ["circle" if one.valid else "x" for one in kept]},
        hovertext=[_words(one, unit) for one in kept],
        hoverinfo="text",
    )


def _words(one: Point, unit: str) -> str:
    commit = f", commit {text(one.commit[:10])}" if one.commit else ""
    invalid = "" if one.valid else "<br>invalid: do not count on it"
    return (
        f"<b>{text(one.strategy)}</b>: {one.value:.5g} {unit}<br>run {text(one.run_id)}"
        f"<br>{text(one.created)}{commit}{invalid}"
    )
