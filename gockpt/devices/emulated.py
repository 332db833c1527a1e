"""The emulated accelerator: real tensors, real arithmetic, real copies, modelled time.

Lets the whole engine run on any Linux machine with the time behaviour of a named accelerator and
host. Each phase of the user's loop does its real (shrunk) work and then sleeps until the modelled
end; the copy thread moves real bytes no sooner than the modelled link would. A phase whose real
work takes longer than modelled cannot be hidden: it is counted as an overrun. docs/emulation.md
says what is modelled and what is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from gockpt.devices.host import DEADLINE_S, HostDevice
from gockpt.devices.link import LinkClock
from gockpt.devices.profiles import Profile
from gockpt.devices.stream import Clock, HostCopied
from gockpt.devices.work import ModelledWork
from gockpt.errors import DeviceError
from gockpt.events import Recorder
from gockpt.pace import sleep_until

LATE_S = 0.005
"""The most of a late wake-up that is taken off the next phase. The host's scheduler is no part of
the model, but more than this is no wake-up: it stays visible as loop time."""


class EmulatedDevice(HostDevice):
    """A named accelerator, acted by the host.

    Attributes:
        profile: the accelerator and host at full size, as published or assumed.
        rates: the same with every rate and size divided by the shrink: what the bytes of the real,
            shrunk tensors are measured against (the agent paces replay and writes by it).
        work: the modelled times of a step.
        overruns: phases so far whose real work took longer than modelled.
        overrun_s: by how much in all, and ``worst_overrun_s`` by how much at worst.
    """

    def __init__(
        self,
        profile: Profile,
        work: ModelledWork,
        *,
        recorder: Recorder | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.profile = profile
        self.rates = profile.shrunk(work.shrink)
        self.work = work
        self.overruns = 0
        self.overrun_s = 0.0
        self.worst_overrun_s = 0.0
        self._modelled = {
            "forward": work.forward_s,
            "backward": work.backward_s,
            "update": work.update_s,
        }
        self._open: str | None = None
        self._late_s = 0.0
        self._clock = LinkClock(
            rate=self.rate_now,
            alone=self.rates.link_alone,
            device_rate=self.rates.device_memory_bandwidth,
        )
        super().__init__(
            f"emulated:{profile.name}",
            emulated=True,
            clock=self._clock,
            recorder=recorder,
            deadline_s=deadline_s,
        )

    @property
    def link_lag_s(self) -> float:
        """How far the real copies ever fell behind the modelled link."""
        return self._clock.lag_s

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Do the body, then sleep until the modelled end, moved by what was held meanwhile."""
        modelled_s = self._modelled_s(name)
        start = time.monotonic()
        end = start - self._late_s + modelled_s - self._blocked.seconds
        self._open, self._late_s = name, 0.0
        try:
            yield
            self._late_s = self._stretch(end + self._blocked.seconds)
        finally:
            self._open = None
            self.recorder.add("compute", name, start, time.monotonic(), step)

    def occupy_link(self, nbytes: int, *, lane: str, step: int) -> HostCopied:
        """Queue the passing of bytes that somebody else's code copies: the link's time, no copy."""
        return self._stream.submit(partial(_pass, nbytes), lane=lane, step=step)

    def link_rate(self, *, computing: bool = True) -> float:
        """The profile's rate, shrunk."""
        factor = self.rates.link_computing_factor if computing else 1.0
        return self.rates.link_alone * factor

    def headroom(self) -> int | None:
        """What the modelled training leaves of the modelled memory, shrunk."""
        free = self.profile.device_memory_bytes - self.work.resident_bytes
        return max(0, int(free / self.work.shrink))

    def _modelled_s(self, name: str) -> float:
        if self._open is not None:
            raise DeviceError(f"phase {name!r} begins inside {self._open!r}; end that one first")
        if name not in self._modelled:
            known = ", ".join(self._modelled)
            raise DeviceError(f"no time is modelled for phase {name!r}; use one of: {known}")
        return self._modelled[name]

    def _stretch(self, end: float) -> float:
        """Sleep until ``end``; return how much too late that came back, which is not modelled."""
        over = time.monotonic() - end
        if over > 0:
            self.overruns += 1
            self.overrun_s += over
            self.worst_overrun_s = max(self.worst_overrun_s, over)
            return 0.0
        sleep_until(end)
        return min(LATE_S, time.monotonic() - end)

    def rate_now(self) -> float:
        """The link's rate at this moment (asked by the copy thread before each slice)."""
        return self.link_rate(computing=self._open is not None and not self._blocked.active)


def _pass(nbytes: int, copied: HostCopied, clock: Clock) -> None:
    for begun in range(0, nbytes, clock.slice_bytes):
        clock.turn(min(clock.slice_bytes, nbytes - begun), 1.0)
