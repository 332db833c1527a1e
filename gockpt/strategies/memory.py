"""The host memory of one training: how much it takes, whether that fits, and getting it.

Runs on the training thread, at the start and where the state has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gockpt import fingerprint, hostmemory
from gockpt.agent.client import AgentClient
from gockpt.arena import Segment
from gockpt.devices.base import Device
from gockpt.errors import ConfigError
from gockpt.inventory import Inventory
from gockpt.plan import Plan
from gockpt.replay import WIDENED
from gockpt.state import PAGE, align
from gockpt.storage.header import header_reserve
from gockpt.strategies.planner import FINGERPRINT_BYTES, grad_itemsize

HEADER_SPARE = 64 << 10
"""Room in the header for extras that appear later."""

REPLAY_SCRATCH = WIDENED * 4
"""Bytes that the replay widens gradients in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Sizes in bytes, for one structure of model and optimizers."""

    slots: int
    slot: int
    scratch: int
    """Beside each slot, for the fingerprint that its content is proved by."""
    ring: int
    header: int
    """Reserved before the data of a file."""

    @classmethod
    def needed(cls, inventory: Inventory, *, slots: int, several: bool) -> Memory:
        """What an inventory needs.

        Args:
            several: whether checkpoints may take several windows; only then gradients are sent.
        """
        layout = inventory.layout
        # Two whole sets of gradients: what a replay that keeps up never fills.
        sizes = (align(live.param.numel() * grad_itemsize(live)) for live in inventory.replayable)
        return cls(
            slots=slots,
            slot=layout.size,
            scratch=fingerprint.offsets(layout)[-1] * FINGERPRINT_BYTES,
            ring=2 * sum(sizes) + PAGE if several else PAGE,
            header=align(header_reserve(layout.entries) + HEADER_SPARE, PAGE),
        )

    @property
    def total(self) -> int:
        """Of slots, scratch and gradient ring."""
        return self.slots * (self.slot + self.scratch) + self.ring

    def allocate(self, client: AgentClient, device: Device) -> None:
        """Get the memory, and pin it; unpin what it replaces.

        Raises:
            ConfigError: it cannot fit; said before the first step, instead of being killed later.
            AgentError: there is not enough after all.
            DeviceError: the system refused to pin it.
        """
        sizes = {
            "slots": self.slots,
            "slot_bytes": self.slot,
            "scratch_bytes": self.scratch,
            "ring_bytes": self.ring,
        }
        # What an earlier trainer left is used, or given back first.
        free = hostmemory.available() + client.shared_bytes
        if self.total > free and not client.fits(**sizes):
            raise ConfigError(
                f"checkpoints need {self.total / 1e9:.1f} GB of host memory for {self.slots} slots "
                f"and the gradient ring, {free / 1e9:.1f} GB are free; free memory (`gockpt "
                "agents` shows what lingers), or use a strategy with one window"
            )
        before = client.segments
        client.allocate(**sizes)
        now = client.segments
        _unpin([segment for segment in before if segment not in now], device)
        for segment in now:
            device.register(segment.tensor)

    def predicted(self, plan: Plan | None, *, held_on_host: bool, compared: bool) -> int:
        """All host memory that checkpointing adds, by the plan.

        Args:
            held_on_host: gradients are in host memory too, so that holding them takes some of it.
            compared: 32-bit gradients are held beside those of 16 bits.
        """
        if plan is None or plan.windows == 1:
            return self.total
        held = plan.burst_bytes * (3 if compared else 1) if held_on_host else 0
        return self.total + held + REPLAY_SCRATCH


def _unpin(replaced: Sequence[Segment], device: Device) -> None:
    """Let go of memory that others took the place of: what is pinned is never given back."""
    if replaced:
        device.synchronize()  # The last copies of a checkpoint that was given up may still run.
    for segment in replaced:
        device.unregister(segment.tensor)
