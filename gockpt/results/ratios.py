"""Which figures of a run the gate looks at: one number a round, as a ratio within that round.

Pure functions over documents of ``bench --json`` and ``crash-test --json``. What always holds: the
two numbers of a ratio are of the same round, so what slowed the machine then is in both; what is
missing, not finite or of a round that does not count is None and never a number.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gockpt.results.verdicts import Threshold

Json = Mapping[str, Any]

NONE, OURS = "none", "gockpt"
RATIO = re.compile(r"(?P<metric>[a-z]+)_ratio_vs_(?P<other>\w+)")
COUNTS = ("requested", "committed", "verified", "identical", "in_flight_max")
"""Of a row's checkpoints; for limits."""

TRIALS = ("trials", "passed", "failed", "skipped")
"""Of the summary of a crash test; for limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure that two runs are compared by."""

    sample: str
    """Its name among the samples of a row."""
    place: tuple[str, ...]
    """Where a document without such samples has it."""
    summary: str
    max_regression: float
    """This share of the baseline's value may be lost, by default."""
    floor: float = 0.0
    """A difference below this means nothing in practice. In the figure's own unit."""
    sign: int = 1
    """1 where more is worse, −1 where less is worse."""
    share: bool = True
    """Whether it is seconds, and compared as a share of a step of ``none``."""

    @property
    def threshold(self) -> Threshold:
        """The default: how much worse it may become."""
        return Threshold(max_regression=self.max_regression, floor=self.floor, sign=self.sign)


METRICS: dict[str, Metric] = {
    "throughput": Metric(
        sample="relative_throughput", place=("relative_throughput",), sign=-1, share=False,
        max_regression=0.03, summary="throughput of none that is left",
    ),
    "stall": Metric(
        sample="blocked_s_per_checkpoint", place=("stall", "blocked_s_per_checkpoint"),
        max_regression=0.05, floor=0.05, summary="training held up for each checkpoint",
    ),
    "durable": Metric(
        sample="durable_s", place=("latency_s", "durable"),
        max_regression=0.10, floor=0.10, summary="from the first window to the commit",
    ),
    "copy": Metric(
        sample="copy_s", place=("work_s", "copy"),
        max_regression=0.05, floor=0.02, summary="the link, for each checkpoint",
    ),
    "replay": Metric(
        sample="replay_s", place=("work_s", "replay"),
        max_regression=0.05, floor=0.02, summary="the replay, for each checkpoint",
    ),
    "hook": Metric(
        sample="hook_s", place=("work_s", "hook"),
        max_regression=0.05, floor=0.01, summary="ckpt.step() of an ordinary pass",
    ),
    "drain": Metric(
        sample="drain_s", place=("drain_s",),
        max_regression=0.10, floor=0.10, summary="from the last step until all is durable",
    ),
    "step": Metric(
        sample="step_s", place=("step_s", "median"),
        max_regression=0.03, summary="median of the steps",
    ),
}  # fmt: skip
"""By name. Floors of shares are in steps of ``none``."""

DEFAULT = ("throughput", "stall", "durable", "copy", "replay", "hook")
"""What is compared unless the user says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A figure of a run, one value a round."""

    values: Sequence[float | None] = ()
    problem: str | None = None
    """Why there can be none; else None."""
    lost: Sequence[str] = field(default=())
    """What is wrong with single values."""

    @property
    def known(self) -> list[float]:
        return [one for one in self.values if one is not None]

    @property
    def median(self) -> float | None:
        return statistics.median(self.known) if self.known else None


def metric_of(name: str) -> Metric | None:
    """The metric of this name, plain or ``METRIC_ratio_vs_STRATEGY``."""
    found = RATIO.fullmatch(name)
    return METRICS.get(found["metric"] if found else name)


def strategies(document: Json) -> list[str]:
    """All of a bench but ``none``, in their order."""
    names = (str(row.get("strategy")) for row in document.get("results", ()))
    return [name for name in dict.fromkeys(names) if name != NONE]


def watched(document: Json) -> tuple[str, ...]:
    """The strategies of a baseline that a gate looks at unless the user names others."""
    there = strategies(document)
    return (OURS,) if OURS in there else tuple(there)


def rows(document: Json, strategy: str) -> list[Json]:
    """The rows of a strategy: one, or two of ``none``."""
    return [row for row in document.get("results", ()) if row.get("strategy") == strategy]


def series(document: Json, strategy: str, name: str, *, absolute: bool = False) -> Series:
    """A metric of a strategy.

    Args:
        name: one of :data:`METRICS`, or ``METRIC_ratio_vs_STRATEGY``: divided by the same of
            another strategy (``-`` in its name written ``_``).
        absolute: seconds as they are, not as shares of a step of ``none``.
    """
    ratio = RATIO.fullmatch(name)
    metric = METRICS[ratio["metric"] if ratio else name]
    mine = _raw(document, strategy, metric)
    if ratio is not None:
        other = _named(document, ratio["other"])
        return _divided(mine, _raw(document, other, metric), f"{name}: of {other}")
    if absolute or not metric.share:
        return mine
    return _divided(mine, _step_of_none(document), "a step of none")


def count(document: Json, strategy: str, name: str) -> Series:
    """One of :data:`COUNTS`, of a strategy."""
    for row in rows(document, strategy):
        value = _number(_at(row, ("checkpoints", name)))
        return Series(values=[value]) if value is not None else Series(problem=_no_figures(row))
    return Series(problem=f"{strategy} is not in the run")


def trials(document: Json, name: str) -> Series:
    """One of :data:`TRIALS`. What was skipped was no trial: ``trials`` are those that ran."""
    summary = document.get("summary") or {}
    value, skipped = _number(summary.get(name)), _number(summary.get("skipped")) or 0.0
    if value is None:
        return Series(problem=f"the summary has no {name}")
    if name == "trials":
        value -= skipped
    return Series(values=[value]) if value or name != "trials" else Series(problem="no trial ran")


def _raw(document: Json, strategy: str, metric: Metric) -> Series:
    found = rows(document, strategy)
    if not found:
        return Series(problem=f"{strategy} is not in the run")
    return _of_row(found[0], metric)


def _of_row(row: Json, metric: Metric) -> Series:
    samples = row.get("samples") or {}
    place = _at(row, metric.place)
    if place is None:
        return Series(problem=_no_figures(row))
    values = samples.get(metric.sample)
    if values is None:
        values = [place if row.get("valid") else None]
    numbers = [_number(value) for value in values]
    lost = [
        f"round {n}: {value} is not a number"
        for n, (value, number) in enumerate(zip(values, numbers, strict=True), 1)
        if value is not None and number is None
    ]
    if not row.get("valid") and not any(number is not None for number in numbers):
        lost += [str(problem) for problem in row.get("problems") or ()]
    return Series(values=numbers, lost=lost)


def _no_figures(row: Json) -> str:
    problems = "; ".join(map(str, row.get("problems") or ()))
    return f"not measured{': ' + problems if problems else ''}"


def _step_of_none(document: Json) -> Series:
    """Seconds of a step without checkpoints, of each round: the faster of its two runs, as only
    somebody else can have slowed the other one."""
    both = [_of_row(row, METRICS["step"]).values for row in rows(document, NONE)]
    if not both:
        return Series(problem="none is not in the run, so there is nothing to divide by")
    rounds = zip(*both, strict=False)
    return Series(
        values=[min((one for one in each if one is not None), default=None) for each in rounds]
    )


def _divided(upper: Series, lower: Series, what: str) -> Series:
    problem = upper.problem or lower.problem
    if problem is not None:
        return Series(problem=problem)
    values = [
        None if a is None or not b else a / b
        for a, b in zip(upper.values, lower.values, strict=False)
    ]
    zero = [f"round {n}: {what} is zero" for n, b in enumerate(lower.values, 1) if b == 0]
    return Series(values=values, lost=[*upper.lost, *lower.lost, *zero])


def _named(document: Json, written: str) -> str:
    """The strategy that is written so in a metric's name."""
    for name in strategies(document):
        if name.replace("-", "_") == written:
            return name
    return written


def _at(row: Json, place: Sequence[str]) -> Any:
    value: Any = row
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of JSON has no limit
        return None
    return number if math.isfinite(number) else None
