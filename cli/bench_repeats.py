"""Several rounds of a bench in one row for each strategy. Pure functions.

What always holds: a list of samples has one place for each round, in their order, so that the same
place of two strategies is of the same round; what was not measured, or measured on a machine that
was too busy, is None there and never left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

SAMPLES = (
    "relative_throughput",
    "blocked_s_per_checkpoint",
    "drain_s",
    "step_s",
    "durable_s",
    "copy_s",
    "replay_s",
    "hook_s",
)
"""What is kept of every round."""

SUMS = ("attempts", "checkpoints", "bytes")
"""Of all rounds together. Whatever is not named in here is the median of the rounds."""

MOST = ("windows", "in_flight_max", "overruns", "worst_s")
"""The largest of any round."""

Json = dict[str, Any]


def samples(*, valid: bool, **values: float | None) -> dict[str, list[float | None]]:
    """What one round adds to the lists."""
    return {name: [values.get(name) if valid else None] for name in SAMPLES}


def merged(rows: Sequence[Json]) -> Json:
    """One row of the document from those of its rounds."""
    if len(rows) == 1:
        return rows[0]
    first = rows[0]
    return {name: _part(name, [row[name] for row in rows]) for name in first} | {
        "strategy": first["strategy"],
        "valid": all(row["valid"] for row in rows),
        "problems": [
            f"round {number}: {problem}"
            for number, row in enumerate(rows, 1)
            for problem in row["problems"]
        ],
        "fallbacks": [reason for row in rows for reason in row["fallbacks"]],
        "samples": {
            name: [value for row in rows for value in row["samples"][name]] for name in SAMPLES
        },
    }


def _part(name: str, values: list[Any], within: str = "") -> Any:
    """One figure of all rounds, or a group of them."""
    if isinstance(values[0], dict):
        return {key: _part(key, [value[key] for value in values], name) for key in values[0]}
    known = [value for value in values if isinstance(value, int | float)]
    if not known:
        return None
    if name in MOST:
        return max(known)
    return sum(known) if {name, within} & set(SUMS) else statistics.median(known)
