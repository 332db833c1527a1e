"""A crash test as pages need it: the matrix, the failures, and what crashes cost each strategy.

Pure functions of trials (:class:`gockpt.results.Trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gockpt.dashboard.figures import Curve
from gockpt.dashboard.metrics import number
from gockpt.results import Trial


@dataclass(slots=True, kw_only=True)
class Cell:
    """All trials of one scenario with one strategy."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def state(self) -> str:
        """``failed`` if any did, ``passed`` if any did, else ``skipped``."""
        return "failed" if self.failed else "passed" if self.passed else "skipped"

    def add(self, passed: bool | None) -> None:
        """One more trial."""
        if passed is None:
            self.skipped += 1
        elif passed:
            self.passed += 1
        else:
            self.failed += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Scenario × strategy."""

    strategies: list[str]
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)


def matrix(trials: Sequence[Trial]) -> Matrix:
    """How each strategy fared in each scenario."""
    strategies = list(dict.fromkeys(one.strategy or "–" for one in trials))
    found = Matrix(strategies=strategies)
    for one in trials:
        row = found.rows.setdefault(one.scenario, {})
        row.setdefault(one.strategy or "–", Cell()).add(one.passed)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a crash cost one strategy on average, over all trials that were started again."""

    strategy: str
    trials: int
    lost_steps: float | None
    lost_s: float | None
    recovery_s: float


def costs(trials: Sequence[Trial]) -> list[Cost]:
    """For each strategy that recovered at least once."""
    found = []
    for name in dict.fromkeys(one.strategy or "–" for one in trials):
        rows = [one.row for one in trials if (one.strategy or "–") == name]
        ran = [row for row in rows if number(row, "recovery_s") is not None]
        if ran:
            found.append(
                Cost(
                    strategy=name,
                    trials=len(ran),
                    lost_steps=_mean(ran, "lost_steps"),
                    lost_s=_mean(ran, "lost_s"),
                    recovery_s=_mean(ran, "recovery_s") or 0.0,
                )
            )
    return found


def curves(trials: Sequence[Trial]) -> list[Curve]:
    """The same for the figure over failure rates: the work that was lost stands for its causes."""
    return [
        Curve(
            strategy=one.strategy,
            interval_s=0.0,
            stall_s=0.0,
            lag_s=one.lost_s or 0.0,
            recovery_s=one.recovery_s,
        )
        for one in costs(trials)
    ]


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [value for row in rows if (value := number(row, name)) is not None]
    return fmean(known) if known else None
