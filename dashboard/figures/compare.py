"""Two or more runs beside each other: what changed, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from gockpt.dashboard.figures import rows
from gockpt.dashboard.figures.look import Stack, Theme, dress, nothing, strategy_colour, text
from gockpt.results import Result

TITLE = "What changed"
DRAWS = 4000
"""Samples of the bootstrap."""

COVERED = (2.5, 97.5)
"""Percentiles between which the difference lies in 95 of 100 cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of the runs."""

    label: str
    results: Sequence[Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of one strategy, in one run less in the first run."""

    label: str
    strategy: str
    value: float
    low: float | None
    """Of the 95 % interval; None: only one repeat, so nothing is known of it."""
    high: float | None

    @property
    def decided(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What is compared; of the samples in a row."""

    name: str
    title: str
    unit: str
    factor: float = 1.0


METRICS = (
    Metric(
        name="relative_throughput",
        title="throughput (right is better)",
        unit="percentage points",
        factor=100,
    ),
    Metric(name="blocked_s_per_checkpoint", title="blocked (left is better)", unit="seconds"),
    Metric(name="drain_s", title="drain at the end (left is better)", unit="seconds"),
)


def compare(
    runs: Sequence[Compared], *, theme: Theme = "light", emulated: str | None = None
) -> go.Figure:
    """Differences of each strategy to the first run, with the interval in which they lie.

    The interval is a bootstrap over the repeats. Throughput that was measured once has that of the
    noise rule instead: 4 × the difference between the two ``none`` of either run. A difference is
    drawn hollow unless its interval leaves 0 out. Rows that are invalid do not count.

    Args:
        runs: at least two; the first is what the others are compared with.
        emulated: name of the profile, if any run was emulated.
    """
    found = {metric: differences(runs, metric) for metric in METRICS}
    found = {metric: rows_ for metric, rows_ in found.items() if rows_}
    if not found:
        why = "choose two or more runs that have a strategy in common"
        return nothing(TITLE, why, theme=theme, emulated=emulated)
    lines = max(len(rows_) for rows_ in found.values())
    stack = Stack(panels=[12 + 30 * lines] * len(found))
    figure = stack.subplots([metric.title for metric in found])
    for row, (metric, rows_) in enumerate(found.items(), 1):
        for strategy in dict.fromkeys(one.strategy for one in rows_):
            mine = [one for one in rows_ if one.strategy == strategy]
            figure.add_trace(_points(mine, metric, lines_named=len(runs) > 2), row=row, col=1)
        figure.update_xaxes(title=f"difference, {metric.unit}", row=row, col=1)
    title = f"{TITLE} since {text(runs[0].label)}"
    dress(figure, title, theme=theme, emulated=emulated, inside=stack.inside, head=16)
    figure.update_xaxes(zeroline=True, zerolinewidth=2, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def differences(runs: Sequence[Compared], metric: Metric) -> list[Difference]:
    """Of every strategy that the first run and a later one have, in the order of the first."""
    if len(runs) < 2:
        return []
    first = _by_strategy(runs[0])
    later = [(run, _by_strategy(run)) for run in runs[1:]]
    made = [
        _difference(run, mine[name], runs[0], first[name], metric)
        for name in first
        for run, mine in later
        if name in mine
    ]
    return [one for one in made if one is not None]


def _by_strategy(run: Compared) -> Mapping[str, Result]:
    return {one.strategy: one for one in rows.drawn(run.results) if one.valid}


def _difference(
    run: Compared, one: Result, base: Compared, other: Result, metric: Metric
) -> Difference | None:
    ours = metric.factor * np.array(rows.samples(one, metric.name))
    theirs = metric.factor * np.array(rows.samples(other, metric.name))
    if not len(ours) or not len(theirs):
        return None
    value = float(ours.mean() - theirs.mean())
    low, high = bootstrap(ours, theirs)
    if low is None and metric.name == "relative_throughput":
        low, high = _by_noise(value, metric.factor, run, base)
    return Difference(label=run.label, strategy=one.strategy, value=value, low=low, high=high)


def bootstrap(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], *, draws: int = DRAWS, seed: int = 0
) -> tuple[float | None, float | None]:
    """The 95 % interval of the difference of two means, by the percentile bootstrap.

    Each side is drawn again from its own repeats (B. Efron, "Bootstrap methods: another look at the
    jackknife", Annals of Statistics 7, 1979). The same samples always give the same interval.

    Returns:
        None, None if either side has fewer than two repeats.
    """
    if len(ours) < 2 or len(theirs) < 2:
        return None, None
    chance = np.random.default_rng(seed)
    means = [
        side[chance.integers(len(side), size=(draws, len(side)))].mean(axis=1)
        for side in (ours, theirs)
    ]
    low, high = np.percentile(means[0] - means[1], COVERED)
    return float(low), float(high)


def _by_noise(
    value: float, factor: float, run: Compared, base: Compared
) -> tuple[float | None, float | None]:
    found = [rows.noise(one.results) for one in (run, base)]
    known = [one for one in found if one is not None]
    if len(known) < 2:
        return None, None
    wide = factor * max(known)
    return value - wide, value + wide


def _points(mine: Sequence[Difference], metric: Metric, *, lines_named: bool) -> go.Scatter:
    names = [
        f"{text(one.strategy)}, {text(one.label)}" if lines_named else text(one.strategy)
        for one in mine
    ]
    colour = strategy_colour(mine[0].strategy)
    return go.Scatter(
        x=[one.value for one in mine],
        y=names,
        mode="markers",
        marker={
            "color": colour,
            "size": 12,
            "symbol": ["circle" if one.decided else "circle-open" for one in mine],
            "line": {"width": 2},
        },
        error_x=_whiskers(mine),
        hovertext=[_words(one, metric) for one in mine],
        hoverinfo="text",
    )


def _whiskers(mine: Sequence[Difference]) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [None if one.high is None else one.high - one.value for one in mine],
        "arrayminus": [None if one.low is None else one.value - one.low for one in mine],
        "thickness": 2,
    }


def _words(one: Difference, metric: Metric) -> str:
    head = f"<b>{text(one.strategy)}</b>, {text(one.label)}<br>{one.value:+.4g} {metric.unit}"
    if one.low is None or one.high is None:
        return f"{head}<br>measured once: how sure it is, is not known"
    between = f"{head}<br>most likely between {one.low:+.4g} and {one.high:+.4g}"
    return between if one.decided else f"{between}<br>so nothing may have changed"
