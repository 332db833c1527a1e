"""The modelled link of the emulated accelerator: when it gets to which bytes.

Owned by the copy stream's thread. Time is kept as one absolute cursor, so that neither late
wake-ups nor the cost of the real copies add up: a link that fell behind catches up with its
schedule, and :attr:`LinkClock.lag_s` says how far behind it ever was. It is never early by more
than one slice: bytes are read at the beginning of the slice that they pass in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gockpt.pace import sleep_until

SLICE_S = 0.001
"""Link time per slice: short beside every phase, long beside a wake-up of a thread."""


class LinkClock:
    """Paces copies by a rate that may change at any time, and device reads by a fixed one."""

    def __init__(self, *, rate: Callable[[], float], alone: float, device_rate: float) -> None:
        """``rate`` gives the link's bytes a second right now, ``alone`` its highest."""
        self.slice_bytes = max(64, int(alone * SLICE_S) // 64 * 64)
        self.lag_s = 0.0
        self._rate = rate
        self._device_rate = device_rate
        self._at = 0.0
        self._room = 0

    def begin(self, queued: float) -> None:
        """An idle link starts with the job when it was queued; a busy one goes on behind it."""
        self._at = max(self._at, queued)
        self._room = 0

    def turn(self, nbytes: int, efficiency: float) -> None:
        """Sleep until the link gets to these bytes. Small pairs share one slice, and one sleep."""
        if nbytes > self._room:
            self._reach()
            self._room = self.slice_bytes
        self._room -= nbytes
        self._at += nbytes / (self._rate() * efficiency)

    def device(self, nbytes: int) -> None:
        """Sleep until what is ahead has passed, then let the device's own reading begin."""
        self._reach()
        self._at += nbytes / self._device_rate

    def finish(self) -> None:
        """Sleep until the last byte has passed."""
        self._reach()

    def _reach(self) -> None:
        late = time.monotonic() - self._at
        if late > self.lag_s:
            self.lag_s = late
        sleep_until(self._at)
