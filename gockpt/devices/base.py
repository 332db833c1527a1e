"""What the engine asks of an accelerator, and no more than that.

A device has a *compute stream* (the user's training) and one *copy stream*, first in first out. Two
rules hold on every device, and one conformance suite checks them:

* what :meth:`Device.copy` queues reads its sources only after everything that the compute stream
  held at the time of the call, and as late as the link gets to them;
* nothing but :meth:`Device.gate` keeps the compute stream from overtaking the copy stream. A
  missing gate therefore corrupts the copy, on an emulated device as on a real one.

Not in here: allocation, kernels, random numbers. Those stay torch's own business. The methods are
for the training thread (and for autograd's threads while that one waits for them), except where
they say otherwise; :class:`Copied` may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from gockpt.events import Recorder

Pair = tuple[Tensor, Tensor]
"""(destination in host memory, source on the device): same dtype, same number of elements. The
destination is contiguous; the source may have any strides."""

Pairs = Sequence[Pair] | Callable[[], Sequence[Pair]]
"""Pairs, or a function that finds them out. It is called on the copy stream's own thread when its
turn has come, so that the training thread need not do it; its pairs cannot be withdrawn."""


@runtime_checkable
class Copied(Protocol):
    """The completion of what one call queued on the copy stream."""

    def done(self) -> bool:
        """Whether it has ended, well or badly. Never blocks."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait on the host for at most ``timeout`` seconds; return whether it has ended.

        Raises:
            DeviceError: it failed, or whatever was to do it is gone.
        """
        ...

    def withdraw(self) -> int:
        """Take back the pairs that the link has not begun.

        Returns how many pairs, counted from the first, are or will still be copied; it is done when
        those are. A pair that has begun is finished, so hand over small pairs where this matters.
        """
        ...

    @property
    def seconds(self) -> float | None:
        """Time from its first to its last byte on the copy stream, once done; None before."""
        ...


@runtime_checkable
class Device(Protocol):
    """An accelerator as the checkpoint engine sees it."""

    @property
    def name(self) -> str:
        """``cpu``, ``cuda:0``, ``emulated:a100-pcie4``."""
        ...

    @property
    def emulated(self) -> bool:
        """Whether its times are modelled. Every figure that is shown has to say so."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Where its spans go: ``compute``, ``stall``, and the lanes given to copy and run."""
        ...

    def copy(
        self,
        pairs: Pairs,
        *,
        lane: str,
        step: int,
        piece_bytes: int | None = None,
        piece_efficiency: float = 1.0,
    ) -> Copied:
        """Queue copies from the device to host memory. Never blocks; holds the sources until done.

        Args:
            pairs: what to copy, in this order.
            lane: where its span belongs (``state``, ``gradients``, …).
            step: the step that it is recorded under.
            piece_bytes: submit in pieces of about this size, so that the rest can be withdrawn.
            piece_efficiency: the share of the link's rate that such pieces reach (modelled only).

        Raises:
            DeviceError: the device is closed. Whatever fails later is raised by the wait or gate.
        """
        ...

    def run(self, work: Callable[[], None], *, device_bytes: int, lane: str, step: int) -> Copied:
        """Queue work that reads device memory (proof sums, comparisons), in turn with the copies.

        ``work`` is called once on the copy stream's own thread, with gradients off; on CUDA the
        copy stream is current there, and ``work`` must not wait for the device. It must keep what
        it reads alive by itself holding it. ``device_bytes`` is what it reads, for the model.
        """
        ...

    def gate(self, after: Copied, *, name: str, step: int) -> None:
        """Compute queued from now on may not begin before ``after`` has ended.

        Raises:
            DeviceError: ``after`` failed, its deadline passed, or its thread is gone.
        """
        ...

    def hold(self, name: str, step: int) -> AbstractContextManager[None]:
        """Everything that the engine does on the training thread happens inside this.

        The time counts as blocked, once: holds and gates may be nested. On an emulated device it
        also moves the end of the open phase, so that a stall never hides in modelled time.
        """
        ...

    def blocked_seconds(self) -> float:
        """Seconds, so far, for which the engine has held the training thread or the compute."""
        ...

    def phase(self, name: str, step: int) -> AbstractContextManager[None]:
        """``forward``, ``backward`` or ``update`` of the user's loop; phases are not nested."""
        ...

    def register(self, memory: Tensor) -> None:
        """Pin host memory for fast copies, where the device knows such a thing.

        Raises:
            DeviceError: the system refused to pin it.
        """
        ...

    def unregister(self, memory: Tensor) -> None:
        """Undo :meth:`register`, if there was one; the copies into it must be done.

        Whoever replaces registered memory calls this for the old: it stays mapped until then.
        """
        ...

    def link_rate(self, *, computing: bool = True) -> float:
        """Bytes a second that copies to the host reach, while the device computes or alone."""
        ...

    def headroom(self) -> int | None:
        """Bytes of device memory that tensors could still take; None where there is no limit."""
        ...

    def synchronize(self) -> None:
        """Wait until both streams are empty.

        Raises:
            DeviceError: the deadline passed, or the copy stream's thread is gone.
        """
        ...

    def close(self) -> None:
        """Finish what is queued and end the threads; a second call does nothing.

        Raises:
            DeviceError: something queued did not end in time; it has been failed.
        """
        ...
