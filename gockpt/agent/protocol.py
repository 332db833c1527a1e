"""What a trainer and its agent say to each other.

Messages are typed, tagged and encoded with MessagePack; nothing in them is ever executed. Memory
goes beside a message, as file descriptors. Everything about one checkpoint carries its sequence
number, so that there is no shared "current" one to mix up.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gockpt.events import Span
from gockpt.faults import Fault
from gockpt.recipe import OptimizerUpdate
from gockpt.state import Entry, Layout
from gockpt.storage.tier import Tier

PROTOCOL = 3


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Modelled rates of the emulated host; None means as fast as it goes."""

    write: float | None = None
    """Bytes per second to the SSD."""
    replay: float | None = None
    """Parameter updates per second."""
    memory: float | None = None
    """Bytes per second that the host reads from its memory (for the proof)."""


class Message(msgspec.Struct, tag=True):
    """Base of all messages."""


# -- trainer to agent ------------------------------------------------------------------------------


class Hello(Message):
    """First message of a connection."""

    protocol: int
    directory: str
    rank: int
    world_size: int
    run_id: str
    launch_id: str
    threads: int
    keep: int | None
    pace: Pace
    proof: bool
    exact: bool
    """Whether the replay must repeat bit for bit (False on CUDA: last bits may differ)."""
    require_exact: bool
    trainer: int
    """Its pid."""
    started: int
    """When that process was started, in ticks: its pid alone may be another's by now."""
    linger: float
    """Seconds that the agent waits for another trainer when this one has died."""
    meeting: str | None
    """The directory of its socket; None: it is a thread, and ends with its trainer."""
    faults: list[Fault]
    keep_every: int | None = None
    tier: Tier | None = None
    sequence: int = 0
    """The next number, as far as the trainer knows (0: ask the directory and its tier)."""
    volumes: list[str] = []
    """Absolute paths of the directories that the image is divided over; none: ``directory``."""


class Attach(Message):
    """Memory: its descriptor comes with this message. A new one replaces that of the same name."""

    name: str
    size: int


class Structure(Message):
    """What checkpoints are made of; sent once for all that follow, as it is long."""

    number: int
    layout: Layout
    optimizers: list[tuple[str, int]]
    """Class name and number of groups, in the order that ``ParamLayout.optimizer`` counts."""


class Open(Message):
    """A checkpoint begins to fill a slot."""

    sequence: int
    step: int
    slot: int
    structure: int
    """The number of its :class:`Structure`."""
    strategy: str
    base: int
    windows: int
    fallback: str | None
    """Why this is one plain copy instead of several windows."""
    launch_id: str
    header_reserve: int


class Block(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A range of elements of one parameter with its state, as captured at ``version``.

    Blocks are numbered in the order in which they are announced.
    """

    param: int
    start: int
    stop: int
    version: int
    state: tuple[str, ...]
    """Elementwise state that existed when it was captured."""
    scalars: dict[str, float]
    """Its 0-dim state."""


class Captured(Message):
    """The copies of these blocks, and of these whole entries, have arrived."""

    sequence: int
    blocks: list[Block]
    entries: list[int]
    target: int | None = None
    """The step that the checkpoint is of, with the first entries: earlier than announced if the
    training ended inside a window, and its directory is named by it."""


class Gradient(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The gradient of one block, at a byte offset of the ring."""

    block: int
    offset: int
    dtype: str
    ticket: int
    """The stretch of the ring that is free once this one has been replayed (0: not the last)."""


class Update(Message):
    """One update of the optimizers, with the gradients of all blocks captured before it."""

    sequence: int
    version: int
    updates: list[OptimizerUpdate | None]
    """One for each optimizer; None: it made no step, its state stood still."""
    gradients: list[Gradient]


class Seal(Message):
    """The checkpoint has everything: what there is at the target, and how to prove it."""

    sequence: int
    step: int
    """The target; earlier than announced if the training ended inside a window."""
    present: list[int]
    """Entries that exist at the target."""
    extra_entries: list[Entry]
    """Tensors of the extras, behind the entries of the layout."""
    groups: Any
    extras: Any
    seed: int
    """Of the fingerprint that lies in the scratch."""
    proved: bool
    lr: float
    """Largest learning rate inside the windows: the scale of the tolerance of ``close``."""


class Adopt(Message):
    """A slot that an earlier agent left complete, but not yet durable."""

    opened: Open
    structure: Structure
    seal: Seal
    outcome: str | None
    """Of its proof; None: it was not proved yet."""
    captured: list[Captured] = []
    """Where it was not proved: all that the earlier agent was told of. Nothing was replayed."""


class Drop(Message):
    """This checkpoint will not be finished."""

    sequence: int
    reason: str


class Protect(Message):
    """Do not delete this checkpoint: it was restored from, until another one is."""

    path: str


class Recall(Message):
    """Say which checkpoints can be restored from memory."""


class Ask(Message):
    """Say who you are and what you do (from a command)."""


class Stop(Message):
    """Finish what is complete, then leave, if your trainer is dead (from a command)."""


class Bye(Message):
    """Finish what is complete, then leave."""


# -- agent to trainer ------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that an agent still has in a slot, for the trainer that takes it over."""

    slot: int
    sequence: int
    pending: Adopt | None
    """What another agent would need to finish it; None: it is durable."""


class Ready(Message):
    """The agent owns the directory and can be used.

    One that an earlier trainer left behind sends its memory first, each as :class:`Attach`.
    """

    pid: int
    next_sequence: int
    held: list[Held] = []


class Alive(Message):
    """The agent is not stuck, though its disk may be."""

    path: str | None = None
    """Of the file call that has been under way for longest; None: there is none…"""
    seconds: float = 0.0
    """…and for how long."""


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in a slot: its manifest as it is, or would be, on disk in one file."""

    slot: int
    manifest: bytes


class Recalled(Message):
    """The answer to :class:`Recall`, the newest first."""

    images: list[Image]


class Status(Message):
    """The answer to :class:`Ask` and :class:`Stop`."""

    pid: int
    directory: str
    rank: int
    trainer: int | None
    """Its pid; None: it is dead."""
    left: float | None
    """Seconds that the agent goes on waiting for another one; None: it does not wait."""
    steps: list[int]
    """Of the checkpoints in its slots."""
    unwritten: int
    """How many checkpoints are not durable yet."""
    nbytes: int
    """Of the memory it shares with its trainer."""


class Refused(Message):
    """The agent cannot serve, and leaves."""

    kind: str
    reason: str


class Freed(Message):
    """These stretches of the ring have been used up."""

    tickets: list[int]


class Consistent(Message):
    """All parts are at the target and proved; it can be restored from memory."""

    sequence: int
    outcome: str


class Committed(Message):
    """It is durable."""

    sequence: int
    step: int
    path: str
    outcome: str
    nbytes: int
    replayed: int
    """Parameter updates that were replayed for it…"""
    replay_s: float
    """…and the seconds that this took."""
    slow: str | None = None
    """The volume that held the others up, in words."""


class Failed(Message):
    """It will not be there. ``kind`` names a class of :mod:`gockpt.errors`."""

    sequence: int
    step: int
    kind: str
    reason: str
    path: str | None = None
    errno: int | None = None
    tensors: list[str] = []
    """Of a proof: those that are wrong."""


class Recorded(Message):
    """Spans that the agent has recorded since the last such message."""

    spans: list[Span]


class TierState(Message):
    """How far the second tier has come."""

    sequence: int
    """Of the newest checkpoint that it holds; 0: none."""
    step: int
    lacking: bool
    """Whether there is something that it does not hold yet (or it is not known)."""
    copied: int
    """Bytes copied so far: grows while it makes progress."""
    superseded: int
    """Checkpoints that were left out, as newer ones came before their turn."""
    kind: str | None
    """Class of :mod:`gockpt.errors` that it fails with at present; None: it does not."""
    reason: str | None


FromTrainer = (
    Hello
    | Attach
    | Structure
    | Open
    | Captured
    | Update
    | Seal
    | Adopt
    | Drop
    | Protect
    | Recall
    | Bye
)
FromAgent = (
    Ready
    | Refused
    | Alive
    | Freed
    | Consistent
    | Committed
    | Failed
    | Recorded
    | Recalled
    | TierState
)
AnyMessage = FromTrainer | FromAgent | Ask | Stop | Status
