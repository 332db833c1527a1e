"""What the devices that are really the host have in common: a copy thread and a waiting gate.

Compute runs on the training thread itself, so it has always finished what it held when a copy is
queued, and a gate is a wait of that thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from gockpt.devices.accounting import Blocked
from gockpt.devices.base import Copied, Pairs
from gockpt.devices.stream import Clock, CopyStream, HostCopied
from gockpt.devices.transfer import copy_pairs
from gockpt.errors import DeviceError
from gockpt.events import Recorder

DEADLINE_S = 600.0
"""How long a gate, synchronize or close waits before it gives up on the copy stream."""


class HostDevice:
    """Everything of a host device but its speed. Also holds the defaults: no pinning, no limit."""

    def __init__(
        self,
        name: str,
        *,
        emulated: bool,
        clock: Clock,
        recorder: Recorder | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.name = name
        self.emulated = emulated
        self.recorder = Recorder() if recorder is None else recorder
        self._deadline_s = deadline_s
        self._blocked = Blocked(self.recorder)
        self._stream = CopyStream(name, self.recorder, clock)

    def copy(
        self,
        pairs: Pairs,
        *,
        lane: str,
        step: int,
        piece_bytes: int | None = None,
        piece_efficiency: float = 1.0,
    ) -> HostCopied:
        """Queue copies. ``piece_bytes`` changes nothing here: any pair can be withdrawn."""
        known = None if callable(pairs) else len(pairs)
        act = partial(copy_pairs, pairs, piece_efficiency)
        return self._stream.submit(act, lane=lane, step=step, pairs=known)

    def run(
        self, work: Callable[[], None], *, device_bytes: int, lane: str, step: int
    ) -> HostCopied:
        """Queue work that reads device memory, in turn with the copies."""
        return self._stream.submit(partial(_run, work, device_bytes), lane=lane, step=step)

    def gate(self, after: Copied, *, name: str, step: int) -> None:
        """Wait, as compute, until ``after`` has ended."""
        if after.done():
            after.wait(0)  # Raises what went wrong.
            return
        with self._blocked.during(name, step):
            self._await(after, f"{name} of step {step}")

    def hold(self, name: str, step: int) -> AbstractContextManager[None]:
        """Count the body's time as blocked."""
        return self._blocked.during(name, step)

    def blocked_seconds(self) -> float:
        """Seconds spent in holds and gates that have ended."""
        return self._blocked.seconds

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Record the body as a span of compute."""
        with self.recorder.span("compute", name, step):
            yield

    def register(self, memory: Tensor) -> None:
        """Nothing to pin."""

    def unregister(self, memory: Tensor) -> None:
        """Nothing to unpin."""

    def headroom(self) -> int | None:
        """No limit of its own: the tensors are in host memory."""
        return None

    def synchronize(self) -> None:
        """Wait until the copy stream has done everything queued so far."""
        last = self._stream.submit(_nothing, lane="synchronize", step=0)
        self._await(last, "synchronize")

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._stream.close(self._deadline_s)

    def _await(self, copied: Copied, what: str) -> None:
        if not copied.wait(self._deadline_s):
            raise DeviceError(
                f"{self.name}: {what} still waits for a copy after {self._deadline_s:.0f} s; "
                "the copy stream is stuck"
            )


def _run(work: Callable[[], None], device_bytes: int, copied: HostCopied, clock: Clock) -> None:
    with torch.no_grad():
        clock.device(device_bytes)
        work()


def _nothing(copied: HostCopied, clock: Clock) -> None:
    """A job that only marks a place in the queue."""
