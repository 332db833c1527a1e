"""What the bench and its workers say to each other: one JSON line each, typed and tagged.

The parent writes one :class:`Job` to a worker's stdin; the worker answers with any number of
:class:`Progress` and ends with :class:`Golden`, :class:`Measured` or :class:`Failed`.
"""

from __future__ import annotations

import msgspec

from gockpt.cli.task import Task
from gockpt.events import Span
from gockpt.faults import Fault

REAL_SHARE = 0.25
"""The most of a modelled step that its real forward and backward may take."""


class Job(Task, frozen=True, kw_only=True):
    """One run of one worker. Every worker of a bench gets the same but for ``strategy``."""

    strategy: str | None
    """None: the golden run."""
    measured_tokens: int | None
    """Of a step as it is really computed; None: the golden run finds out what is affordable."""
    steps: int
    interval: int
    windows: int | None
    warmup: int
    """Steps at the start that no figure counts."""
    directory: str
    """The worker's own, for its checkpoints."""
    golden: str
    """File with the golden run's hashes."""
    faults: tuple[Fault, ...] = ()
    """For the trainer of a measured run; only a test plants any."""

    @property
    def targets(self) -> list[int]:
        """Steps whose checkpoints are promised."""
        return list(range(self.interval, self.steps + 1, self.interval))

    @property
    def counted(self) -> list[int]:
        """Those of them that lie behind the warm-up, so that their stall is in the figures."""
        return [target for target in self.targets if target > self.warmup]

    @property
    def passes(self) -> int:
        """Steps that are really trained: one more, so that the window of a checkpoint of the last
        step closes behind a forward and backward, as all others do."""
        return self.steps + 1


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a worker says."""


class Progress(Message, frozen=True, kw_only=True):
    """How far it has come."""

    stage: str
    """``starting``, ``training``, ``draining``, ``verifying``."""
    step: int = 0
    of: int = 0


class Golden(Message, frozen=True, kw_only=True):
    """The end of a golden run; its hashes are in the file."""

    real_tokens: int
    real_s: float | None
    """Seconds of a real forward and backward; None where nothing is emulated."""
    modelled_s: float | None
    idle_agent_bytes: int | None


class Failed(Message, frozen=True, kw_only=True):
    """The end of a run that went wrong."""

    kind: str
    """Name of the exception."""
    reason: str


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one promised checkpoint."""

    step: int
    committed: bool
    windows: int = 0
    fallback: str | None = None
    proof: str | None = None
    identical: bool | None = None
    """None: it could not be read."""
    difference: str | None = None
    """What is not as in the golden run, or what is damaged."""
    blocked_s: float = 0.0
    consistent_s: float | None = None
    durable_s: float | None = None


class Measured(Message, frozen=True, kw_only=True):
    """The end of a measured run. Seconds and bytes."""

    steps: list[tuple[int, float]]
    """(step, seconds), warm-up included."""
    loop_s: float
    blocked_s: float
    drain_s: float
    hook_s: float
    """What ``ckpt.step()`` takes in a pass: the median."""
    checkpoints: list[SavedCheckpoint]
    in_flight_max: int
    state_bytes: int
    gradient_bytes: int
    persisted_bytes: int
    predicted_bytes: int | None
    """Of slots and ring, as allocated before the first step; None: it is nobody's plan."""
    overruns: int | None
    """None: not emulated."""
    overrun_s: float
    worst_overrun_s: float
    events: dict[str, int]
    warnings: list[str]
    spans: list[Span]


AnyMessage = Progress | Golden | Failed | Measured
