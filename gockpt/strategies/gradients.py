"""Gradients on their way to the replay: which numbers are sent, and until when they must stand.

Runs on the training thread, inside the pre-hook of an update; the check that nobody wrote to them
while they were copied runs on the outbox thread.

A gradient is sent exactly as the optimizer uses it. In master-weight training the 32-bit gradient
is an upcast of the 16-bit one that the model still holds; then the 16 bits are sent, and a flag,
computed on the device, says whether they really were the same number.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

import torch
from torch import Tensor

from gockpt import optim
from gockpt.agent.protocol import Gradient
from gockpt.devices.base import Copied, Device, Pair
from gockpt.inventory import LiveParam
from gockpt.pace import gently
from gockpt.state import align, dtype_name, flatten
from gockpt.strategies.staging import Staging

HEAD_START_S = 0.001
"""What the copy stream's thread waits before it compares: it would take the interpreter from the
training thread, which is still in its hook. The link's schedule is absolute and does not notice."""

COMPARED_BYTES = 6
"""Read for each element when a 32-bit gradient is compared with its 16-bit one."""

STRETCHES = 32
"""The ring is given out, and freed, in stretches of about its size divided by this."""

NO_UPCAST = "is no plain upcast of its 16-bit one"
"""What is wrong with a gradient that must be sent in 32 bits from then on."""

Allocate = Callable[[int, Sequence[int]], tuple[int, int] | None]
"""Bytes, and the tickets of the update so far → (ticket, byte offset) in the ring, waiting for
room; None: there will be none."""


_version = attrgetter("_version")
_grad = attrgetter("grad")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block whose gradient has to be sent."""

    block: int
    live: LiveParam
    param: Tensor
    model: Tensor | None
    """The model's own tensor where ``param`` is a master copy of it."""
    start: int
    stop: int
    whole: bool

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Wants:
    """All blocks of one optimizer in the order in which they are captured.

    Kept as columns, so that the training thread touches no object whose gradient it does not need.
    """

    def __init__(self) -> None:
        self.blocks: list[Wanted] = []
        self._numbers: list[int] = []
        self._params: list[Tensor] = []
        self._models: list[Tensor | None] = []
        self._elements: list[int] = []
        """Running sum."""
        self._groups: list[frozenset[int]] = []
        """The groups up to and including each block."""

    def add(self, want: Wanted) -> None:
        """The next block."""
        groups = self._groups[-1] if self._groups else frozenset()
        group = want.live.group_index
        self._groups.append(groups if group in groups else groups | {group})
        self._elements.append((self._elements[-1] if self._elements else 0) + want.numel)
        self.blocks.append(want)
        self._numbers.append(want.block)
        self._params.append(want.param)
        self._models.append(want.model)

    def before(self, block: int) -> int:
        """How many of them have a lower number."""
        return bisect_left(self._numbers, block)

    def groups(self, count: int) -> frozenset[int]:
        """The parameter groups of the first ``count``."""
        return self._groups[count - 1] if count else frozenset()

    def elements(self, count: int) -> int:
        """Elements of the first ``count``."""
        return self._elements[count - 1] if count else 0

    def gradients(self, count: int) -> list[Tensor | None]:
        """The gradients that the optimizer will use."""
        return list(map(_grad, islice(self._params, count)))

    def own_gradients(self, count: int) -> list[Tensor | None]:
        """Those that the model holds, where the optimizer holds a master copy of its weights."""
        models = islice(self._models, count)
        return [None if model is None else model.grad for model in models]


@dataclass(slots=True)
class Sent:
    """Gradients of one update that have been queued on the copy stream."""

    step: int
    gradients: list[Gradient] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)
    """The stretches of the ring that they were given."""
    nbytes: int = 0
    copies: list[Copied] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    """The gradients themselves, kept alive until they have been copied."""
    versions: list[int] = field(default_factory=list)
    flags: Tensor | None = None
    """One for each narrowed gradient: 1 where the 16 bits are exact."""
    compared: list[Wanted] = field(default_factory=list)
    """The blocks that the flags are of."""
    reason: str | None = None
    """Why they could not be sent after all."""
    verified: bool = False
    """Set once the training thread has seen, behind a gate, that nobody wrote to them."""

    def done(self) -> bool:
        """Whether all copies have ended."""
        return all(copied.done() for copied in self.copies)

    def unchanged(self) -> bool:
        """Whether nobody has written to the gradients since they were queued."""
        held = self.held
        return not held or list(map(_version, held)) == self.versions

    def problem(self) -> str | None:
        """What makes them useless, once the copies have ended; None if they are right."""
        if self.reason is not None:
            return self.reason
        # Read before `verified`: behind a fence they may be written again, and that is set first.
        if not self.unchanged() and not self.verified:
            return "a gradient was changed while it was being copied"
        if self.flags is not None and not bool(self.flags.all()):
            index = int((self.flags == 0).nonzero()[0])
            name = self.compared[index].live.name
            return f"the gradient of {name!r} {NO_UPCAST}"
        return None

    def release(self) -> None:
        """Let go of the gradients (on the outbox thread: giving memory back takes time)."""
        self.held = []


def send(
    wants: Wants,
    count: int,
    *,
    device: Device,
    ring: Callable[[torch.dtype], Tensor],
    allocate: Allocate,
    staging: Staging,
    narrow: bool,
    step: int,
) -> Sent:
    """Queue the copies of the first ``count`` gradients; blocks without one are left out.

    The training thread only takes hold of the tensors. Everything else is found out when the copy
    stream gets to it, and what is wrong with them is in :meth:`Sent.problem` then.

    Args:
        ring: the whole ring as a 1-D tensor of a dtype.
    """
    sent = Sent(step=step)
    wide = wants.gradients(count)
    if all(grad is None for grad in wide):
        return sent
    thin = wants.own_gradients(count) if narrow else []
    narrow = any(own is not None for own in thin)
    sent.held = [grad for grad in wide if grad is not None]
    if narrow:
        both = zip(thin, wide, strict=True)
        sent.held += [own for own, grad in both if own is not None and grad is not None]
    sent.versions = list(map(_version, sent.held))

    def taken() -> list[_Taken]:
        others = thin if narrow else [None] * count
        found = zip(wants.blocks, wide, others, strict=False)  # there are more blocks than captured
        return [(want, grad, other) for want, grad, other in found if grad is not None]

    flags: Callable[[], list[Pair]] = list
    if narrow:
        flags = _queue_flags(taken, count, wants.elements(count), device, staging, step, sent)

    def pairs() -> list[Pair]:
        return [*flags(), *_pairs(taken(), ring, allocate, sent)]

    sent.copies.append(device.copy(pairs, lane="gradients", step=step))
    return sent


_Taken = tuple[Wanted, Tensor, Tensor | None]
"""A block, the gradient that the optimizer uses, and the model's own one where that is another."""


def _narrowed(wide: Tensor, narrow: Tensor | None) -> Tensor | None:
    """The model's own gradient, if it may be the same number in 16 bits."""
    if narrow is None or wide.dtype != torch.float32 or narrow.dtype.itemsize != 2:
        return None
    return narrow if optim.same_layout(wide, narrow) else None


def _pairs(
    taken: list[_Taken], ring: Callable[[torch.dtype], Tensor], allocate: Allocate, sent: Sent
) -> list[Pair]:
    """What to copy, found out on the copy stream's thread."""
    sources: dict[torch.dtype, list[tuple[Wanted, Tensor]]] = {}
    for want, wide, narrow in gently(taken):
        if (reason := optim.gradient_obstacle(want.param, wide)) is not None:
            sent.reason = f"{want.live.name!r} cannot be replayed: {reason}"
            return []
        thin = _narrowed(wide, narrow)
        used = wide if thin is None else thin
        sources.setdefault(used.dtype, []).append((want, _part(used, want)))
    pairs: list[Pair] = []
    for dtype, group in sources.items():
        whole = ring(dtype)
        for stretch in _stretches(group, whole.nbytes // STRETCHES):
            placed = _place(stretch, whole, allocate, sent)
            if placed is None:
                sent.reason = "there was no room for its gradients"
                return []
            pairs += placed
    return pairs


def compare(lives: Sequence[LiveParam], *, device: Device, staging: Staging, step: int) -> Sent:
    """Find out whether all 32-bit gradients are upcasts of 16-bit ones, without sending them."""
    sent = Sent(step=step)
    taken: list[_Taken] = []
    for number, live in enumerate(lives):
        wide = live.param.grad
        narrow = None if live.model_tensor is None else live.model_tensor.grad
        if wide is not None and narrow is not None:
            want = Wanted(number, live, live.param, live.model_tensor, 0, wide.numel(), whole=True)
            taken.append((want, wide, narrow))
            sent.held += [wide, narrow]
    sent.versions = list(map(_version, sent.held))
    if taken:
        elements = sum(want.numel for want, _, _ in taken)
        flags = _queue_flags(lambda: taken, len(taken), elements, device, staging, step, sent)
        sent.copies.append(device.copy(flags, lane="gradients", step=step))
    return sent


def _stretches(
    sources: list[tuple[Wanted, Tensor]], size: int
) -> list[list[tuple[Wanted, Tensor]]]:
    out: list[list[tuple[Wanted, Tensor]]] = []
    filled = size
    for source in sources:
        if filled >= size:
            out.append([])
            filled = 0
        out[-1].append(source)
        filled += source[1].nbytes
    return out


def _place(
    stretch: list[tuple[Wanted, Tensor]], ring: Tensor, allocate: Allocate, sent: Sent
) -> list[Pair] | None:
    """Give each gradient of one stretch its place in the ring; None if there will be none."""
    name, itemsize = dtype_name(ring.dtype), ring.element_size()
    numels = [source.numel() for _, source in stretch]
    rooms = [align(numel * itemsize) for numel in numels]
    room = allocate(sum(rooms), sent.tickets)
    if room is None:
        return None
    ticket, offset = room
    sent.tickets.append(ticket)
    start = offset // itemsize
    whole = ring[start : start + sum(rooms) // itemsize]
    places = torch.split(whole, [size // itemsize for size in rooms])
    pairs: list[Pair] = []
    last = len(stretch) - 1
    for number, (want, source) in gently(enumerate(stretch)):
        place, numel = places[number], numels[number]
        pairs.append((place if place.numel() == numel else place[:numel], source))
        sent.gradients.append(
            Gradient(
                block=want.block, offset=offset, dtype=name, ticket=ticket if number == last else 0
            )
        )
        offset += rooms[number]
        sent.nbytes += numel * itemsize
    return pairs


def _queue_flags(
    taken: Callable[[], list[_Taken]],
    count: int,
    elements: int,
    device: Device,
    staging: Staging,
    step: int,
    sent: Sent,
) -> Callable[[], list[Pair]]:
    """Compare on the copy stream; returns what then finds the pair that takes the flags along."""
    host = sent.flags = staging.take(count, torch.uint8)
    made: list[Pair] = []

    def work() -> None:
        time.sleep(HEAD_START_S)
        found = taken()
        sent.compared = [want for want, _, _ in found]
        flags = torch.ones(count, dtype=torch.uint8, device=found[0][1].device)
        made.append((host, flags))
        for index, (want, wide, narrow) in enumerate(found):
            thin = _narrowed(wide, narrow)
            if thin is not None:
                flags[index] = _is_upcast(
                    _part(wide, want).reshape(-1), _part(thin, want).reshape(-1)
                )

    sent.copies.append(
        device.run(work, device_bytes=elements * COMPARED_BYTES, lane="gradients", step=step)
    )
    return lambda: made


def _part(tensor: Tensor, want: Wanted) -> Tensor:
    """The block's elements; 1-D in memory order unless it is the whole of a contiguous tensor."""
    if want.whole and tensor.is_contiguous():
        return tensor
    flat = flatten(tensor)
    return flat if want.whole else flat[want.start : want.stop]


_CACHED = 128 * 1024
"""Elements widened at a time on the host: they stay in its cache."""


def _is_upcast(wide: Tensor, thin: Tensor) -> Tensor | bool:
    """Whether ``wide`` is ``thin`` widened, for every element (NaN never is)."""
    if wide.device.type != "cpu":
        return torch.eq(wide, thin).all()
    for start in range(0, wide.numel(), _CACHED):
        part = slice(start, start + _CACHED)
        if not torch.equal(wide[part], thin[part].to(wide.dtype)):
            return False
    return True
