"""The CPU as its own device: state is copied by a thread, at the speed of memory."""

from __future__ import annotations

import time

import torch

from gockpt.devices.host import DEADLINE_S, HostDevice
from gockpt.devices.stream import Unpaced
from gockpt.events import Recorder

PROBE_BYTES = 32 << 20
"""Large enough to leave the caches of most machines, small enough to take some milliseconds."""


class CpuDevice(HostDevice):
    """Training on the CPU."""

    def __init__(self, *, recorder: Recorder | None = None, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(
            "cpu", emulated=False, clock=Unpaced(), recorder=recorder, deadline_s=deadline_s
        )
        self._rate: float | None = None

    def link_rate(self, *, computing: bool = True) -> float:
        """The rate of one thread copying memory, measured once (the best of three)."""
        if self._rate is None:
            source = torch.ones(PROBE_BYTES, dtype=torch.uint8)
            target = torch.zeros(PROBE_BYTES, dtype=torch.uint8)  # Touched: no page faults below.
            self._rate = max(self._measure(target, source) for _ in range(3))
        return self._rate

    def _measure(self, target: torch.Tensor, source: torch.Tensor) -> float:
        start = time.perf_counter()
        self._await(self.copy([(target, source)], lane="probe", step=0), "measuring the link")
        return PROBE_BYTES / (time.perf_counter() - start)
