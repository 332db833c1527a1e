"""The paper's Table 1 from what was taken here: tokens/s where something crashes every 600 s.

Pure functions. The model is that of :mod:`gockpt.goodput`, at its best interval. What
goes into it of a strategy:

- its stall and its time to durable, of a bench on the emulated device;
- its recovery, of crash-test trials.

Lost work after a crash is half an interval and the time from the step that a checkpoint holds until
it is durable. A bench counts that time from the opening of the first of K windows, so it has the K
steps of the capture in it, and the K − 1 that pass before the step that is held are taken off.

No interval is shorter than the time from the opening of a checkpoint until it is durable: a bench
takes the stall of checkpoints that do not wait for one another.

The tokens/s are the share of useful time, times what the paper reaches without checkpoints and
crashes: the emulated step is the paper's by calibration, its tokens are not.

What always holds: a figure of the paper stands beside these and goes into none but
:func:`calibrated_restart_s`, and into what is calculated with that, which says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from gockpt.cli.paper_figures import (
    TABLE1_ASSUMED_LAG_S,
    TABLE1_IDEAL_TOKENS_PER_S,
    TABLE1_MTBF_S,
    TABLE1_NAMES,
    TABLE1_STALL_S,
    TABLE1_STEP_S,
    TABLE1_TOKENS_PER_S,
)
from gockpt.goodput import best_interval, expected_goodput

STRATEGIES = (*TABLE1_NAMES, "gockpt")
"""The paper's, and this engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What was taken of one strategy. Seconds."""

    stall_s: float
    """For each checkpoint."""
    durable_s: float
    """From the opening of its first window until it is durable."""
    windows: int
    recovery_s: float
    """From the crash to the end of the first new step."""
    trials: int
    """That ``recovery_s`` is the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One strategy of the table; None: the paper has no such figure."""

    strategy: str
    taken: Taken
    lag_s: float
    """From the end of the step that a checkpoint holds until it is durable."""
    interval: int
    """The best one, in steps."""
    tokens_per_s: float
    """With the recovery that was taken."""
    tokens_per_s_paper_restart: float
    """With :func:`calibrated_restart_s` in its place."""
    paper_stall_s: float | None
    paper_tokens_per_s: float | None
    formula_tokens_per_s: float | None
    """What the same model gives with the paper's own stall and the calibrated restart."""

    @property
    def difference(self) -> float | None:
        """Of the one with the calibrated restart to the paper's, as a share of the latter."""
        if self.paper_tokens_per_s is None:
            return None
        return self.tokens_per_s_paper_restart / self.paper_tokens_per_s - 1


def lines(taken: Mapping[str, Taken], step_s: float, mtbf: float) -> list[Line]:
    """The table.

    Args:
        taken: of each of :data:`STRATEGIES`.
        step_s: a step without checkpoints.
        mtbf: seconds between crashes. The paper has figures for 600 only.
    """
    restart = calibrated_restart_s()
    return [_line(name, taken[name], step_s, mtbf, restart) for name in STRATEGIES]


def _line(name: str, one: Taken, step_s: float, mtbf: float, restart_s: float) -> Line:
    lag = max(0.0, one.durable_s - (one.windows - 1) * step_s)
    interval = best_interval(
        mtbf, step_s=step_s, stall_s=one.stall_s, lag_s=lag, least_s=one.durable_s
    )

    def tokens(recovery_s: float) -> float:
        return TABLE1_IDEAL_TOKENS_PER_S * expected_goodput(
            mtbf,
            interval_s=interval * step_s,
            stall_s=one.stall_s,
            lag_s=lag,
            recovery_s=recovery_s,
        )

    known = name in TABLE1_NAMES and mtbf == TABLE1_MTBF_S
    return Line(
        strategy=name,
        taken=one,
        lag_s=lag,
        interval=interval,
        tokens_per_s=tokens(one.recovery_s),
        tokens_per_s_paper_restart=tokens(restart_s),
        paper_stall_s=TABLE1_STALL_S.get(name),
        paper_tokens_per_s=TABLE1_TOKENS_PER_S[name] if known else None,
        formula_tokens_per_s=formula(name, restart_s) if known else None,
    )


def formula(name: str, restart_s: float) -> float:
    """Tokens/s of the model for one of the paper's strategies, from the stall that it reports.

    Its time to durable is :data:`TABLE1_ASSUMED_LAG_S`.
    """
    stall, lag, step = TABLE1_STALL_S[name], TABLE1_ASSUMED_LAG_S, TABLE1_STEP_S
    interval = best_interval(TABLE1_MTBF_S, step_s=step, stall_s=stall, lag_s=lag, least_s=lag)
    return TABLE1_IDEAL_TOKENS_PER_S * expected_goodput(
        TABLE1_MTBF_S,
        interval_s=interval * step,
        stall_s=stall,
        lag_s=lag,
        recovery_s=restart_s,
    )


def calibrated_restart_s() -> float:
    """Seconds from a crash to the next step on the paper's machine, which the paper does not say.

    Of each of its strategies the one with which :func:`formula` gives its figure in Table 1, and of
    those the mean: one constant for all. Whatever else the paper counts is in it.
    """
    return fmean(
        TABLE1_MTBF_S * (formula(name, 0.0) / TABLE1_TOKENS_PER_S[name] - 1)
        for name in TABLE1_NAMES
    )
