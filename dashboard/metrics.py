"""The figures of a bench: what each is called, what it means in plain words, how it is written.

Pure. One table for the pages, the comparisons and the trends, so that a figure has one name
everywhere. Rows are those of ``results`` in the document (docs/metrics.md); what is missing in one
is None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gockpt import units

Row = Mapping[str, Any]
Unit = Literal["share", "seconds", "bytes", "count", "factor", "rate"]


def number(row: Row, *path: str) -> float | None:
    """The finite number at this place of a row, if there is one."""
    value: Any = row
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def traffic(row: Row) -> float | None:
    """All bytes sent, over those of the state."""
    state, gradients = number(row, "bytes", "state"), number(row, "bytes", "gradients")
    return (state + gradients) / state if state and gradients is not None else None


def memory(row: Row) -> float | None:
    """Bytes that trainer and agent take above a run without checkpoints."""
    trainer = number(row, "memory_bytes", "trainer_added")
    agent = number(row, "memory_bytes", "agent_added")
    return None if trainer is None or agent is None else trainer + agent


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a strategy."""

    key: str
    title: str
    unit: Unit
    better: Literal["higher", "lower", "neither"]
    read: Callable[[Row], float | None]
    words: str
    """What it means, for who has never seen it."""

    def show(self, value: float | None) -> str:
        """The value as people write it."""
        return written(value, self.unit)


def written(value: float | None, unit: Unit) -> str:
    """A number with its unit; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    text: str = {
        "share": lambda: units.percent(value, 2),
        "seconds": lambda: units.seconds(value) if value else "0 s",
        "bytes": lambda: units.size(value),
        "count": lambda: f"{value:,.0f}",
        "factor": lambda: f"{value:.2f} ×",
        "rate": lambda: f"{value:,.0f}/s",
    }[unit]()
    return text.replace("-", "−")


def _at(*path: str) -> Callable[[Row], float | None]:
    return lambda row: number(row, *path)


_ALL = (
    Metric(
        "throughput", "speed kept", "share", "higher", _at("relative_throughput"),
        "Training speed as a share of the same training without any checkpoints. 100 % is free.",
    ),
    Metric(
        "blocked", "blocked", "seconds", "lower", _at("stall", "blocked_s_per_checkpoint"),
        "Seconds for which one checkpoint held training up, by the engine's own clock.",
    ),
    Metric(
        "excess", "excess", "seconds", "lower", _at("stall", "excess_s_per_checkpoint"),
        "Seconds that training took longer for each checkpoint, beside a run without any. It also "
        "sees what slows training down elsewhere.",
    ),
    Metric(
        "durable", "durable after", "seconds", "lower", _at("latency_s", "durable"),
        "From the start of a checkpoint until it survives a crash of the machine.",
    ),
    Metric(
        "consistent", "in memory after", "seconds", "lower", _at("latency_s", "consistent"),
        "From the start of a checkpoint until it survives a crash of the training process.",
    ),
    Metric(
        "drain", "drain", "seconds", "lower", _at("drain_s"),
        "Waiting at the end of training until every checkpoint is durable.",
    ),
    Metric("loop", "loop", "seconds", "lower", _at("loop_s"), "Time of the training loop itself."),
    Metric("wall", "wall", "seconds", "lower", _at("wall_s"), "Loop and drain together."),
    Metric(
        "tokens", "tokens", "rate", "higher", _at("tokens_per_s", "loop"),
        "Tokens trained a second, over the loop.",
    ),
    Metric(
        "step", "median step", "seconds", "lower", _at("step_s", "median"),
        "Half of all training steps were faster than this.",
    ),
    Metric(
        "step_p95", "slow step", "seconds", "lower", _at("step_s", "p95"),
        "95 % of all training steps were faster than this: shows stalls that a median hides.",
    ),
    Metric(
        "windows", "windows (K)", "count", "neither", _at("windows"),
        "Training steps over which one checkpoint was taken. 1: all at once.",
    ),
    Metric(
        "traffic", "traffic", "factor", "lower", traffic,
        "Bytes sent over the link, as a multiple of the state itself. Gradients are the rest.",
    ),
    Metric(
        "memory", "memory", "bytes", "lower", memory,
        "Host memory on top of that of training without checkpoints.",
    ),
)  # fmt: skip

METRICS: dict[str, Metric] = {one.key: one for one in _ALL}
"""By the name that URLs use."""
