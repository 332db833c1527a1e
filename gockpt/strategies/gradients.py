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


@dataclass(slots=True)
class Sent:
    """Gradients of one update that have been queued on the copy stream."""

    step: int
    gradients: list[Gradient] = field(default_factory=list)
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

    def problem(self) -> str | None:
        """What makes them useless, once the copies have ended; None if they are right."""
        current = [tensor._version for tensor in self.held]
        # Read before `verified`: behind a fence they may be written again, and that is set first.
        if current != self.versions and not self.verified:
            return "a gradient was changed while it was being copied"
        if self.flags is not None and not bool(self.flags.all()):
            index = int((self.flags == 0).nonzero()[0])
            return f"the gradient of {self.narrowed[index]!r} is no plain upcast of its 16-bit one"
        return None


def wide_and_narrow(live: LiveParam) -> tuple[Tensor | None, Tensor | None]:
    """The gradient that the optimizer will use, and a 16-bit one that may be the same number."""
    wide = live.param.grad
    model = live.model_tensor
    if wide is None or model is None or model.grad is None or wide.dtype != torch.float32:
        return wide, None
    narrow = model.grad
    if narrow.dtype.itemsize != 2 or not _same_layout(wide, narrow):
        return wide, None
    return wide, narrow


def unusable(live: LiveParam, grad: Tensor) -> str | None:
    """Why this gradient cannot be sent, or None."""
    param = live.param
    if grad.layout is not torch.strided or type(grad) is not Tensor:
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
    ring: Callable[[int, int, torch.dtype], Tensor],
    allocate: Allocate,
    staging: Staging,
    narrow: bool,
    step: int,
    sent: Sent,
) -> str | None:
    """Queue the copies of these blocks' gradients; those without a gradient are left out.

    Returns:
        Why they cannot be sent (then nothing was queued), or None.
    """
    sources: list[tuple[Wanted, Tensor]] = []
    for want in wanted:
        wide, thin = wide_and_narrow(want.live) if narrow else (want.live.param.grad, None)
        if wide is None:
            continue
        if (reason := unusable(want.live, wide)) is not None:
            return reason
        used = wide if thin is None else thin
        sources.append((want, _part(used, want)))
        sent.held.append(used)
    if narrow:
        queue_flags(wanted, device=device, staging=staging, step=step, sent=sent)
    sent.versions = [tensor._version for tensor in sent.held]
    if not sources:
        return None
    sent.copies.append(_queue_copies(sources, device, ring, allocate, step, sent))
    return None


def _queue_copies(
    sources: list[tuple[Wanted, Tensor]],
    device: Device,
    ring: Callable[[int, int, torch.dtype], Tensor],
    allocate: Allocate,
    step: int,
    sent: Sent,
) -> Copied:
    pairs: list[Pair] = []
    for stretch in _stretches(sources):
        total = sum(align(source.nbytes) for _, source in stretch)
        ticket, offset = allocate(total)
        for number, (want, source) in enumerate(stretch):
            pairs.append((ring(offset, source.numel(), source.dtype), source))
            last = number == len(stretch) - 1
            sent.gradients.append(
                Gradient(
                    block=want.block,
                    offset=offset,
                    dtype=dtype_name(source.dtype),
                    ticket=ticket if last else 0,
                )
            )
            offset += align(source.nbytes)
    return device.copy(pairs, lane="gradients", step=step)


def _stretches(sources: list[tuple[Wanted, Tensor]]) -> list[list[tuple[Wanted, Tensor]]]:
    out: list[list[tuple[Wanted, Tensor]]] = []
    filled = STRETCH
    for source in sources:
        if filled >= STRETCH:
            out.append([])
            filled = 0
        out[-1].append(source)
        filled += align(source[1].nbytes)
    return out


def queue_flags(
    wanted: Sequence[Wanted], *, device: Device, staging: Staging, step: int, sent: Sent
) -> None:
    """Compare wide and narrow gradients on the device; the flags follow the copies to the host."""
    compares: list[tuple[Tensor, Tensor]] = []
    for want in wanted:
        wide, thin = wide_and_narrow(want.live)
        if wide is not None and thin is not None:
            compares.append((_part(wide, want), _part(thin, want)))
            sent.held.append(wide)
            sent.narrowed.append(want.live.name)
    if not compares:
        return
    flags = torch.empty(len(compares), dtype=torch.uint8, device=compares[0][0].device)
    sent.flags = staging.take(len(compares), torch.uint8)

    def compare() -> None:
        for index, (wide, thin) in enumerate(compares):
            flags[index] = _is_upcast(wide, thin)

    nbytes = sum(wide.nbytes + thin.nbytes for wide, thin in compares)
    sent.copies.append(device.run(compare, device_bytes=nbytes, lane="gradients", step=step))
    sent.copies.append(device.copy([(sent.flags, flags)], lane="gradients", step=step))


def _part(tensor: Tensor, want: Wanted) -> Tensor:
    """The block's elements, 1-D in memory order."""
    flat = flatten(tensor)
    return flat if want.stop - want.start == flat.numel() else flat[want.start : want.stop]


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
