"""Gradients on their way to the replay: which numbers are sent, and until when they must stand.

Runs on the training thread, inside the pre-hook of an update; the check that nobody wrote to them
while they were copied runs on the outbox thread.

A gradient is sent exactly as the optimizer uses it. In master-weight training the 32-bit gradient
is an upcast of the 16-bit one that the model still holds; then the 16 bits are sent, and a flag,
computed on the device, says whether they really were the same number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter

import torch
from torch import Tensor

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

Allocate = Callable[[int], tuple[int, int] | None]
"""Bytes → (ticket, byte offset) in the ring, waiting for room; None: there will be none."""


_version = attrgetter("_version")
_grad = attrgetter("param.grad")


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


@dataclass(slots=True)
class Sent:
    """Gradients of one update that have been queued on the copy stream."""

    step: int
    gradients: list[Gradient] = field(default_factory=list)
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
            return f"the gradient of {name!r} is no plain upcast of its 16-bit one"
        return None

    def release(self) -> None:
        """Let go of the gradients (on the outbox thread: giving memory back takes time)."""
        self.held = []


def unusable(live: LiveParam, grad: Tensor) -> str | None:
    """Why this gradient cannot be sent, or None."""
    param = live.param
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return f"the gradient of {live.name!r} is not a plain tensor"
    if grad.dtype != param.dtype or not _same_layout(grad, param):
        return f"the gradient of {live.name!r} has another dtype or layout than the parameter"
    return None


def _same_layout(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and one.stride() == two.stride()


def send(
    wanted: Sequence[Wanted],
    *,
    device: Device,
    ring: Callable[[torch.dtype], Tensor],
    allocate: Allocate,
    staging: Staging,
    narrow: bool,
    step: int,
) -> Sent:
    """Queue the copies of these blocks' gradients; those without a gradient are left out.

    The training thread only takes hold of the tensors. Everything else is found out when the copy
    stream gets to it, and what is wrong with them is in :meth:`Sent.problem` then.

    Args:
        ring: the whole ring as a 1-D tensor of a dtype.
    """
    sent = Sent(step=step)
    others = map(_narrow_grad, wanted) if narrow else repeat(None, len(wanted))
    both = zip(wanted, map(_grad, wanted), others, strict=True)
    taken: list[_Taken] = [found for found in both if found[1] is not None]
    if not taken:
        return sent
    sent.held = [grad for _, grad, _ in taken]
    thin = [other for _, _, other in taken if other is not None]
    sent.held += thin
    sent.versions = list(map(_version, sent.held))
    if thin:
        _queue_flags(taken, device, staging, step, sent)

    def pairs() -> list[Pair]:
        return _pairs(taken, ring, allocate, sent)

    sent.copies.append(device.copy(pairs, lane="gradients", step=step))
    return sent


_Taken = tuple[Wanted, Tensor, Tensor | None]
"""A block, the gradient that the optimizer uses, and the model's own one where that is another."""


def _narrow_grad(want: Wanted) -> Tensor | None:
    return None if want.model is None else want.model.grad


def _narrowed(wide: Tensor, narrow: Tensor | None) -> Tensor | None:
    """The model's own gradient, if it may be the same number in 16 bits."""
    if narrow is None or wide.dtype != torch.float32 or narrow.dtype.itemsize != 2:
        return None
    return narrow if _same_layout(wide, narrow) else None


def _pairs(
    taken: list[_Taken], ring: Callable[[torch.dtype], Tensor], allocate: Allocate, sent: Sent
) -> list[Pair]:
    """What to copy, found out on the copy stream's thread."""
    sources: dict[torch.dtype, list[tuple[Wanted, Tensor]]] = {}
    for want, wide, narrow in gently(taken):
        if (reason := unusable(want.live, wide)) is not None:
            sent.reason = reason
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
        _queue_flags(taken, device, staging, step, sent)
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
    room = allocate(sum(rooms))
    if room is None:
        return None
    ticket, offset = room
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
    taken: list[_Taken], device: Device, staging: Staging, step: int, sent: Sent
) -> None:
    """Compare beside the copies; the flags follow them to the host."""
    sent.flags = staging.take(len(taken), torch.uint8)
    sent.compared = [want for want, _, _ in taken]
    flags = torch.ones(len(taken), dtype=torch.uint8, device=taken[0][1].device)

    def work() -> None:
        time.sleep(HEAD_START_S)
        for index, (want, wide, narrow) in enumerate(taken):
            thin = _narrowed(wide, narrow)
            if thin is not None:
                flags[index] = _is_upcast(
                    _part(wide, want).reshape(-1), _part(thin, want).reshape(-1)
                )

    nbytes = sum(want.stop - want.start for want, _, _ in taken) * COMPARED_BYTES
    sent.copies.append(device.run(work, device_bytes=nbytes, lane="gradients", step=step))
    sent.copies.append(device.copy([(sent.flags, flags)], lane="gradients", step=step))


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
