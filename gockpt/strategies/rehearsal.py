"""The rehearsal: before the first multi-step capture, one real update is replayed on a sample.

Runs on the training thread in one early pass, once. It also finds out, off the training thread,
whether 32-bit gradients really are upcasts of 16-bit ones, before anything depends on that.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from gockpt.devices.base import Device
from gockpt.inventory import Inventory
from gockpt.sample import Sample
from gockpt.strategies.gradients import Sent, compare
from gockpt.strategies.staging import Staging

PASS = 2
"""The pass that is sampled: the first one creates optimizer state, and is like no other."""


class Rehearsal:
    """Samples one update of each optimizer."""

    def __init__(self, optimizers: Sequence[Optimizer], device: Device, staging: Staging) -> None:
        self._optimizers = optimizers
        self._device = device
        self._staging = staging
        self._samples: dict[int, Sample] = {}
        self._flags: list[Sent] = []
        self._begun = self._concluded = False
        self._verdict: bool | None = None
        self.refused: dict[tuple[int, int], str] = {}
        """(optimizer, group) → why its updates cannot be replayed."""

    def due(self, current_step: int) -> bool:
        """Whether the pass after ``current_step`` is the one to sample."""
        return not self._concluded and current_step + 1 >= PASS

    def before(self, index: int, inventory: Inventory) -> None:
        """An optimizer is about to make the update to sample."""
        self._begun = True
        groups = {
            live.group_index for live in inventory.replayable if live.optimizer_index == index
        }
        if not groups:
            return
        self._samples[index] = Sample(self._optimizers[index], groups=groups)
        lives = [live for live in inventory.replayable if live.optimizer_index == index]
        sent = compare(lives, device=self._device, staging=self._staging, step=0)
        if sent.flags is not None:
            self._flags.append(sent)

    def after(self, index: int) -> None:
        """It has made it: compare."""
        sample = self._samples.pop(index, None)
        if sample is not None:
            self.refused |= {(index, group): why for group, why in sample.repeats().items()}

    def pass_ended(self) -> None:
        """All optimizers that take part in this pass have been sampled, if they could be."""
        self._concluded = self._begun

    @property
    def pending(self) -> bool:
        """Whether there is no verdict yet."""
        if self._verdict is None and self._concluded and all(sent.done() for sent in self._flags):
            flags = [sent.flags for sent in self._flags if sent.flags is not None]
            self._verdict = all(bool(one.all()) for one in flags)
            self._flags.clear()
        return self._verdict is None

    def narrow(self) -> bool:
        """Whether 16 bits of each gradient are exact, once nothing is pending."""
        return self._verdict is not False
