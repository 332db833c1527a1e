"""Absolute limits: ``stall_ratio_vs_async_o <= 0.05``, ``identical == verified``. Pure.

A limit is a figure, a comparison and a number or another figure, after the strategy that it is of
(without one: of each that the gate looks at), or after ``recovery`` for the trials of a crash test.
A limit is held against what was measured as it is: there is no noise in a promise.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gockpt.errors import ConfigError, suggestion
from gockpt.results.ratios import (
    COUNTS,
    METRICS,
    RATIO,
    TRIALS,
    Json,
    Series,
    count,
    metric_of,
    series,
    trials,
)
from gockpt.results.verdicts import Finding, Outcome

RECOVERY = "recovery"
DEFAULT = {
    "bench": ("committed == requested", "identical == verified"),
    "crash-test": (f"{RECOVERY} passed == trials",),
}
"""What is asked of every run; not ``identical`` where the proof itself may be ``close`` (CUDA)."""

_FORM = re.compile(r"(?:([\w.-]+)\s+)?(\w+)\s*(<=|>=|==|<|>)\s*([\w.+-]+)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit that can be checked."""

    text: str
    of: str | None
    """A strategy, ``recovery``, or None: every strategy that the gate looks at."""
    figure: str
    comparison: str
    bound: float | str
    """A number, or the name of another figure."""


def parse(text: str) -> Limit:
    """
    Raises:
        ConfigError: it is not a limit, or names a figure that there is not.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"limit {text!r}: not a limit; write it as 'identical == verified'")
    of, figure, comparison, right = found.groups()
    try:
        bound: float | str = float(right)
    except ValueError:
        bound = right
    if isinstance(bound, float) and not math.isfinite(bound):
        raise ConfigError(f"limit {text!r}: {right} is no bound; give a finite number")
    known = TRIALS if of == RECOVERY else (*METRICS, *COUNTS)
    for name in (figure, bound):
        if isinstance(name, str):
            _check_name(text, name, known, ratios=of != RECOVERY)
    return Limit(text=text.strip(), of=of, figure=figure, comparison=comparison, bound=bound)


def defaults(document: Json) -> list[Limit]:
    """The limits that hold where the user names none."""
    on_cuda = str((document.get("environment") or {}).get("device")).startswith("cuda")
    texts = DEFAULT.get(document["kind"], ())
    return [parse(one) for one in texts if not (on_cuda and "identical" in one)]


def _check_name(text: str, name: str, known: Sequence[str], *, ratios: bool) -> None:
    if name in known or (ratios and RATIO.fullmatch(name) and metric_of(name)):
        return
    hint = suggestion(name, known, otherwise="there are")
    raise ConfigError(f"limit {text!r}: no figure {name!r}; {hint}")


def check(document: Json, limits: Sequence[Limit], strategies: Sequence[str]) -> list[Finding]:
    """Hold a run against its limits."""
    found = []
    for limit in limits:
        if (limit.of == RECOVERY) != (document["kind"] == "crash-test"):
            found.append(_skipped(limit, document["kind"]))
            continue
        of = strategies if limit.of is None else (limit.of,)
        found += [_checked(document, limit, strategy) for strategy in of]
    return found


def _skipped(limit: Limit, kind: str) -> Finding:
    return Finding(
        strategy=limit.of or "–",
        metric=limit.text,
        outcome=Outcome.SKIPPED,
        detail=f"the run is a {kind}, and this is no figure of one",
    )


def _checked(document: Json, limit: Limit, strategy: str) -> Finding:
    mine = _figure(document, strategy, limit.figure)
    bound = limit.bound
    other = (
        Series(values=[bound]) if isinstance(bound, float) else _figure(document, strategy, bound)
    )
    value, against = mine.median, other.median
    if value is None or against is None:
        gone = mine.problem or other.problem
        return Finding(
            strategy=strategy,
            metric=limit.text,
            outcome=Outcome.MISSING if gone else Outcome.UNKNOWN,
            detail=gone or "; ".join([*mine.lost, *other.lost]) or "no round counts",
        )
    held = _COMPARE[limit.comparison](value, against)
    return Finding(
        strategy=strategy,
        metric=limit.text,
        outcome=Outcome.GOOD if held else Outcome.BROKEN,
        detail=f"{value:.6g} against {against:.6g}",
        current=value,
    )


def _figure(document: Json, strategy: str, name: str) -> Series:
    if strategy == RECOVERY:
        return trials(document, name)
    return count(document, strategy, name) if name in COUNTS else series(document, strategy, name)
