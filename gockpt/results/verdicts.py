"""A finished gate: its checks, what came of each, and how they are written in a table.

Pure. ``gockpt gate`` makes one (docs/ci.md says how it decides), the results database keeps it, the
dashboard shows it. What always holds: what was kept comes back as it was, or is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gockpt.errors import ConfigError

SCHEMA = 1
"""The ``schema`` of the document."""

DASH = "–"
COLUMNS = ("strategy", "check", "baseline", "run", "worse by", "allowed", "rounds", "result")


class Outcome(enum.StrEnum):
    """What came of one check."""

    GOOD = "good"
    IMPROVED = "improved"
    WORSE = "worse"
    BROKEN = "limit broken"
    MISSING = "missing"
    UNKNOWN = "not enough evidence"
    SKIPPED = "skipped"

    @property
    def fails(self) -> bool:
        """Whether it stops a merge."""
        return self in (Outcome.WORSE, Outcome.BROKEN, Outcome.MISSING)

    @property
    def open(self) -> bool:
        """Whether it could not be told."""
        return self is Outcome.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """How much worse a figure may become."""

    max_regression: float
    """As a share of the baseline's value."""
    floor: float
    """And at least this much, in the figure's own unit."""
    sign: int = 1
    """1 where more is worse, −1 where less is worse."""

    def allowed(self, baseline: float) -> float:
        """The largest difference that is no regression."""
        return max(self.max_regression * abs(baseline), self.floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check, and what came of it."""

    strategy: str
    metric: str
    outcome: Outcome
    detail: str
    baseline: float | None = None
    current: float | None = None
    worse_by: float | None = None
    """The difference, positive where it is worse; with the interval in which it lies."""
    interval: tuple[float, float] | None = None
    allowed: float | None = None
    rounds: tuple[int, int] | None = None
    """That counted, of the baseline and of the run."""

    @property
    def cells(self) -> list[str]:
        """Its line of the table, a text for each of :data:`COLUMNS`."""
        rounds = f"{self.rounds[0]} : {self.rounds[1]}" if self.rounds else DASH
        return [
            self.strategy,
            self.metric,
            written(self.baseline),
            written(self.current),
            self.worse,
            DASH if self.allowed is None else f"{self.allowed:.3g}",
            rounds,
            f"{self.outcome}{': ' + self.detail if self.detail else ''}",
        ]

    @property
    def worse(self) -> str:
        """``+12.0 % ± 3.1 %`` of the baseline, or the difference itself where that is zero."""
        if self.worse_by is None or self.baseline is None:
            return DASH
        margin = None if self.interval is None else self.interval[1] - self.worse_by
        if self.baseline == 0:
            return f"{self.worse_by:+.3g}" + ("" if margin is None else f" ± {margin:.2g}")
        level = abs(self.baseline)
        share = f"{self.worse_by / level:+.1%}"
        return share + ("" if margin is None else f" ± {margin / level:.1%}")


def written(value: float | None) -> str:
    """A figure as the table has it."""
    return DASH if value is None else f"{value:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A finished gate."""

    run_id: str
    baseline: str | None
    """The run that it was compared with; None: only limits were checked."""
    verdict: Outcome
    findings: Sequence[Finding]
    warnings: Sequence[str]
    absolute: bool
    """Seconds were compared, and not ratios within a run."""
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)
    """Of the metrics that are compared where there is a baseline."""

    @property
    def counts(self) -> dict[Outcome, int]:
        """How many checks came to each outcome that there is."""
        every = [one.outcome for one in self.findings]
        return {outcome: every.count(outcome) for outcome in Outcome if outcome in every}

    @property
    def summary(self) -> str:
        """One line: what came of it."""
        against = f"against {self.baseline}" if self.baseline else "limits only, no baseline"
        counts = ", ".join(f"{number} {outcome}" for outcome, number in self.counts.items())
        return f"{self.run_id} {against}: {self.verdict} ({counts})"


def document(report: Report) -> dict[str, Any]:
    """For ``--json``, and to be kept (docs/metrics.md)."""
    parts = msgspec.to_builtins(report)
    checks = parts.pop("findings")
    return {"schema": SCHEMA, "kind": "gate", **parts, "checks": checks}


def report_of(document: Mapping[str, Any]) -> Report:
    """The gate that was kept as this document.

    Raises:
        ConfigError: not such a document.
    """
    if document.get("kind") != "gate" or document.get("schema") != SCHEMA:
        raise ConfigError(
            f"a {document.get('kind')} document of schema {document.get('schema')!r}: this gockpt "
            f"takes those of a gate of schema {SCHEMA}"
        )
    try:
        return msgspec.convert({**document, "findings": document.get("checks")}, Report)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a document of a gate that cannot be read ({error})") from error
