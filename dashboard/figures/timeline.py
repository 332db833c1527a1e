"""One checkpoint, drawn as lanes on a time axis: what ran when, and what training waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from gockpt import units
from gockpt.dashboard.figures.lanes import (
    COLOURS,
    LANES,
    Stretch,
    stretches,
    windows,
    without_stalls,
)
from gockpt.dashboard.figures.look import Stack, Theme, dress, nothing, strategy_colour, text
from gockpt.results import SpanRow

TITLE = "Timeline of a checkpoint"
VISIBLE = 1 / 4000
"""Gaps shorter than this share of the axis are not drawn: no screen would show them."""

LANE_HEIGHT, HEAD = 26, 56
"""Pixels of a lane, and between two strategies."""

_SHADE = {
    "type": "rect", "y0": 0, "y1": 1, "fillcolor": COLOURS["state"], "opacity": 0.13,
    "line": {"width": 0}, "layer": "below",
}  # fmt: skip
_NUMBER = {"y": 1, "yanchor": "bottom", "showarrow": False, "font": {"size": 10}}


def timeline(
    lanes: Mapping[str, Sequence[SpanRow]], *, theme: Theme = "light", emulated: str | None = None
) -> go.Figure:
    """The spans of one checkpoint of each strategy, under each other on one time axis.

    Time 0 is the opening of the first window; the windows are shaded.

    Args:
        lanes: strategy → spans of one checkpoint
            (:func:`gockpt.dashboard.figures.lanes.of_checkpoint`).
        emulated: name of the profile of an emulated device.
    """
    lanes = {name: list(spans) for name, spans in lanes.items() if spans}
    if not lanes:
        return nothing(TITLE, "no spans were recorded", theme=theme, emulated=emulated)
    used = [_used(spans) for spans in lanes.values()]
    stack = Stack(panels=[LANE_HEIGHT * len(one) for one in used], gap=HEAD)
    figure = stack.subplots([text(name) for name in lanes], shared_xaxes=True)
    longest = max(_length(spans) for spans in lanes.values())
    named: set[str] = set()
    for row, (spans, present) in enumerate(zip(lanes.values(), used, strict=True), 1):
        _draw(figure, row, spans, present, longest * VISIBLE, named)
    dress(figure, TITLE, theme=theme, emulated=emulated, inside=stack.inside, head=32, legend=3)
    for note, name in zip(figure.layout.annotations, lanes, strict=False):
        note.font.color = strategy_colour(name)
        note.yshift = 14  # the windows' numbers are below it
    _mark_windows(figure, lanes)
    figure.update_layout(barmode="overlay", bargap=0.22, dragmode="zoom", hovermode="closest")
    figure.update_xaxes(range=[-0.01 * longest, 1.01 * longest], ticksuffix=" s")
    figure.update_xaxes(title="seconds since the first window opened", row=len(lanes), col=1)
    figure.update_yaxes(fixedrange=True, showgrid=False)
    return figure


def _used(spans: Sequence[SpanRow]) -> list[str]:
    """The lanes that occur, in their order; the stall always, so that its absence is seen."""
    there = {one.lane for one in spans} | {"stall"}
    return [lane for lane in LANES if lane in there]


def _zero(spans: Sequence[SpanRow]) -> float:
    """When the first window opened: the first span, or the end of the phase that it cut."""
    opened = windows(spans)
    first = min(one.start for one in spans)
    return opened[0].start if opened else first


def _length(spans: Sequence[SpanRow]) -> float:
    return max(one.end for one in spans) - _zero(spans)


def _draw(
    figure: go.Figure,
    row: int,
    spans: Sequence[SpanRow],
    present: Sequence[str],
    gap: float,
    named: set[str],
) -> None:
    zero = _zero(spans)
    order = [LANES[lane] for lane in present]
    at_work = without_stalls(spans)
    for kind in COLOURS:
        mine = [one for one in at_work if _kind(one) == kind]
        if mine:
            joined = stretches(mine, gap)
            figure.add_trace(_bars(kind, mine[0].lane, joined, zero, kind not in named), row, 1)
            named.add(kind)
    figure.update_yaxes(
        categoryorder="array", categoryarray=order, row=row, col=1,
        range=[len(order) - 0.5, -0.5], type="category",
    )  # fmt: skip


def _kind(span: SpanRow) -> str:
    return span.name if span.lane == "compute" else span.lane


def _bars(kind: str, lane: str, joined: Sequence[Stretch], zero: float, in_legend: bool) -> go.Bar:
    return go.Bar(
        name=kind if lane == "compute" else LANES[lane],
        legendgroup=kind,
        legendrank=list(COLOURS).index(kind),
        showlegend=in_legend,
        orientation="h",
        base=[one.start - zero for one in joined],
        x=[one.end - one.start for one in joined],
        y=[LANES[lane]] * len(joined),
        marker={"color": COLOURS[kind], "line": {"width": 0}},
        hovertext=[_words(kind, lane, one, zero) for one in joined],
        hoverinfo="text",
    )


def _words(kind: str, lane: str, one: Stretch, zero: float) -> str:
    name = kind if lane == "compute" else LANES[lane]
    parts = "" if one.count == 1 else f" in {one.count} parts"
    return (
        f"<b>{name}</b>, step {one.step}<br>{units.seconds(one.busy)}{parts}"
        f"<br>from {one.start - zero:.3f} s to {one.end - zero:.3f} s"
    )


def _mark_windows(figure: go.Figure, lanes: Mapping[str, Sequence[SpanRow]]) -> None:
    """Shade the windows and number them. Given to Plotly at once, as one by one takes it long."""
    shapes, notes = [], list(figure.layout.annotations)
    for row, spans in enumerate(lanes.values(), 1):
        axis = "" if row == 1 else str(row)
        place = {"xref": f"x{axis}", "yref": f"y{axis} domain"}
        for number, window in enumerate(windows(spans), 1):
            start, end = window.start - _zero(spans), window.end - _zero(spans)
            shapes.append({**place, "x0": start, "x1": end, **_SHADE})
            notes.append({**place, "x": (start + end) / 2, "text": str(number), **_NUMBER})
    figure.update_layout(shapes=shapes, annotations=notes)
