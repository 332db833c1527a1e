"""Small numbers on their way from the device to the outbox thread: 0-dim state, flags, scales.

Pinned memory of the trainer, given out round and round. It is far larger than what all captures in
flight can hold, so a number is read long before its place is given out again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gockpt.arena import Segment
from gockpt.devices.base import Device
from gockpt.state import align

PER_PARAM = 1024
"""Bytes kept for each parameter: 16 numbers in each of many windows."""

LEAST = 1 << 20


class Staging:
    """Gives out small pieces of pinned memory."""

    def __init__(self, device: Device, params: int) -> None:
        self._segment = Segment(align(max(LEAST, params * PER_PARAM), 4096), fd=None)
        self._next = 0
        self._device = device
        self._kept = Segment(align(LEAST, 4096), fd=None)
        self._kept_used = 0
        for segment in (self._segment, self._kept):
            device.register(segment.tensor)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next 1-D piece."""
        nbytes = align(numel * dtype.itemsize, 8)
        if self._next + nbytes > self._segment.size:
            self._next = 0
        piece = self._segment.view(self._next, numel, dtype)
        self._next += nbytes
        return piece

    def keep(self, dtype: torch.dtype) -> Tensor:
        """One number's place that is given out only once, for as long as its view lives."""
        if self._kept_used + 8 > self._kept.size:
            self._kept = Segment(align(LEAST, 4096), fd=None)
            self._device.register(self._kept.tensor)
            self._kept_used = 0
        piece = self._kept.view(self._kept_used, 1, dtype)
        self._kept_used += 8
        return piece

    def close(self) -> None:
        """Unpin it."""
        for segment in (self._segment, self._kept):
            self._device.unregister(segment.tensor)
