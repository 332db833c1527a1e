"""The trainer's side of the memory that it shares with its agent: slots, their scratch, the ring.

Used by the training thread and by the client's own threads, under the client's lock, of which
:class:`gockpt.agent.client.AgentClient` says more. What always holds: only a checkpoint that begins
takes a slot, a free one or one whose checkpoint is durable, and never that of the newest checkpoint
that can be restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gockpt.agent.channel import Channel
from gockpt.agent.protocol import Attach
from gockpt.arena import Ring, Segment, SlotState
from gockpt.errors import AgentError


@dataclass(slots=True)
class Slot:
    """Memory for one checkpoint."""

    segment: Segment
    scratch: Segment
    state: SlotState = SlotState.FREE
    sequence: int = 0
    """Of the checkpoint that is in it."""


class Shared:
    """All of it; there is none before :meth:`allocate` or :meth:`take_over`."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.ring = Ring(0)
        self._ring_segment: Segment | None = None
        self._ring_views: dict[torch.dtype, Tensor] = {}

    @property
    def segments(self) -> list[Segment]:
        """All memory that device copies may go to."""
        found = [segment for slot in self.slots for segment in (slot.segment, slot.scratch)]
        return found + ([self._ring_segment] if self._ring_segment is not None else [])

    def take_over(self, segments: Mapping[str, Segment]) -> None:
        """Use the memory of an earlier trainer, by the names that :meth:`give` gives it."""
        self._ring_segment = segments.get("ring")
        # The ring comes last: without it, the trainer died before it had given all.
        count = sum(name.startswith("slot-") for name in segments)
        self.slots = [
            Slot(segments[f"slot-{number}"], segments[f"scratch-{number}"])
            for number in range(count if self._ring_segment is not None else 0)
        ]

    def give(self, channel: Channel) -> None:
        """Give all to an agent."""
        for number, slot in enumerate(self.slots):
            channel.send(Attach(name=f"slot-{number}", size=slot.segment.size), slot.segment)
            channel.send(Attach(name=f"scratch-{number}", size=slot.scratch.size), slot.scratch)
        if self._ring_segment is not None:
            channel.send(Attach(name="ring", size=self._ring_segment.size), self._ring_segment)

    def fits(self, *, slots: int, slot_bytes: int, scratch_bytes: int, ring_bytes: int) -> bool:
        """Whether what there is already is what is needed."""
        ring = self._ring_segment
        return (
            len(self.slots) == slots
            and all(
                slot.segment.size >= slot_bytes and slot.scratch.size >= scratch_bytes
                for slot in self.slots
            )
            and ring is not None
            and ring.size >= ring_bytes
        )

    def allocate(self, *, slots: int, slot_bytes: int, scratch_bytes: int, ring_bytes: int) -> None:
        """Make new memory in place of what there is.

        Raises:
            AgentError: there is not enough.
        """
        self.close()
        try:
            self.slots = [
                Slot(
                    Segment.create(f"slot-{number}", slot_bytes),
                    Segment.create(f"scratch-{number}", scratch_bytes),
                )
                for number in range(slots)
            ]
            self._ring_segment = Segment.create("ring", ring_bytes)
        except OSError as error:
            raise AgentError(
                f"no memory for {slots} slots of {slot_bytes} bytes and a ring of {ring_bytes} "
                f"({error.strerror}); use fewer slots or free memory"
            ) from error
        self._ring_views = {}
        self.renew_ring()

    def renew_ring(self) -> None:
        """Nothing that was put into the ring counts any more."""
        size = self._ring_segment.size if self._ring_segment is not None else 0
        self.ring = Ring(size, self.ring.tickets)

    def ring_view(self, dtype: torch.dtype) -> Tensor:
        """The whole ring, as a 1-D tensor of a dtype."""
        if self._ring_segment is None:
            raise AgentError("there is no gradient ring yet")
        found = self._ring_views.get(dtype)
        if found is None:
            found = self._ring_views[dtype] = self._ring_segment.tensor.view(dtype)
        return found

    @property
    def dropped(self) -> bool:
        """Whether the agent may still be at work on a checkpoint that was given up.

        It may not even have begun: it would then take whatever memory has the slot's name by then.
        """
        return any(slot.state is SlotState.DROPPED for slot in self.slots)

    def acquire(self, newest: int) -> int | None:
        """Take a slot for a new checkpoint, or None while none is free.

        Args:
            newest: sequence number of the newest checkpoint that can be restored.
        """
        for state in (SlotState.FREE, SlotState.RETAINED):
            for number, slot in enumerate(self.slots):
                spared = state is SlotState.RETAINED and slot.sequence == newest
                if slot.state is state and not spared:
                    slot.state = SlotState.FILLING
                    return number
        return None

    def agent_lost(self) -> None:
        """Nobody writes into what was dropped any more, nor reads the ring."""
        for slot in self.slots:
            if slot.state is SlotState.DROPPED:
                slot.state = SlotState.FREE
        self.renew_ring()

    def close(self) -> None:
        """Give all back."""
        for segment in self.segments:
            segment.close()
