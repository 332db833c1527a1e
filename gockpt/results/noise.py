"""When a difference in throughput may be claimed: the rule of docs/metrics.md, in one place.

Pure functions; used by the table of the bench and by the dashboard.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from gockpt.results.models import Result

DECIDED = 4.0
"""How many times the difference between the two ``none`` a difference must be to be claimed."""


def mean_and_spread(loops: Sequence[float]) -> tuple[float | None, float | None]:
    """Of the loop times of ``none``, in seconds.

    Returns:
        Their mean (None: there are none), and the difference between the first and the last as a
        share of it (None: there is only one).
    """
    if not loops:
        return None, None
    mean = statistics.fmean(loops)
    return mean, abs(loops[0] - loops[-1]) / mean if len(loops) > 1 else None


def spread_of(results: Iterable[Result]) -> float | None:
    """How far the runs without checkpoints are apart, as a share; None where there are not two."""
    loops = [one.loop_s for one in results if one.strategy == "none" and one.loop_s]
    return mean_and_spread(loops)[1]


def least(spread: float) -> float:
    """The difference that a throughput must exceed, as a share of that of ``none``."""
    return DECIDED * spread


def decided(relative: float | None, spread: float | None) -> bool:
    """Whether a throughput, as a share of that of ``none``, differs from it by more than noise."""
    return relative is not None and spread is not None and abs(1 - relative) > least(spread)
