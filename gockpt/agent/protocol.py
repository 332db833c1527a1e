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

PROTOCOL = 1


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
    faults: list[Fault]


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
    """A slot that an earlier agent left proved, but not yet durable."""

    opened: Open
    structure: Structure
    seal: Seal
    outcome: str


class Drop(Message):
    """This checkpoint will not be finished."""

    sequence: int
    reason: str


class Protect(Message):
    """Never delete this checkpoint (it was restored from)."""

    path: str


class Bye(Message):
    """Finish what is complete, then leave."""


# -- agent to trainer ------------------------------------------------------------------------------


class Ready(Message):
    """The agent owns the directory and can be used."""

    pid: int
    next_sequence: int


class Refused(Message):
    """The agent cannot serve, and leaves."""

    kind: str
    reason: str


class Freed(Message):
    """Stretches of the ring up to this ticket have been used up."""

    ticket: int


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


class Failed(Message):
    """It will not be there. ``kind`` names a class of :mod:`gockpt.errors`."""

    sequence: int
    step: int
    kind: str
    reason: str
    path: str | None = None
    errno: int | None = None


class Recorded(Message):
    """Spans that the agent has recorded since the last such message."""

    spans: list[Span]


FromTrainer = (
    Hello | Attach | Structure | Open | Captured | Update | Seal | Adopt | Drop | Protect | Bye
)
FromAgent = Ready | Refused | Freed | Consistent | Committed | Failed | Recorded
AnyMessage = FromTrainer | FromAgent
