"""Two or more benches beside each other: every figure, the difference, and if it means anything.

Pure functions of rows, by the rules of :mod:`gockpt.dashboard.figures.compare`: what was measured
several times has a 95 % interval, by bootstrap over the repeats; what follows from the loop's time
and was measured once has that of the machine's noise, four times the difference between the two
runs without checkpoints. Where neither is known a difference is shown without a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gockpt.dashboard.figures.compare import bootstrap
from gockpt.dashboard.metrics import METRICS, Metric
from gockpt.results import Result, Run
from gockpt.results.noise import least, spread_of

Verdict = Literal["better", "worse", "not decided", "unknown", ""]

OF_THE_LOOP = ("throughput", "loop", "wall", "tokens", "step")
"""Figures that the noise of the loop's time tells the noise of."""

SAMPLED = {
    "throughput": "relative_throughput",
    "blocked": "blocked_s_per_checkpoint",
    "excess": "excess_s_per_checkpoint",
    "drain": "drain_s",
}
"""Figures of which a row keeps every repeat, and the names that they have there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the runs that are compared."""

    run: Run
    results: Sequence[Result]

    def of(self, strategy: str) -> Result | None:
        """The row of this strategy that counts."""
        return next((one for one in self.results if one.strategy == strategy and one.valid), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure of one run, and how it differs from the first run's."""

    value: float | None
    change: float | None = None
    """As a share of the first run's value."""
    low: float | None = None
    """Of the interval of the difference, in the figure's own unit; None: not known."""
    high: float | None = None
    verdict: Verdict = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure of one strategy, for each run."""

    metric: Metric
    cells: Sequence[Cell]


def compare(sides: Sequence[Side]) -> dict[str, list[Line]]:
    """All figures by strategy, of those that more than one run has."""
    counts: dict[str, int] = {}
    for side in sides:
        for name in dict.fromkeys(one.strategy for one in side.results if one.valid):
            counts[name] = counts.get(name, 0) + 1
    shared = [name for name, number in counts.items() if number > 1 and name != "none"]
    return {name: [one for one in _lines(sides, name) if _any(one)] for name in shared}


def _any(line: Line) -> bool:
    return any(cell.value is not None for cell in line.cells)


def _lines(sides: Sequence[Side], strategy: str) -> list[Line]:
    return [
        Line(metric=metric, cells=_cells(sides, strategy, metric)) for metric in METRICS.values()
    ]


def _cells(sides: Sequence[Side], strategy: str, metric: Metric) -> list[Cell]:
    rows = [side.of(strategy) for side in sides]
    values = [None if row is None else metric.read(row.row) for row in rows]
    first = values[0]
    found = [Cell(value=first)]
    for side, row, value in zip(sides[1:], rows[1:], values[1:], strict=True):
        if value is None or first is None or row is None or rows[0] is None:
            found.append(Cell(value=value))
            continue
        change = (value - first) / abs(first) if first else None
        interval = _interval(metric, (sides[0], rows[0]), (side, row), value - first)
        verdict = _verdict(metric, value - first, interval)
        low, high = interval or (None, None)
        found.append(Cell(value=value, change=change, low=low, high=high, verdict=verdict))
    return found


def _interval(
    metric: Metric, base: tuple[Side, Result], other: tuple[Side, Result], difference: float
) -> tuple[float, float] | None:
    """Between which the true difference most likely lies; None where that is not known."""
    low, high = bootstrap(np.array(_repeats(metric, other[1])), np.array(_repeats(metric, base[1])))
    if low is not None and high is not None:
        return low, high
    spreads = [spread_of(side.results) for side, _ in (base, other)]
    if metric.key not in OF_THE_LOOP or None in spreads:
        return None
    level = abs(metric.read(base[1].row) or 0.0)
    wide = least(max(one for one in spreads if one is not None)) * level
    return difference - wide, difference + wide


def _repeats(metric: Metric, row: Result) -> list[float]:
    samples = row.row.get("samples")
    name = SAMPLED.get(metric.key)
    values = samples.get(name) if isinstance(samples, Mapping) and name else None
    return [float(one) for one in values or () if isinstance(one, int | float)]


def _verdict(metric: Metric, difference: float, interval: tuple[float, float] | None) -> Verdict:
    if metric.better == "neither":
        return ""
    if difference == 0:
        return "not decided"
    if interval is None:
        return "unknown"
    if interval[0] <= 0 <= interval[1]:
        return "not decided"
    return "better" if (difference > 0) == (metric.better == "higher") else "worse"
