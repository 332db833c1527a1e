"""Frozen parameters: copied into each slot once, and not again while they stay as they are.

Runs on the training thread. In fine-tuning with adapters they are nearly all of the model, and no
gradient can replay what never changes. What always holds: nothing is left out of a copy unless the
slot's last checkpoint was proved, with the very same tensor, unwritten since by torch's own count.
A loop may write ``param.data`` (an average of other weights, say) without being counted: so two
checkpoints must have had the same fingerprint of it before, and the proof of each one reads what
stands on the device all the same.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gockpt import fingerprint
from gockpt.agent.client import AgentClient
from gockpt.agent.handle import Handle, Stage
from gockpt.arena import Segment
from gockpt.errors import ProofError
from gockpt.state import Layout
from gockpt.strategies.views import Views

log = logging.getLogger("gockpt")

REMEMBERED = 8
"""Checkpoints of which it is known what they left out: more than can be on their way."""

Mark = tuple[int, int]
"""Address and version of a tensor: another one, or another content, has another mark."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What a checkpoint left in its slot."""

    handle: Handle
    segment: weakref.ref[Segment]
    """Weak, as slots are allocated anew where the state has grown."""
    marks: dict[int, Mark]

    def counts(self, segment: Segment) -> bool:
        """Whether it was proved, and lies in this memory."""
        proved = self.handle.stage in (Stage.CONSISTENT, Stage.COMMITTED)
        return proved and self.segment() is segment


class Frozen:
    """Which frozen parameters lie in which slot already."""

    def __init__(self, client: AgentClient) -> None:
        self.reused = 0
        """Bytes that the newest checkpoint did not have to copy."""
        self._reused: dict[int, frozenset[str]] = {}
        """By step: names of what its checkpoint did not copy, of those that may still fail."""
        self._client = client
        self._held: dict[int, _Held] = {}
        self._begun: dict[int, _Held] = {}
        """The same of captures that are not confirmed: one that is given up proves nothing."""
        self._lasting: dict[int, Mark] = {}
        """By entry: what two checkpoints had alike."""
        self._layout: Layout | None = None
        self._off = False

    def begin(self, slot: int, views: Views, handle: Handle, step: int) -> AbstractSet[int]:
        """The rest of a checkpoint, of this step, is about to be copied into a slot.

        Returns:
            The entries that lie there already.
        """
        layout = views.inventory.layout
        if self._layout is not layout:
            self._layout, self._held, self._begun, self._lasting = layout, {}, {}, {}
        marks = {index: _mark(tensor) for index, tensor in views.whole if _frozen(tensor)}
        segment = self._client.slot(slot)
        before = self._held.pop(slot, None)
        found: set[int] = set()
        if before is not None and before.counts(segment) and not self._off:
            self._compare(slot, before, layout)
            found = {
                index
                for index, mark in marks.items()
                if mark == before.marks.get(index) == self._lasting.get(index)
            }
        self.reused = sum(layout.entries[index].nbytes for index in found)
        names = frozenset(layout.entries[index].name for index in found)
        self._reused = {**dict(list(self._reused.items())[-REMEMBERED:]), step: names}
        self._begun[slot] = _Held(handle, weakref.ref(segment), marks)
        return found

    def confirmed(self, slot: int) -> None:
        """What was begun there will be finished as it is, or fail."""
        if slot in self._begun:
            self._held[slot] = self._begun.pop(slot)

    def mistaken(self, error: ProofError) -> bool:
        """A checkpoint was found wrong; whether that is because of what it left out, alone."""
        wrong = set(error.tensors)
        reused = self._reused.get(error.step or 0, frozenset())
        if not wrong & reused:
            return False
        log.info("a frozen parameter was written: they are copied each time from now on")
        self._off, self.reused = True, 0
        return wrong <= reused

    def _compare(self, slot: int, one: _Held, layout: Layout) -> None:
        """Learn which tensors had the same content in this slot's checkpoint and in another one."""
        client, first = self._client, fingerprint.offsets(layout)
        for number, two in self._held.items():
            if not two.counts(client.slot(number)):
                continue
            for index, mark in one.marks.items():
                if mark == two.marks.get(index) and mark != self._lasting.get(index):
                    runs = first[index], first[index + 1]
                    ours, others = client.scratch(slot), client.scratch(number)
                    if torch.equal(_sums(ours, *runs), _sums(others, *runs)):
                        self._lasting[index] = mark


def _frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _mark(tensor: Tensor) -> Mark:
    return tensor.data_ptr(), tensor._version


def _sums(scratch: Segment, start: int, stop: int) -> Tensor:
    """The sums of these runs, in the fingerprint of the true state; they depend on no seed."""
    return scratch.view(start * 8, stop - start, torch.int64)
