"""One training step, the same for ``gockpt train`` and ``gockpt bench``. The training thread's.

The three phases are what an emulated device stretches to the modelled times, and what a timeline
shows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from gockpt.workloads.build import Workload


class Phases(Protocol):
    """The one thing that a step needs of a device."""

    def phase(self, name: str, step: int) -> AbstractContextManager[object]: ...


def train_step(workload: Workload, device: Phases, step: int) -> Tensor:
    """One pass: next batch, forward, backward, update. ``step`` is the pass's number, from 1.

    Gradients live until the next backward needs their place, so that a checkpoint may still read
    them behind the update. The loss is returned where it was computed, without waiting for it.
    """
    with device.phase("forward", step):
        inputs, targets = next(workload.loader)
        loss = workload.loss(inputs, targets)
    with device.phase("backward", step):
        workload.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
    with device.phase("update", step):
        workload.update()
    return loss.detach()
