"""For how long each strategy holds up training at a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gockpt import units
from gockpt.dashboard.figures import rows
from gockpt.dashboard.figures.look import Theme, dress, nothing, room, strategy_colour, text
from gockpt.results import Result

TITLE = "Stall of a checkpoint"


def stall(
    results: Sequence[Result], *, theme: Theme = "light", emulated: str | None = None
) -> go.Figure:
    """Blocked and excess seconds per checkpoint, a pair of bars for each strategy.

    Args:
        results: rows of one bench. Error bars show the smallest and the largest repeat.
        emulated: name of the profile of an emulated device.
    """
    emulated = rows.profile_of(results, emulated)
    shown = rows.drawn(results)
    if not shown:
        return nothing(TITLE, "no strategy was measured", theme=theme, emulated=emulated)
    figure = go.Figure()
    figure.add_trace(_bars(shown, "excess", [one.excess_s_per_checkpoint for one in shown]))
    figure.add_trace(_bars(shown, "blocked", [one.blocked_s_per_checkpoint for one in shown]))
    dress(figure, TITLE, theme=theme, emulated=emulated, inside=52 * len(shown), legend=2)
    figure.update_layout(barmode="group", legend={"traceorder": "reversed"})
    both = [v for one in shown for v in (one.blocked_s_per_checkpoint, one.excess_s_per_checkpoint)]
    figure.update_xaxes(title="seconds for each checkpoint", ticksuffix=" s", range=room(both))
    figure.update_yaxes(autorange="reversed")
    return figure


_MEANING = {
    "blocked": "by the engine's own clock",
    "excess": "by the loop's time beside the run without checkpoints",
}
_LEGEND = {"blocked": "blocked (engine's clock)", "excess": "excess (loop beside none)"}


def _bars(shown: list[Result], kind: str, values: list[float | None]) -> go.Bar:
    repeats = [rows.samples(one, f"{kind}_s_per_checkpoint") for one in shown]
    return go.Bar(
        name=_LEGEND[kind],
        orientation="h",
        y=rows.labels(shown),
        x=values,
        error_x=rows.spread(values, repeats),
        marker={
            "color": [strategy_colour(one.strategy) for one in shown],
            "pattern": {"shape": "" if kind == "blocked" else "/", "fillmode": "replace"},
        },
        text=[units.seconds(value) for value in values],
        textposition="outside",
        cliponaxis=False,
        hovertext=[
            f"<b>{text(one.strategy)}</b><br>each checkpoint held training up for "
            f"{units.seconds(value)},<br>{_MEANING[kind]}"
            for one, value in zip(shown, values, strict=True)
        ],
        hoverinfo="text",
    )
