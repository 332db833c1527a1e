"""Fences: gradient buffers that are written again must first have been copied.

Most loops make new gradients in each pass; holding a reference is enough then. Others write into
the same buffers: ``zero_grad(set_to_none=False)``, accumulation into ``.grad``, DDP's bucket views.
There the training waits, at the latest moment, for the copies that are still on their way.

Runs on the training thread, or on autograd's while the training thread waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gockpt.devices.base import Device
from gockpt.errors import DeviceError
from gockpt.inventory import Inventory, LiveParam
from gockpt.situation import Gradients
from gockpt.strategies.gradients import Sent


class Fences:
    """The gradients in flight, and what the loop does with their buffers."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sent: list[Sent] = []
        self._hook: Any = None
        self._last: weakref.ref[Tensor] | None = None
        self.gradients: Gradients = "fresh"
        """What happens to gradient buffers in this loop, as far as was seen."""

    def observe(self, inventory: Inventory, index: int) -> None:
        """In the pre-hook of an update: are the gradients new tensors, or the same again?"""
        live = next((one for one in inventory.replayable if one.optimizer_index == index), None)
        if live is None or (grad := _trained(live).grad) is None:
            return
        same = self._last is not None and self._last() is grad
        if (same or grad._base is not None) and self.gradients == "fresh":
            self.gradients = "reused"
        self._last = weakref.ref(grad)  # weak: it would take device memory in the next pass

    def add(self, sent: Sent) -> None:
        """Gradients have been queued."""
        self._sent = [old for old in self._sent if not old.done()]
        self._sent.append(sent)

    def gate(self, batches: Sequence[Sent]) -> None:
        """Compute waits for these copies."""
        for sent in batches:
            for copied in sent.copies:
                self._device.gate(copied, name="gradients", step=sent.step)
            if sent.unchanged():
                sent.verified = True

    def fence(self) -> None:
        """The buffers are about to be written again."""
        waiting = [sent for sent in self._sent if not sent.verified]
        if not waiting:
            return
        with self._device.hold("fence", waiting[-1].step):
            for sent in waiting:
                # In the user's backward or zero_grad: that a copy failed is told by ckpt.step().
                with suppress(DeviceError):
                    self.gate([sent])

    def zeroing(self) -> None:
        """``zero_grad(set_to_none=False)`` is about to write the buffers."""
        self.gradients = "zeroed"
        self.fence()

    def watch(self, inventory: Inventory) -> None:
        """Where the next backward writes into the same buffers, put a fence before it."""
        if self.gradients == "fresh" or self._hook is not None:
            return
        tensors = [_trained(live) for live in inventory.replayable]
        self._hook = torch.autograd.graph.register_multi_grad_hook(
            [tensor for tensor in tensors if tensor.requires_grad],
            lambda _: self.fence(),
            mode="any",
        )

    def unwatch(self) -> None:
        """No window is open, and all gradients have been copied."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._sent.clear()


def _trained(live: LiveParam) -> Tensor:
    """The tensor that backward accumulates into."""
    return live.param if live.model_tensor is None else live.model_tensor
