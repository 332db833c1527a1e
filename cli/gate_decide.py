"""Whether a figure has become worse: beyond what matters, and beyond the noise.

Pure, and the same result for the same data: the bootstrap is seeded. The difference of two medians
gets a standard error by resampling the rounds of each run, corrected for how few they are, and an
interval by Student's t. What always holds: a check fails only if the difference exceeds the
threshold *and* the interval lies wholly above zero; it is good only if the interval lies wholly
below the threshold; in between there is not enough evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gockpt.results.ratios import Series
from gockpt.results.verdicts import Finding, Outcome, Threshold

FEWEST = 3
"""Rounds of each run below which nothing is known of the noise."""

DRAWS = 1000
SEED = 0


def compare(
    strategy: str,
    metric: str,
    before: Series,
    now: Series,
    threshold: Threshold,
    *,
    chance: float,
) -> Finding:
    """Compare a figure of two runs.

    Args:
        chance: of being wrong that one check may have, on either side.
    """
    finding = _unmeasured(strategy, metric, before, now)
    if finding is not None:
        return finding
    a, b = np.array(before.known), np.array(now.known)
    base, value = float(np.median(a)), float(np.median(b))
    allowed, worse = threshold.allowed(base), threshold.sign * (value - base)
    if min(len(a), len(b)) < FEWEST:
        outcome, interval = Outcome.UNKNOWN, None
        detail = (
            f"{len(a)} and {len(b)} rounds count, and it takes {FEWEST}: run `bench --repeats 5`"
        )
    else:
        margin = student(1 - chance, len(a) + len(b) - 2) * _standard_error(a, b)
        interval = (worse - margin, worse + margin)
        outcome = _verdict(worse, margin, allowed)
        detail = _said(outcome, worse, margin, allowed)
    return Finding(
        strategy=strategy,
        metric=metric,
        outcome=outcome,
        detail="; ".join(filter(None, [detail, *before.lost, *now.lost])),
        baseline=base,
        current=value,
        worse_by=worse,
        interval=interval,
        allowed=allowed,
        rounds=(len(a), len(b)),
    )


def _unmeasured(strategy: str, metric: str, before: Series, now: Series) -> Finding | None:
    """What the run lacks fails; what the baseline lacks, or a busy machine spoiled, is unknown."""
    outcome = Outcome.UNKNOWN
    if now.problem is not None or any("not a number" in one for one in now.lost):
        outcome, reason = Outcome.MISSING, now.problem or "; ".join(now.lost)
    elif before.problem is not None:
        reason = f"the baseline has no such figure: {before.problem}"
    elif not now.known:
        reason = "; ".join(now.lost) or "no round counts"
    elif not before.known:
        reason = f"the baseline: {'; '.join(before.lost) or 'no round counts'}"
    else:
        return None
    return Finding(
        strategy=strategy,
        metric=metric,
        outcome=outcome,
        detail=reason,
        baseline=before.median,
        current=now.median,
    )


def _verdict(worse: float, margin: float, allowed: float) -> Outcome:
    if worse > allowed and worse - margin > 0:
        return Outcome.WORSE
    if worse < -allowed and worse + margin < 0:
        return Outcome.IMPROVED
    return Outcome.GOOD if worse + margin <= allowed else Outcome.UNKNOWN


def _said(outcome: Outcome, worse: float, margin: float, allowed: float) -> str:
    if outcome is Outcome.UNKNOWN and worse > allowed:
        return "beyond the threshold, but within the noise"
    if outcome is Outcome.UNKNOWN:
        return "too noisy to rule a regression out"
    return ""


def _standard_error(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Of the difference of the two medians."""
    random = np.random.default_rng(SEED)
    return float(np.sqrt(_variance(a, random) + _variance(b, random)))


def _variance(values: NDArray[np.float64], random: np.random.Generator) -> float:
    """Of the median, by the bootstrap; n/(n − 1) as resampling n values loses that much."""
    number = len(values)
    drawn = values[random.integers(0, number, (DRAWS, number))]
    return float(np.var(np.median(drawn, axis=1)) * number / (number - 1))


def student(share: float, freedom: int) -> float:
    """Quantile of Student's t, from 4 degrees of freedom on (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum((term / float(freedom**n) for n, term in enumerate(terms, 1)), 0.0)


def chance_of_each(confidence: float, checks: int) -> float:
    """The chance of being wrong that each of so many checks may have (Bonferroni)."""
    return (1 - confidence) / max(1, checks)


def verdict(findings: Sequence[Finding]) -> Outcome:
    """Of the whole gate: the worst, by what a merge must know first."""
    outcomes = {one.outcome for one in findings}
    for outcome in (Outcome.WORSE, Outcome.BROKEN, Outcome.MISSING, Outcome.UNKNOWN):
        if outcome in outcomes:
            return outcome
    return Outcome.GOOD
