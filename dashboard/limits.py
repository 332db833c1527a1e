"""What the gate allows a figure, as lines across its trend.

Pure functions of documents. The gate allows a share of the baseline's value, or a floor in steps
of a training without checkpoints, whichever is more (docs/ci.md); a trend has seconds. So a limit
is the baseline's own value, worse by the share of it that is allowed there. What always holds:
there is no limit where the gate would not look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gockpt.dashboard.metrics import Metric
from gockpt.results import Baseline, ratios
from gockpt.results.ratios import Json
from gockpt.results.verdicts import Report, Threshold

GATED = {
    "throughput": "throughput",
    "blocked": "stall",
    "durable": "durable",
    "drain": "drain",
    "step": "step",
}
"""Figure of the dashboard → what the gate calls it; it looks at no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a gate looks at, and how much worse it may be."""

    thresholds: Mapping[str, Threshold]
    absolute: bool = False
    strategies: Collection[str] | None = None
    """None: by default, those of :func:`gockpt.results.ratios.watched`."""


DEFAULTS = Rules(thresholds={name: ratios.METRICS[name].threshold for name in ratios.DEFAULT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A kept baseline, and where the gate would fail beside it. In the figure's unit."""

    baseline: str
    value: float
    limit: float | None
    """None: the gate does not look at this figure of this strategy."""


def rules(gates: Iterable[Report]) -> Rules:
    """Those of the first gate that compared with a baseline; else the defaults."""
    for one in gates:
        if one.baseline is not None:
            compared = {found.strategy for found in one.findings if found.metric in one.thresholds}
            return Rules(thresholds=one.thresholds, absolute=one.absolute, strategies=compared)
    return DEFAULTS


def bounds(
    metric: Metric, strategy: str, baselines: Sequence[Baseline], rules: Rules
) -> list[Bound]:
    """One for each baseline that has the figure."""
    found = []
    for one in baselines:
        row = next(iter(ratios.rows(one.document, strategy)), {})
        value = metric.read(row)
        if value is not None:
            share = _share(metric, strategy, one.document, rules)
            limit = None if share is None else value + share * abs(value)
            found.append(Bound(baseline=one.name, value=value, limit=limit))
    return found


def _share(metric: Metric, strategy: str, document: Json, rules: Rules) -> float | None:
    """By which a value may differ from the baseline's, negative where less is worse."""
    name = GATED.get(metric.key, "")
    threshold = rules.thresholds.get(name)
    looked_at = ratios.watched(document) if rules.strategies is None else rules.strategies
    if threshold is None or strategy not in looked_at:
        return None
    base = ratios.series(document, strategy, name, absolute=rules.absolute).median
    return threshold.sign * threshold.allowed(base) / abs(base) if base else None
