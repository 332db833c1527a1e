"""Gradients on their way to the replay: which numbers are sent, and until when they must stand.

Runs on the training thread, inside the pre-hook of an update; the check that nobody wrote to them
while they were copied runs on the outbox thread.

A gradient is sent exactly as the optimizer uses it. In master-weight training the 32-bit gradient
is an upcast of the 16-bit one that the model still holds; then the 16 bits are sent, and a flag,
computed on the device, says whether they really were the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gockpt.agent.protocol import Gradient
from gockpt.devices.base import Copied, Device, Pair
from gockpt.inventory import LiveParam
from gockpt.state import align, dtype_name, flatten
from gockpt.strategies.staging import Staging

STRETCH = 16 << 20
"""The ring is given out, and freed, in stretches of about this many bytes."""

Allocate = Callable[[int], tuple[int, int]]
"""Bytes → (ticket, byte offset) in the ring; waits until there is room."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block whose gradient has to be sent."""

    block: int
    live: LiveParam
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
    narrowed: list[str] = field(default_factory=list)
    verified: bool = False
    """Set once the training thread has seen, behind a gate, that nobody wrote to them."""

    def done(self) -> bool:
        """Whether all copies have ended."""
        return all(copied.done() for copied in self.copies)

    def unchanged(self) -> bool:
        """Whether nobody has written to the gradients since they were queued."""
        held = self.held
        return not held or [tensor._version for tensor in held] == self.versions

    def problem(self) -> str | None:
        """What makes them useless, once the copies have ended; None if they are right."""
        # Read before `verified`: behind a fence they may be written again, and that is set first.
        if not self.unchanged() and not self.verified:
            return "a gradient was changed while it was being copied"
        if self.flags is not None and not bool(self.flags.all()):
            index = int((self.flags == 0).nonzero()[0])
            return f"the gradient of {self.narrowed[index]!r} is no plain upcast of its 16-bit one"
        return None

    def release(self) -> None:
        """Let go of the gradients (on the outbox thread: giving memory back takes time)."""
        self.held = []


def wide_and_narrow(live: LiveParam) -> tuple[Tensor | None, Tensor | None]:
    """The gradient that the optimizer will use, and a 16-bit one that may be the same number."""
    wide = live.param.grad
    model = live.model_tensor
    if wide is None or model is None:
        return wide, None
    narrow = model.grad
    if (
        narrow is None
        or wide.dtype != torch.float32
        or narrow.dtype.itemsize != 2
        or not _same_layout(wide, narrow)
    ):
        return wide, None
    return wide, narrow


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
    sent: Sent,
) -> str | None:
    """Queue the copies of these blocks' gradients; those without a gradient are left out.

    Args:
        ring: the whole ring as a 1-D tensor of a dtype.

    Returns:
        Why they cannot be sent (then nothing was queued), or None.
    """
    sources: dict[torch.dtype, list[tuple[Wanted, Tensor]]] = {}
    compares: list[tuple[Tensor, Tensor]] = []
    for want in wanted:
        live = want.live
        wide, thin = wide_and_narrow(live) if narrow else (live.param.grad, None)
        if wide is None:
            continue
        if (reason := unusable(live, wide)) is not None:
            return reason
        used = wide if thin is None else thin
        sources.setdefault(used.dtype, []).append((want, _part(used, want)))
        sent.held.append(used)
        if thin is not None:
            sent.held.append(wide)
            sent.narrowed.append(live.name)
            compares.append((_part(wide, want), _part(thin, want)))
    sent.versions = [tensor._version for tensor in sent.held]
    if compares:
        _queue_flags(compares, device, staging, step, sent)
    pairs: list[Pair] = []
    for dtype, group in sources.items():
        for stretch in _stretches(group):
            pairs += _place(stretch, ring(dtype), allocate, sent)
    if pairs:
        sent.copies.append(device.copy(pairs, lane="gradients", step=step))
    return None


def queue_flags(
    wanted: Sequence[Wanted], *, device: Device, staging: Staging, step: int, sent: Sent
) -> None:
    """Compare wide and narrow gradients on the device, without sending them."""
    compares: list[tuple[Tensor, Tensor]] = []
    for want in wanted:
        wide, thin = wide_and_narrow(want.live)
        if wide is not None and thin is not None:
            compares.append((_part(wide, want), _part(thin, want)))
            sent.held += [wide, thin]
            sent.narrowed.append(want.live.name)
    if compares:
        _queue_flags(compares, device, staging, step, sent)


def _stretches(sources: list[tuple[Wanted, Tensor]]) -> list[list[tuple[Wanted, Tensor]]]:
    out: list[list[tuple[Wanted, Tensor]]] = []
    filled = STRETCH
    for source in sources:
        if filled >= STRETCH:
            out.append([])
            filled = 0
        out[-1].append(source)
        filled += source[1].nbytes
    return out


def _place(
    stretch: list[tuple[Wanted, Tensor]], ring: Tensor, allocate: Allocate, sent: Sent
) -> list[Pair]:
    """Give each gradient of one stretch its place in the ring."""
    name, itemsize = dtype_name(ring.dtype), ring.element_size()
    numels = [source.numel() for _, source in stretch]
    rooms = [align(numel * itemsize) for numel in numels]
    ticket, offset = allocate(sum(rooms))
    start = offset // itemsize
    whole = ring[start : start + sum(rooms) // itemsize]
    places = torch.split(whole, [room // itemsize for room in rooms])
    pairs: list[Pair] = []
    last = len(stretch) - 1
    for number, (want, source) in enumerate(stretch):
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
    compares: list[tuple[Tensor, Tensor]],
    device: Device,
    staging: Staging,
    step: int,
    sent: Sent,
) -> None:
    """Compare beside the copies; the flags follow them to the host."""
    flags = torch.empty(len(compares), dtype=torch.uint8, device=compares[0][0].device)
    sent.flags = staging.take(len(compares), torch.uint8)

    def compare() -> None:
        for index, (wide, thin) in enumerate(compares):
            flags[index] = _is_upcast(wide.reshape(-1), thin.reshape(-1))

    nbytes = sum(wide.nbytes + thin.nbytes for wide, thin in compares)
    sent.copies.append(device.run(compare, device_bytes=nbytes, lane="gradients", step=step))
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
