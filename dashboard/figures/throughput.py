"""What is left of the throughput of a training that saves nothing."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gockpt import units
from gockpt.dashboard.figures import rows
from gockpt.dashboard.figures.look import Theme, dress, nothing, strategy_colour, text
from gockpt.results import Result

TITLE = "Throughput beside the ideal"
ROOM = 0.06
"""Share of the axis left free on its sides."""


def throughput(
    results: Sequence[Result], *, theme: Theme = "light", emulated: str | None = None
) -> go.Figure:
    """Throughput of each strategy in percent of ``none``, with the machine's noise as a band.

    The axis begins near the slowest strategy, not at 0, so that the others can be told apart; so
    there are points and no bars.

    Args:
        results: rows of one bench. Error bars show the smallest and the largest repeat.
        emulated: name of the profile of an emulated device.
    """
    emulated = rows.profile_of(results, emulated)
    shown = [one for one in rows.drawn(results) if one.relative_throughput is not None]
    if not shown:
        return nothing(TITLE, "no strategy was measured", theme=theme, emulated=emulated)
    noise = rows.noise(results)
    figure = go.Figure()
    for one in shown:
        figure.add_trace(_lost(one))
    figure.add_trace(_points(shown, noise))
    dress(figure, TITLE, theme=theme, emulated=emulated, inside=46 * len(shown), head=14)
    _mark_ideal(figure, noise)
    least, most = min(map(_percent, shown)), max(100.0, *map(_percent, shown))
    room = ROOM * max(most - least, 2)
    figure.update_xaxes(
        title="percent of the throughput without checkpoints",
        ticksuffix=" %",
        range=[least - room, most + room],
    )
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _percent(one: Result) -> float:
    return 100 * (one.relative_throughput or 0.0)


def _lost(one: Result) -> go.Scatter:
    """A line from the ideal to the strategy."""
    return go.Scatter(
        x=[100, _percent(one)],
        y=[rows.label(one)] * 2,
        mode="lines",
        line={"color": strategy_colour(one.strategy), "width": 3},
        hoverinfo="skip",
    )


def _points(shown: list[Result], noise: float | None) -> go.Scatter:
    values = [_percent(one) for one in shown]
    turn = (min(values) + 100) / 2  # beyond it the words go to the other side
    repeats = [[100 * v for v in rows.samples(one, "relative_throughput")] for one in shown]
    return go.Scatter(
        x=values,
        y=rows.labels(shown),
        mode="markers+text",
        marker={"color": [strategy_colour(one.strategy) for one in shown], "size": 13},
        error_x=rows.spread(values, repeats),
        text=[f"{value:.2f} %" for value in values],
        textposition=["top right" if value < turn else "top left" for value in values],
        hovertext=[_words(one, noise) for one in shown],
        hoverinfo="text",
        cliponaxis=False,
    )


def _words(one: Result, noise: float | None) -> str:
    relative = one.relative_throughput or 0.0
    lines = [f"<b>{text(one.strategy)}</b>"]
    if noise is not None and abs(1 - relative) <= noise:
        lines.append("not decided: within the noise of this machine")
    else:
        lines.append(f"training took {units.percent(1 / relative - 1, 2)} longer than without")
    wall = rows.get(one, "tokens_per_s", "wall")
    loop = rows.get(one, "tokens_per_s", "loop")
    if loop is not None and wall is not None:
        lines.append(f"{loop:,.0f} tokens a second; {wall:,.0f} if the wait for the disk counts")
    return "<br>".join(lines)


def _mark_ideal(figure: go.Figure, noise: float | None) -> None:
    figure.add_vline(x=100, line={"color": strategy_colour("none"), "width": 1.5, "dash": "dot"})
    if noise is None:
        return
    figure.add_vrect(
        x0=100 - 100 * noise,
        x1=100 + 100 * noise,
        fillcolor=strategy_colour("none"),
        opacity=0.18,
        line_width=0,
        layer="below",
        annotation={"text": "noise", "font": {"size": 11}, "yanchor": "bottom", "y": 1},
        annotation_position="top",
    )
