"""One open checkpoint on the trainer's side: its blocks, window by window, until it is sealed.

Runs on the training thread, inside the device's ``hold``. What always holds: a block is copied whole
inside one window, so that its parameter and all its state are of one version; after a block has been
captured, every update goes to the agent with its gradient (or with the fact that it had none).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gockpt import fingerprint
from gockpt.agent.client import AgentClient
from gockpt.agent.handle import Handle
from gockpt.agent.protocol import Block, Captured, Open, Seal, Update
from gockpt.devices.base import Copied, Device, Pair
from gockpt.recipe import OptimizerUpdate, fill
from gockpt.state import CUT, Entry
from gockpt.strategies.gradients import Sent, Wanted
from gockpt.strategies.policy import Policy
from gockpt.strategies.sealing import Sealing
from gockpt.strategies.staging import Staging
from gockpt.strategies.views import ParamViews, Views

MEASURABLE = 1 << 16
"""Fewer bytes than this say nothing about the link's rate."""


@dataclass(slots=True)
class _Update:
    """What is known of the update that is being made."""

    recipes: list[OptimizerUpdate | None]
    sent: list[Sent] = field(default_factory=list)
    values: list[tuple[str, Tensor]] = field(default_factory=list)
    """Numbers on their way from the device, by their name in the recipe."""
    copies: list[Copied] = field(default_factory=list)


@dataclass(slots=True)
class _Window:
    """Blocks of a window whose copies have been queued."""

    copied: Copied
    blocks: list[tuple[Block, ParamViews]]
    counts: list[int]
    """Pairs up to and including each block."""
    late: list[tuple[int, str, Tensor]]
    """0-dim state on its way from the device: which block, which key, where on the host."""


class Capture:
    """The copies of one checkpoint, from its first window to its last."""

    def __init__(
        self,
        *,
        handle: Handle,
        views: Views,
        client: AgentClient,
        device: Device,
        policy: Policy,
        slot: int,
        base: int,
        target: int,
        budgets: Sequence[int],
        fallback: str | None,
        launch_id: str,
        header_reserve: int,
        staging: Staging,
    ) -> None:
        self.handle = handle
        self.target = target
        self.base = base
        self.slot = slot
        self.generation = client.generation
        self.sequence = client.next_sequence()
        self.problem: str | None = None
        """What the outbox thread found to be wrong, if anything."""
        self.window_copies: list[Copied] = []
        """The copies of the window that is open: the next update waits for them."""
        self.window_bytes = 0
        self.state_bytes = 0
        self.gradient_bytes = 0
        self.sealed = False
        self.sealing: Sealing | None = None
        self.state_copies: list[Copied] = []
        self._seal: Seal | None = None
        self._others: list[tuple[Tensor, int]] = []
        self.views = views
        self._inventory = views.inventory
        self._client = client
        self._device = device
        self._policy = policy
        self._budgets = list(budgets)
        self._staging = staging
        self._cursor = (0, 0)
        self._pending: _Window | None = None
        self._proving: Copied | None = None
        self._blocks: list[Block] = []
        self._by_optimizer: dict[int, list[Wanted]] = {}
        self._update: _Update | None = None
        self._opened = Open(
            sequence=self.sequence,
            step=target,
            slot=slot,
            structure=views.structure.number,
            strategy=policy.name,
            base=base,
            windows=target - base + 1,
            fallback=fallback,
            launch_id=launch_id,
            header_reserve=header_reserve,
        )
        client.track(handle, slot, self._opened, views.structure)

    @property
    def lost(self) -> bool:
        """Whether the agent that had its beginning is gone."""
        return self.generation != self._client.generation or not self._client.ready

    # -- windows -----------------------------------------------------------------------------------

    def open_window(self, step: int) -> None:
        """Queue the state of this window: as much as the plan gives it."""
        number = step - self.base
        budget = self._budgets[number] if number < len(self._budgets) else 0
        if not self._policy.planned:
            budget = sum(self._budgets)  # filled as it comes: what does not fit is withdrawn
        self._queue_blocks(step, budget)

    def close_window(self, step: int) -> None:
        """The update is about to be made: end this window's copies."""
        if self._policy.planned or self.sealed or self._pending is None:
            self._announce()
        else:
            self._withdraw()
        for copied in self.window_copies:
            self._device.gate(copied, name="state", step=step)

    def _queue_blocks(self, step: int, budget: int) -> None:
        blocks = self._take(budget, step)
        pairs: list[Pair] = []
        counts: list[int] = []
        late: list[tuple[int, str, Tensor]] = []
        slot = self.views.slot(self.slot, self._client.slot(self.slot))
        for number, (block, param) in enumerate(blocks):
            for key, value in param.scalars:
                if key not in block.scalars:
                    late.append((number, key, self._staging.take(1, value.dtype)))
                    pairs.append((late[-1][2], value.detach().reshape(1)))
            pairs += _block_pairs(block, param, slot[block.param])
            counts.append(len(pairs))
        self.window_bytes = sum(source.nbytes for _, source in pairs)
        self.window_copies = []
        if not pairs:
            return
        copied = self._device.copy(
            pairs,
            lane="state",
            step=step,
            piece_bytes=self._policy.piece_bytes,
            piece_efficiency=self._policy.piece_efficiency,
        )
        self.window_copies = [copied]
        self._pending = _Window(copied, blocks, counts, late)
        if self._policy.planned:
            self._announce()

    def _announce(self) -> None:
        """All blocks of the window will arrive: say so to the agent when they have."""
        if self._pending is None:
            return
        window, self._pending = self._pending, None
        self._add(window.blocks)
        self.state_bytes += self.window_bytes

        def make() -> Captured:
            blocks = [block for block, _ in window.blocks]
            for number, key, value in window.late:
                blocks[number].scalars[key] = value.item()
            return Captured(sequence=self.sequence, blocks=blocks, entries=[])

        self._client.post(make, after=window.copied)

    def _withdraw(self) -> None:
        """Keep the blocks that the link has begun; the others come in a later window."""
        window = self._pending
        if window is None:
            return
        pairs = window.copied.withdraw()
        kept = sum(count <= pairs for count in window.counts)
        if kept < len(window.blocks):
            first = window.blocks[kept][0]
            self._cursor = (first.param, first.start)
            window.blocks = window.blocks[:kept]
            window.late = [late for late in window.late if late[0] < kept]
            self.window_bytes = 0
        self._announce()

    def _add(self, blocks: list[tuple[Block, ParamViews]]) -> None:
        for block, param in blocks:
            self._by_optimizer.setdefault(param.live.optimizer_index, []).append(
                Wanted(
                    len(self._blocks),
                    param.live,
                    block.start,
                    block.stop,
                    block.start == 0 and block.stop == param.numel,
                )
            )
            self._blocks.append(block)

    def _take(self, budget: int, version: int) -> list[tuple[Block, ParamViews]]:
        """The next blocks, of about ``budget`` elements together, cut at multiples of 64."""
        out: list[tuple[Block, ParamViews]] = []
        index, start = self._cursor
        params = self.views.params
        while index < len(params):
            param = params[index]
            size = min(budget, self._piece(param))
            if start + size < param.numel:
                size -= size % CUT
                if size <= 0:
                    break
            stop = min(param.numel, start + size)
            out.append((_block(index, param, start, stop, version), param))
            budget -= stop - start
            start = stop
            if start >= param.numel:
                index, start = index + 1, 0
        self._cursor = (index, start)
        return out

    def _piece(self, param: ParamViews) -> int:
        """Most elements of one block."""
        if self._policy.piece_bytes is None:
            return param.numel
        return max(CUT, self._policy.piece_bytes // param.parts[0].itemsize)

    # -- updates -----------------------------------------------------------------------------------

    def wanted(self, optimizer: int) -> list[Wanted]:
        """Captured blocks that this optimizer updates."""
        return self._by_optimizer.get(optimizer, [])

    def begin_update(self) -> None:
        """A pass has come to its first update."""
        self._update = _Update(recipes=[None] * len(self._inventory.optimizers))

    def add_update(
        self, optimizer: int, recipe: OptimizerUpdate, values: list[tuple[str, Tensor]], sent: Sent
    ) -> None:
        """One optimizer is about to make its step, with these gradients."""
        update = self._update
        if update is None:
            return
        update.recipes[optimizer] = recipe
        update.sent.append(sent)
        update.copies += sent.copies
        if values:
            host = [(name, self._staging.take(1, value.dtype)) for name, value in values]
            pairs = [(h, v.reshape(1)) for (_, h), (_, v) in zip(host, values, strict=True)]
            update.copies.append(self._device.copy(pairs, lane="gradients", step=sent.step))
            update.values += host
        self.gradient_bytes += sent.nbytes

    def end_update(self, version: int) -> None:
        """The pass has ended: send the update when its gradients have arrived."""
        update, self._update = self._update, None
        if not self._blocks:
            return
        if update is None:  # the scaler skipped it: nothing changed
            update = _Update(recipes=[None] * len(self._inventory.optimizers))

        def make() -> Update | None:
            for sent in update.sent:
                if (problem := sent.problem()) is not None:
                    self.problem = problem
                    return None
            for sent in update.sent:
                sent.release()
            values = {name: float(value) for name, value in update.values}
            return Update(
                sequence=self.sequence,
                version=version,
                updates=[recipe and fill(recipe, values) for recipe in update.recipes],
                gradients=[gradient for sent in update.sent for gradient in sent.gradients],
            )

        self._client.post(make, after=All(update.copies))

    # -- the end -----------------------------------------------------------------------------------

    def seal(self, step: int, content: Sealing, *, start: int, room: int, proof: bool) -> None:
        """Queue all that is still missing, and the proof; ``step`` is the target.

        Args:
            start: where tensors of ``content`` lie in the image, with ``room`` bytes for them.

        Raises:
            ExtrasError: they do not fit there.
        """
        entries = content.entries(start, room)
        self._queue_blocks(step, sum(self._budgets))
        self._announce()
        present = self.views.present
        whole = self._queue_whole(step, [*self.views.whole, *content.buffers.items()])
        self._copy_extras(entries, content)
        self.state_copies = list(self.window_copies)
        seed = zlib.crc32(self._opened.launch_id.encode()) + self.sequence
        if proof:
            self.window_copies.append(self._queue_proof(step, seed, content.buffers))
        self.sealed, self.target, self.sealing = True, step, content
        self._client.post(
            lambda: Captured(sequence=self.sequence, blocks=[], entries=whole),
            after=All(self.state_copies),
        )
        self._others = [(tensor, tensor._version) for _, tensor in self.views.whole]
        self._seal = Seal(
            sequence=self.sequence,
            step=step,
            present=[index for index, _ in present],
            extra_entries=entries,
            groups=content.groups,
            extras=content.extras,
            seed=seed,
            proved=proof,
            lr=content.lr,
        )
        self._client.targeted(self.sequence, step)

    def confirm(self) -> None:
        """The last window has closed and nothing was wrong: let the agent finish it."""
        seal = self._seal
        if seal is not None:
            self._client.sealed(seal)
            self._client.post(lambda: seal, after=All(self.window_copies))

    def can_be_retaken(self) -> bool:
        """Whether all that the forward may change still stands as it did at the target."""
        return all(tensor._version == version for tensor, version in self._others)

    def link_rate(self) -> float | None:
        """Bytes a second that the last window's state reached; None if that is not known."""
        if not self.window_copies or self.window_bytes < MEASURABLE:
            return None
        copied = self.window_copies[0]
        seconds = copied.seconds if copied.done() else None
        return self.window_bytes / seconds if seconds else None

    def proof_seconds(self) -> float | None:
        """Seconds that the device read for the proof; None if that is not known."""
        proving = self._proving
        return proving.seconds if proving is not None and proving.done() else None

    def _queue_whole(self, step: int, tensors: Sequence[tuple[int, Tensor]]) -> list[int]:
        """Copy what is not made of blocks; return the entries."""
        slot = self._client.slot(self.slot)
        pairs: list[Pair] = []
        for index, tensor in tensors:
            entry = self._inventory.layout.entries[index]
            if entry.nbytes:
                place = slot.tensor[entry.offset : entry.offset + entry.nbytes]
                pairs.append((place, fingerprint.as_bytes(tensor)))
        if pairs:
            self.window_copies.append(self._device.copy(pairs, lane="state", step=step))
            self.state_bytes += sum(source.nbytes for _, source in pairs)
        return [index for index, _ in tensors]

    def _copy_extras(self, entries: list[Entry], content: Sealing) -> None:
        # Small host tensors of the user's objects: copied here and now, before they can change.
        slot = self._client.slot(self.slot)
        for entry, tensor in zip(entries, content.tensors.values(), strict=True):
            if entry.nbytes:
                flat = fingerprint.as_bytes(tensor.cpu().contiguous())
                slot.tensor[entry.offset : entry.offset + entry.nbytes].copy_(flat)

    def _queue_proof(self, step: int, seed: int, buffers: Mapping[int, Tensor]) -> Copied:
        """Fingerprint the true state on the device, and send that to the scratch."""
        prints = self.views.fingerprinter
        taken = fingerprint.Fingerprinter(self._inventory.layout, list(buffers.items()))
        sums = torch.zeros(prints.runs, dtype=torch.int64, device=prints.device)
        samples = torch.zeros_like(sums)

        def compute() -> None:
            prints.run(seed, sums, samples)
            if buffers:
                taken.run(seed, sums, samples)

        self._proving = self._device.run(
            compute,
            device_bytes=prints.nbytes + taken.nbytes,
            lane="proof",
            step=step,
        )
        scratch = self._client.scratch(self.slot)
        return self._device.copy(
            [
                (scratch.view(0, prints.runs, torch.int64), sums),
                (scratch.view(prints.runs * 8, prints.runs, torch.int64), samples),
            ],
            lane="proof",
            step=step,
        )


def _block(index: int, param: ParamViews, start: int, stop: int, version: int) -> Block:
    return Block(
        param=index,
        start=start,
        stop=stop,
        version=version,
        state=param.state_keys,
        # Read now where that costs nothing; what lies on the device is copied with the block.
        scalars={k: value.item() for k, value in param.scalars if value.device.type == "cpu"},
    )


def _block_pairs(block: Block, param: ParamViews, slot: list[Tensor]) -> list[Pair]:
    if block.start == 0 and block.stop == param.numel:
        return [(place, part.flat) for place, part in zip(slot, param.parts, strict=True)]
    part_of = slice(block.start, block.stop)
    return [
        (place[part_of], part.flat[part_of]) for place, part in zip(slot, param.parts, strict=True)
    ]


class All:
    """Several completions as one."""

    def __init__(self, parts: Sequence[Copied]) -> None:
        self._parts = list(parts)

    def wait(self, timeout: float) -> bool:
        """Wait for at most ``timeout`` seconds; whether all have ended."""
        deadline = time.monotonic() + timeout
        return all(part.wait(max(0.0, deadline - time.monotonic())) for part in self._parts)
