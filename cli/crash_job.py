"""What ``crash-test`` and the trainers that it kills say to each other: typed, tagged JSON.

The parent gives a trainer one :class:`Job`. It answers with :class:`Ready`, one :class:`Stepped`
for each pass and, unless it is killed, :class:`Ended` or :class:`Broke`.
"""

from __future__ import annotations

import msgspec

from gockpt.cli.task import Task
from gockpt.faults import Fault


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happens in the loop itself, ahead of the forward of a pass or in it."""

    kind: str
    step: int


class Job(Task, frozen=True, kw_only=True):
    """One life of a trainer."""

    strategy: str | None
    """None: the golden run."""
    steps: int
    interval: int
    keep: int
    windows: int | None
    directory: str
    golden: str
    """File with the golden run."""
    environment: dict[str, str]
    log: str
    """File for all that it prints."""
    tier: str | None = None
    pace: float = 0.0
    """Seconds that a pass takes at least."""
    event: Event | None = None
    """Part of the training, so the golden run has it too."""
    failure: Event | None = None
    """``forward``, ``backward``, ``update`` (an exception there) or ``memory`` (a limit of it)."""
    trainer_faults: tuple[Fault, ...] = ()
    agent_faults: tuple[Fault, ...] = ()
    record: str | None = None
    """File for all that was done to the disk; the agent is then a thread."""
    linger: float = 60.0
    """Seconds that the agent of a dead trainer waits for the next one."""
    slow_link: bool = False


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass computed; equal passes are equal bit for bit."""

    step: int
    batch: int
    loss: str
    """As a hexadecimal float."""
    draw: str
    """Of the random generators, behind the update."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a trainer says. Times are epoch seconds."""


class Ready(Message, frozen=True, kw_only=True):
    """The state is there: that of a checkpoint, or a fresh one."""

    restored: int | None
    source: str | None
    built_at: float
    opened_at: float
    read_s: float
    apply_s: float
    different: list[str]
    """Tensors that are not as in the golden run at this step."""


class Made(Message, frozen=True, kw_only=True):
    """A pass was computed; its step has still to end, which may take as long as a checkpoint."""

    made: Pass


class Stepped(Message, frozen=True, kw_only=True):
    """A step has ended."""

    step: int
    at: float
    durable: list[int]
    """Steps whose checkpoints were reported as durable since the last pass."""
    failed: int
    """Checkpoints that failed so far in this life."""


class Ended(Message, frozen=True, kw_only=True):
    """The loop has ended, and everything was closed."""

    step: int
    different: list[str]
    durable: list[int]
    failed: int


class Broke(Message, frozen=True, kw_only=True):
    """An exception ended it."""

    kind: str
    reason: str


AnyMessage = Ready | Made | Stepped | Ended | Broke


class Golden(msgspec.Struct, frozen=True, kw_only=True):
    """An uninterrupted run."""

    passes: list[Pass]
    states: list[dict[str, str]]
    """Index: step from 0. Hash of every tensor by its name."""

    def differing(self, step: int, found: dict[str, str]) -> list[str]:
        """Names that are missing, added or different in the state of a step."""
        expected = self.states[step]
        names = expected.keys() | found.keys()
        return sorted(name for name in names if expected.get(name) != found.get(name))
