"""How all figures look: one colour for each strategy and lane, a template for light and for dark.

Pure; used by every figure, in whichever process draws them. What always holds: nothing in a figure
but its template depends on the theme, so a page may exchange ``layout.template`` alone; the
background is the page's own; names that come from a database are escaped (:func:`text`), as Plotly
takes labels for a kind of HTML; no trace is drawn by WebGL, which needs a laxer content policy.
"""

from __future__ import annotations

import html
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import plotly.graph_objects as go
from plotly.subplots import make_subplots

Theme: TypeAlias = Literal["light", "dark"]

STRATEGY_COLOURS = {
    "none": "#7A7F85",
    "sync": "#C23528",
    "async": "#E07F10",
    "async-o": "#2098E0",
    "gockpt-paper": "#C040A8",
    "gockpt-o-paper": "#7F4BDB",
    "gockpt": "#33A566",
}
"""Told apart with any of the common kinds of colour blindness, on white and on black."""

_OTHERS = ("#A0785A", "#6B8E23", "#5F7F8C", "#B5555A")
"""For other people's engines; the same one always gets the same."""

PASSED, FAILED, SKIPPED = "#2E86AB", "#C23528", "#7A7F85"
"""Blue and vermilion: told apart where red and green are not."""

LEFT, RIGHT, TOP, BOTTOM = 8, 20, 48, 56
"""Margins in pixels; axis labels make the left one wider, a legend the bottom one higher."""

AXIS = 50
"""Pixels of an axis with its title."""

SUBTITLE = 24
"""Pixels of the line below the title."""

LEGEND_LINE = 26
"""Pixels of one line of a legend."""


def strategy_colour(name: str) -> str:
    """The colour of a strategy, the same in all figures."""
    known = STRATEGY_COLOURS.get(name)
    return known or _OTHERS[zlib.crc32(name.encode()) % len(_OTHERS)]


def text(name: object) -> str:
    """A name as Plotly shows it as it is: labels are a kind of HTML."""
    return html.escape(str(name), quote=False)


def _template(ink: str, faint: str, grid: str, paper: str) -> go.layout.Template:
    axis = {
        "gridcolor": grid,
        "linecolor": grid,
        "zerolinecolor": faint,
        "zerolinewidth": 1,
        "automargin": True,
        "title": {"font": {"size": 12, "color": faint}, "standoff": 8},
        "tickfont": {"size": 12},
    }
    layout: dict[str, Any] = {
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": ink},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": axis,
        "yaxis": {**axis, "ticklabelstandoff": 4},
        "hoverlabel": {
            "bgcolor": paper,
            "bordercolor": faint,
            "font": {"color": ink, "size": 12},
            "align": "left",
        },
        "annotationdefaults": {"font": {"color": ink, "size": 12}, "arrowcolor": faint},
        "title": {"subtitle": {"font": {"color": faint, "size": 12}}},
        "modebar": {
            "bgcolor": "rgba(0,0,0,0)",
            "color": faint,
            "activecolor": ink,
            "remove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
        },
    }
    return go.layout.Template(layout=layout)


CONFIG = {"displaylogo": False, "responsive": True, "showSendToCloud": False}
"""For Plotly's own code in the page: without the last one it offers to send figures elsewhere."""

TEMPLATES = {
    "light": _template(ink="#1F2328", faint="#59636E", grid="#E1E4E8", paper="#FFFFFF"),
    "dark": _template(ink="#E6EDF3", faint="#9BA6B1", grid="#30363D", paper="#1C2128"),
}
"""By theme. A page that changes its theme gives its figures the other one."""


def dress(
    figure: go.Figure,
    title: str,
    *,
    theme: Theme,
    emulated: str | None,
    inside: float,
    head: int = 0,
    legend: int = 0,
) -> go.Figure:
    """Give a figure its title, template and size; the width is that of its place.

    Args:
        emulated: name of the profile, if times were modelled; said below the title.
        inside: height of what is drawn, in pixels.
        head: pixels to leave free above it, for titles of panels.
        legend: lines that a legend may need on a phone; 0: it has none.
    """
    top = TOP + head + (SUBTITLE if emulated is not None else 0)
    bottom = BOTTOM + LEGEND_LINE * legend
    subtitle = "" if emulated is None else emulated_note(emulated)
    figure.update_layout(
        template=TEMPLATES[theme],
        title={
            "text": title,
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "pad": {"l": 12, "t": 12},
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "font": {"size": 16},
            "subtitle": {"text": subtitle},
            "automargin": False,
        },
        margin={"l": LEFT, "r": RIGHT, "t": top, "b": bottom},
        height=round(top + inside + bottom),
        autosize=True,
        showlegend=legend > 0,
        bargap=0.3,
        legend={
            "orientation": "h", "yref": "paper", "y": -AXIS / inside, "yanchor": "top",
            "x": 0, "xanchor": "left", "font": {"size": 12},
        },
    )  # fmt: skip
    return figure


def room(values: Iterable[float | None]) -> list[float]:
    """The range of an axis of bars that leaves place for a number beside the longest."""
    known = [one for one in values if one is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    width = (max(high, 0.0) - min(low, 0.0)) or 1.0
    return [low - 0.22 * width if low < 0 else 0.0, max(high, 0.0) + 0.22 * width]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Panels under each other: heights in pixels turned into what Plotly wants."""

    panels: Sequence[float]
    """Heights of the panels."""
    gap: float = 74
    """Between two panels: the axis of the one, the title of the other."""

    @property
    def inside(self) -> float:
        """Height of all together."""
        return sum(self.panels) + self.gap * (len(self.panels) - 1)

    def subplots(self, titles: Sequence[str], **more: Any) -> go.Figure:
        """A figure with one column of these panels, their titles above them on the left."""
        figure = make_subplots(
            rows=len(self.panels),
            cols=1,
            row_heights=list(self.panels),
            vertical_spacing=self.gap / self.inside,
            subplot_titles=list(titles),
            **more,
        )
        figure.update_annotations(x=0, xanchor="left", font={"size": 13, "weight": 600})
        return figure


def emulated_note(profile: str) -> str:
    """What must stand beside every figure whose times were modelled."""
    return f"emulated by {text(profile)}: modelled times, not measured there"


def nothing(title: str, why: str, *, theme: Theme, emulated: str | None = None) -> go.Figure:
    """A figure with nothing in it but the reason."""
    figure = go.Figure()
    dress(figure, title, theme=theme, emulated=emulated, inside=80)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=text(why), showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    return figure
