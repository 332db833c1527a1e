"""The tables in which results are kept: one row for whatever is asked for on its own.

The documents of ``bench --json`` and ``crash-test --json`` (docs/metrics.md) are the contract; the
tables hold them in parts, so that a page or a gate reads what it needs. The full rows of a document
are kept as JSON beside the columns that are searched. Used by :mod:`gockpt.results.store` only.

The tables have a registry of their own: a program that uses SQLModel itself does not meet them.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, UniqueConstraint
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

SCHEMA_VERSION = 1
"""Raised by every change of these tables."""


LIVE = "live"
"""Kind of a run that is still being made: its row alone, gone when the finished run is added."""

GATE = "gate"
"""Kind of a verdict over a run: its row alone, the gate's document in it."""


class Base(SQLModel, registry=registry()):
    """What all tables share."""


class Meta(Base, table=True):
    """Facts about the database itself: ``schema_version``."""

    __tablename__ = "meta"

    key: str = Field(primary_key=True)
    value: str


class Run(Base, table=True):
    """One call of ``bench``, ``crash-test`` or ``gate``."""

    __tablename__ = "runs"

    run_id: str = Field(primary_key=True)
    kind: str = Field(index=True)
    """``bench``, ``crash-test`` or :data:`GATE`; :data:`LIVE` while it is being made."""
    created: str = Field(index=True)
    """UTC, ISO 8601: sorts as text."""
    model: str | None = Field(default=None, index=True)
    device: str | None = None
    emulated: bool | None = None
    environment: dict[str, Any] = Field(sa_type=JSON)
    config: dict[str, Any] = Field(sa_type=JSON)
    """The rest of the document: everything but environment, results and trials."""


class Result(Base, table=True):
    """One row of a bench: a strategy, medians over its repeats."""

    __tablename__ = "results"
    __table_args__ = (UniqueConstraint("run_id", "position"),)

    id: int | None = Field(default=None, primary_key=True)
    run_id: str = Field(foreign_key="runs.run_id", ondelete="CASCADE", index=True)
    position: int
    """Place in the document: ``none`` occurs twice, first and last."""
    strategy: str
    valid: bool
    relative_throughput: float | None = None
    blocked_s_per_checkpoint: float | None = None
    excess_s_per_checkpoint: float | None = None
    loop_s: float | None = None
    drain_s: float | None = None
    windows: int | None = None
    row: dict[str, Any] = Field(sa_type=JSON)
    """The whole row as in the document."""


class _OfRepeat(Base):
    """Belongs to one repeat of one row of a bench."""

    id: int | None = Field(default=None, primary_key=True)
    result_id: int = Field(foreign_key="results.id", ondelete="CASCADE", index=True)
    repeat: int = 0


class Sample(_OfRepeat, table=True):
    """One value of one repeat, of those under ``samples`` in the document."""

    __tablename__ = "samples"

    metric: str
    value: float


class Step(_OfRepeat, table=True):
    """How long one training step took, in seconds."""

    __tablename__ = "steps"

    step: int
    seconds: float


class SpanRow(_OfRepeat, table=True):
    """One span of the timeline (:class:`gockpt.events.Span`)."""

    __tablename__ = "spans"

    lane: str
    name: str
    start: float
    """Monotonic seconds: only differences within one repeat mean anything."""
    end: float
    step: int


class CheckpointRecord(SQLModel):
    """What happened to one checkpoint of a run; times in seconds, sizes in bytes."""

    step: int
    strategy: str
    windows: int
    fallback: str | None = None
    proof: str | None = None
    """``exact``, ``close``, ``off``; None where it was not committed."""
    identical: bool | None = None
    """Compared with the golden run; None where it was not compared."""
    blocked_s: float = 0.0
    consistent_s: float | None = None
    """From the opening of the first window until all blocks are at the target."""
    durable_s: float | None = None
    """From the opening of the first window until the commit."""
    state_bytes: int = 0
    gradient_bytes: int = 0
    persisted_bytes: int = 0


class Checkpoint(_OfRepeat, CheckpointRecord, table=True):
    """A :class:`CheckpointRecord` in the database."""

    __tablename__ = "checkpoints"


class Trial(Base, table=True):
    """One trial of a crash test."""

    __tablename__ = "trials"
    __table_args__ = (UniqueConstraint("run_id", "position"),)

    id: int | None = Field(default=None, primary_key=True)
    run_id: str = Field(foreign_key="runs.run_id", ondelete="CASCADE", index=True)
    position: int
    scenario: str = Field(index=True)
    point: str | None = None
    strategy: str | None = None
    passed: bool | None = None
    """None: skipped."""
    row: dict[str, Any] = Field(sa_type=JSON)
    """The whole trial as in the document."""


class Baseline(Base, table=True):
    """A named document that later runs are compared with; it outlives the run it came from."""

    __tablename__ = "baselines"

    name: str = Field(primary_key=True)
    created: str
    run_id: str
    document: dict[str, Any] = Field(sa_type=JSON)
