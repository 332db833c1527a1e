"""One checkpoint in the agent: from the first captured block to a proved image.

Runs in the agent's loop, in slices of bounded work. What always holds: a byte is handed to the
writer only once it is final, and nothing changes it after that; a block is final when it is at the
target, which is when all updates after its version have been replayed on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from gockpt import faults
from gockpt.agent import proof
from gockpt.agent.protocol import (
    Block,
    Captured,
    Gradient,
    Hello,
    Open,
    Seal,
    Structure,
    Update,
)
from gockpt.arena import Segment
from gockpt.errors import AgentError, ProofError
from gockpt.events import Recorder
from gockpt.pace import Pacer
from gockpt.replay import Replayer
from gockpt.state import Layout, torch_dtype
from gockpt.storage.records import EXTENT

SLICE = 2 * 1024 * 1024
"""Parameter updates between two looks at the messages (a few milliseconds)…"""

SLICE_S = 0.01
"""…or as many as a modelled host makes in this time."""

PROOF_SLICE = 64 << 20
"""Bytes of the image that are read for the proof between two looks at the messages."""


@dataclass(slots=True)
class _LiveBlock:
    record: Block
    replay_id: int
    version: int


@dataclass(slots=True)
class _Pending:
    message: Update
    left: deque[Gradient] = field(default_factory=deque)


class Job:
    """The work on one checkpoint.

    Args:
        ready: called with (start, stop) of each stretch of the image that is final.
        freed: called with tickets of the ring that have been used up.
    """

    def __init__(
        self,
        opened: Open,
        structure: Structure,
        hello: Hello,
        slot: Segment,
        scratch: Segment,
        ring: Segment,
        *,
        recorder: Recorder,
        ready: Callable[[int, int], None],
        freed: Callable[[list[int]], None],
    ) -> None:
        self.opened = opened
        self.structure = structure
        self.layout = structure.layout
        self.slot = slot
        self.seal_message: Seal | None = None
        self.replayed = 0
        self.replay_s = 0.0
        self.outcome: proof.Outcome | None = None
        self._scratch = scratch
        self._ring = ring
        self._hello = hello
        self._recorder = recorder
        self._freed = freed
        self._replay_pacer = _pacer(hello.pace.replay)
        rate = hello.pace.replay
        self._slice = SLICE if rate is None else max(1, min(SLICE, int(rate * SLICE_S)))
        self._memory_pacer = _pacer(hello.pace.memory)
        self._ready = ready
        self.busy_until = 0.0
        """When the modelled host will be free for the next slice."""
        self._replayer = Replayer(structure.optimizers, threads=hello.threads)
        self._blocks: list[_LiveBlock] = []
        self._pending: deque[_Pending] = deque()
        self._unfinished = [self.layout.entries[p.param].numel for p in self.layout.params]
        self._final = _FinalBytes(self.layout, self._ready)
        self._proof: Iterator[int] | None = None

    # -- messages ----------------------------------------------------------------------------------

    def captured(self, message: Captured) -> None:
        """Blocks and whole entries have arrived in the slot."""
        if message.target is not None:
            self._aim_at(message.target)
        for record in message.blocks:
            self._blocks.append(self._add(record))
            if record.version == self.opened.step:
                self._finish_block(self._blocks[-1])
        for index in message.entries:
            entry = self.layout.entries[index]
            self._final.add(entry.offset, entry.nbytes)

    def _add(self, record: Block) -> _LiveBlock:
        param = self.layout.params[record.param]
        views = {key: self._view(index, record) for key, index in param.state.items()}
        replay_id = self._replayer.add(
            optimizer=param.optimizer,
            group=param.group,
            param=self._view(param.param, record),
            state={key: view for key, view in views.items() if key in record.state},
            reserved={key: view for key, view in views.items() if key not in record.state},
            scalars={
                key: torch.tensor(
                    value, dtype=torch_dtype(self.layout.entries[param.scalars[key]].dtype)
                )
                for key, value in record.scalars.items()
            },
        )
        return _LiveBlock(record=record, replay_id=replay_id, version=record.version)

    def _view(self, index: int, record: Block) -> Tensor:
        entry = self.layout.entries[index]
        dtype = torch_dtype(entry.dtype)
        offset = entry.offset + record.start * dtype.itemsize
        return self.slot.view(offset, record.stop - record.start, dtype)

    def update(self, message: Update) -> None:
        """One update, with the gradients of all blocks captured before it, has arrived."""
        self._pending.append(_Pending(message, deque(message.gradients)))

    def seal(self, message: Seal) -> None:
        """Everything has arrived."""
        self.seal_message = message
        self._aim_at(message.step)
        # Absent state of what is made of blocks is final with those: bytes are counted once.
        entries = self.layout.entries
        counted = {*message.present, *self.layout.of_blocks()}
        for index in set(range(len(entries))) - counted:
            self._final.add(entries[index].offset, entries[index].nbytes)

    def _aim_at(self, target: int) -> None:
        """The step to reach is known for certain, and may be an earlier one than announced."""
        if target == self.opened.step:
            return
        self.opened = msgspec.structs.replace(self.opened, step=target)
        for block in self._blocks:
            if block.version == target:
                self._finish_block(block)

    def adopt(self, seal: Seal, verdict: proof.Verdict) -> None:
        """Take over a slot that was complete and proved before."""
        self.seal_message = seal
        self.opened = msgspec.structs.replace(self.opened, step=seal.step)
        self.outcome = proof.Outcome(verdict=verdict, detail="proved by an earlier agent")
        self._final.close(self.layout.size)

    # -- work --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether :meth:`work` can do something now."""
        return bool(self._pending) or (self.seal_message is not None and self.outcome is None)

    def work(self) -> bool:
        """Do one slice; return whether the image is now complete and proved.

        Raises:
            ProofError: what was captured and replayed is not the true state.
        """
        if self._pending:
            self._replay_slice()
        elif self.seal_message is not None and self.outcome is None:
            self._prove_slice(self.seal_message)
        return self.outcome is not None

    def _replay_slice(self) -> None:
        faults.point("replay.update")
        start = time.monotonic()
        pending = self._pending[0]
        batch: dict[int, list[tuple[int, Tensor]]] = {}
        done = 0
        tickets: list[int] = []
        blocks: list[_LiveBlock] = []
        while pending.left and done < self._slice:
            gradient = pending.left.popleft()
            block = self._blocks[gradient.block]
            numel = block.record.stop - block.record.start
            view = self._ring.view(gradient.offset, numel, torch_dtype(gradient.dtype))
            optimizer = self.layout.params[block.record.param].optimizer
            batch.setdefault(optimizer, []).append((block.replay_id, view))
            blocks.append(block)
            done += numel
            if gradient.ticket:
                tickets.append(gradient.ticket)
        for optimizer, items in batch.items():
            update = pending.message.updates[optimizer]
            if faults.armed("replay.drop-gradient"):
                items = items[1:]
            if update is not None:
                self._replayer.apply(optimizer, update, items)
        if self._replay_pacer is not None:
            self.busy_until = self._replay_pacer.book(done)
        end = max(time.monotonic(), self.busy_until)
        self.replayed += done
        self.replay_s += end - start
        self._recorder.add("replay", "replay", start, end, pending.message.version)
        if tickets:
            self._freed(tickets)
        for block in blocks:  # at once: after the last update it is written during further replay
            self._bring(block, pending.message.version)
        if not pending.left:
            self._end_update(pending.message)

    def _end_update(self, message: Update) -> None:
        self._pending.popleft()
        brought = {gradient.block for gradient in message.gradients}
        for number, block in enumerate(self._blocks):
            if number not in brought:  # it had no gradient
                self._bring(block, message.version)

    def _bring(self, block: _LiveBlock, version: int) -> None:
        """The block has been through this update."""
        if block.version != version - 1 or faults.armed("replay.late-block"):
            return
        block.version = version
        if version == self.opened.step:
            self._finish_block(block)

    def _finish_block(self, block: _LiveBlock) -> None:
        """The block is at the target: write its cast, and hand its bytes over."""
        record = block.record
        param = self.layout.params[record.param]
        if param.derived is not None:
            self._view(param.derived, record).copy_(self._view(param.param, record))
        for index in (param.param, param.derived, *param.state.values()):
            if index is not None:
                size = torch_dtype(self.layout.entries[index].dtype).itemsize
                offset = self.layout.entries[index].offset + record.start * size
                self._final.add(offset, (record.stop - record.start) * size)
        self._unfinished[record.param] -= record.stop - record.start
        if self._unfinished[record.param] == 0:
            self._finish_scalars(record.param)

    def _finish_scalars(self, index: int) -> None:
        """All blocks of a parameter are at the target: their 0-dim state must agree."""
        param = self.layout.params[index]
        blocks = [block for block in self._blocks if block.record.param == index]
        agreed = self._replayer.scalars(blocks[0].replay_id) if blocks else {}
        for block in blocks[1:]:
            if not _equal(agreed, self._replayer.scalars(block.replay_id)):
                raise ProofError(f"parts of {param.name!r} disagree about its 0-dim state")
        for key, value in agreed.items():
            entry = self.layout.entries[param.scalars[key]]
            self.slot.view(entry.offset, 1, torch_dtype(entry.dtype)).copy_(value.reshape(1))
        for number in param.scalars.values():
            entry = self.layout.entries[number]
            self._final.add(entry.offset, entry.nbytes)

    # -- proof -------------------------------------------------------------------------------------

    def _prove_slice(self, message: Seal) -> None:
        if self._proof is None:
            self._check_complete(message)
            if faults.armed("slot.flip-word"):
                self.slot.tensor[self.layout.entries[message.present[0]].offset] ^= 1
            self._prover = proof.Prover(
                self.layout, self.slot, self._scratch, message, exact=self._hello.exact
            )
            self._proof = self._prover.run(PROOF_SLICE)
        start = time.monotonic()
        read = next(self._proof, None)
        if self._memory_pacer is not None and read is not None:
            self.busy_until = self._memory_pacer.book(read)
        self._recorder.add(
            "proof", "compare", start, max(time.monotonic(), self.busy_until), self.opened.step
        )
        if read is None:
            self._conclude(self._prover.outcome())

    def _conclude(self, outcome: proof.Outcome) -> None:
        if outcome.verdict == "wrong":
            raise ProofError(
                f"the checkpoint of step {self.opened.step} is not the true state "
                f"({outcome.detail}); it was not committed, the one before it stands",
                self._prover.wrong,
            )
        if outcome.verdict == "close" and self._hello.require_exact:
            raise ProofError(
                f"the checkpoint of step {self.opened.step} is close but not exact "
                f"({outcome.detail}) and require_exact is set"
            )
        self.outcome = outcome
        self._final.close(self.layout.size)

    def _check_complete(self, message: Seal) -> None:
        late = [block for block in self._blocks if block.version != self.opened.step]
        if late:
            name = self.layout.params[late[0].record.param].name
            raise ProofError(
                f"a part of {name!r} stayed at step {late[0].version} instead of "
                f"{self.opened.step}; the checkpoint was not committed"
            )
        missing = [
            self.layout.params[index].name for index, left in enumerate(self._unfinished) if left
        ]
        if missing:
            raise ProofError(f"parts of {missing[0]!r} were never captured; nothing was committed")

    def tickets(self) -> list[int]:
        """Stretches of the ring that this checkpoint still holds."""
        return [ticket for pending in self._pending for ticket in tickets_of(pending.message)]


def tickets_of(message: Update) -> list[int]:
    """The stretches of the ring that an update holds."""
    return [gradient.ticket for gradient in message.gradients if gradient.ticket]


def extent_bytes(image: int) -> int:
    """Bytes written at a time: few enough that an image is written while it is being completed."""
    return min(EXTENT, max(EXTENT // 16, 1 << (image // 64).bit_length()))


class _FinalBytes:
    """Finds out which extents of the image are final, whatever the order of their parts."""

    def __init__(self, layout: Layout, ready: Callable[[int, int], None]) -> None:
        entries = layout.entries
        self._extent = extent_bytes(layout.size)
        self._ready = ready
        self._open: dict[int, int] = {}
        for entry in entries:
            for extent, overlap in self._overlaps(entry.offset, entry.nbytes):
                self._open[extent] = self._open.get(extent, 0) + overlap
        self._handed: set[int] = set()
        self._end = max((entry.offset + entry.nbytes for entry in entries), default=0)

    def add(self, offset: int, nbytes: int) -> None:
        """These bytes are final."""
        for extent, overlap in self._overlaps(offset, nbytes):
            self._open[extent] -= overlap
            if self._open[extent] < 0:
                # Others of its bytes might be changed after it was taken for complete.
                raise AgentError(f"a defect: bytes of extent {extent} were final twice")
            stop = (extent + 1) * self._extent
            if self._open[extent] == 0 and stop <= self._end:
                self._hand_over(extent, stop)

    def close(self, size: int) -> None:
        """All bytes are final; what was not handed over yet is padding or the tail."""
        for extent in range(-(-size // self._extent)):
            if extent not in self._handed:
                self._hand_over(extent, min((extent + 1) * self._extent, size))

    def _hand_over(self, extent: int, stop: int) -> None:
        self._handed.add(extent)
        self._ready(extent * self._extent, stop)

    def _overlaps(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        size, end = self._extent, offset + nbytes
        for extent in range(offset // size, -(-end // size) if nbytes else offset // size):
            yield extent, min(end, (extent + 1) * size) - max(offset, extent * size)


def _pacer(rate: float | None) -> Pacer | None:
    return None if rate is None else Pacer(rate)


def _equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
