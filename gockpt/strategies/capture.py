"""One open checkpoint on the trainer's side: its blocks, window by window, until it is sealed.

Runs on the training thread, inside the device's ``hold``. What always holds: a block is copied
whole inside one window, so that its parameter and all its state are of one version; after a block
has been captured, every update goes to the agent with its gradient (or with the fact that it had
none).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gockpt import faults, fingerprint
from gockpt.agent.client import AgentClient
from gockpt.agent.handle import Handle
from gockpt.agent.protocol import Captured, Open, Seal, Update
from gockpt.devices.base import Copied, Device, Pair
from gockpt.errors import DeviceError
from gockpt.recipe import OptimizerUpdate, fill
from gockpt.state import Entry
from gockpt.strategies.blocks import Blocks, portions
from gockpt.strategies.gradients import Sent, Wants
from gockpt.strategies.policy import Policy
from gockpt.strategies.sealing import Sealing
from gockpt.strategies.staging import Staging
from gockpt.strategies.views import Views

ENDING_S = 60.0
"""Seconds that copies are given to end when one of them has failed."""

MEASURABLE_S = 0.005
"""A copy that is shorter than this says nothing about the link's rate."""


@dataclass(slots=True)
class _Update:
    """What is known of the update that is being made."""

    recipes: list[OptimizerUpdate | None]
    sent: list[Sent] = field(default_factory=list)
    values: list[tuple[str, Tensor]] = field(default_factory=list)
    """Numbers on their way from the device, by their name in the recipe."""
    copies: list[Copied] = field(default_factory=list)


class Capture:
    """The copies of one checkpoint, from its first window to its last."""

    def __init__(
        self,
        *,
        handle: Handle,
        client: AgentClient,
        device: Device,
        policy: Policy,
        slot: int,
        base: int,
        target: int,
        blocks: Blocks,
        fallback: str | None,
        launch_id: str,
        again: bool,
        header_reserve: int,
        staging: Staging,
    ) -> None:
        self.handle = handle
        self.target = target
        self.base = base
        self.slot = slot
        self.generation = client.generation
        self.sequence = client.next_sequence()
        self._problem: str | None = None
        self.window_copies: list[Copied] = []
        """The copies of the window that is open: the next update waits for them."""
        self.block_copies: list[Copied] = []
        """Those of them that are of blocks."""
        self.window_bytes = 0
        """Bytes of those."""
        self.state_bytes = 0
        self.sealed = False
        self.sealing: Sealing | None = None
        self.state_copies: list[Copied] = []
        self._make_seal: Callable[[], Seal] | None = None
        self._others: list[tuple[Tensor, int]] = []
        self.blocks = blocks
        self._inventory = blocks.views.inventory
        self._client = client
        self._device = device
        self._policy = policy
        self._staging = staging
        self._captured = 0
        """Blocks whose copies the agent was, or will be, told of."""
        self._queued = 0
        """Blocks whose copies were queued in the open window, beyond those."""
        self._proving: Copied | None = None
        self._update: _Update | None = None
        self._opened = Open(
            sequence=self.sequence,
            step=target,
            slot=slot,
            structure=blocks.views.structure.number,
            strategy=policy.name,
            base=base,
            windows=target - base + 1,
            fallback=fallback,
            launch_id=launch_id,
            header_reserve=header_reserve,
        )
        client.track(handle, slot, self._opened, blocks.views.structure, final=again)

    @property
    def problem(self) -> str | None:
        """What the outbox thread, or the agent, found to be wrong, if anything."""
        return self._problem or self._client.problems.get(self.sequence)

    @property
    def lost(self) -> bool:
        """Whether the agent that had its beginning is gone."""
        return self.generation != self._client.generation or not self._client.ready

    # -- windows -----------------------------------------------------------------------------------

    @property
    def views(self) -> Views:
        """The views that the blocks are made of."""
        return self.blocks.views

    def open_window(self, step: int) -> None:
        """Queue the state of this window: as much as the plan gives it."""
        if self._policy.planned:
            self._queue_blocks(step, self.blocks.window_ends[step - self.base])
            self._announce_window(step)
        else:
            self._queue_blocks(step, len(self.blocks))  # what does not fit is withdrawn

    def close_window(self, step: int) -> None:
        """The update is about to be made: end this window's copies."""
        if self._queued:
            pairs = self.block_copies[0].withdraw()
            self._queued = self.blocks.whole_blocks(self._captured, pairs)
            self.window_bytes = 0
            self._announce_window(step)
        for copied in self.window_copies:
            self._device.gate(copied, name="state", step=step)

    def _queue_blocks(self, step: int, upto: int) -> None:
        """Queue the copies of all blocks before number ``upto``, as all that the window copies."""
        self.block_copies = self._copies_of_blocks(step, upto)
        self.window_copies = list(self.block_copies)
        self.window_bytes = self.blocks.bytes_of(self._captured, upto)

    def _queue_rest(self, step: int) -> None:
        """Queue and announce the blocks that are left, by portions.

        Nothing withdraws them any more, and the agent writes the first ones during the others.
        """
        first, copies = self._captured, []
        rate = self._device.link_rate(computing=False)
        for upto in portions(self.blocks.byte_ends, first, link_rate=rate):
            copies += self._copies_of_blocks(step, upto)
            self._announce(step, copies[-1])
        self.block_copies, self.window_copies = copies, list(copies)
        self.window_bytes = self.blocks.bytes_of(first, len(self.blocks))

    def _copies_of_blocks(self, step: int, upto: int) -> list[Copied]:
        """Queue the copy of all blocks before number ``upto``; none if there are none."""
        first = self._captured
        self._queued = upto - first
        if not self._queued:
            return []
        copied = self._device.copy(
            self.blocks.pairs_of(first, upto),
            lane="state",
            step=step,
            piece_bytes=self._policy.piece_bytes,
            piece_efficiency=self._policy.piece_efficiency,
        )
        faults.point("capture.window")
        return [copied]

    def _announce_window(self, version: int) -> None:
        if self._queued:
            self._announce(version, self.block_copies[0])

    def _announce(self, version: int, copied: Copied) -> None:
        """The blocks that were queued will arrive: tell the agent when they have."""
        first, last, blocks = self._captured, self._captured + self._queued, self.blocks
        self._captured, self._queued = last, 0
        self.state_bytes += blocks.bytes_of(first, last)
        self._client.post(
            lambda: Captured(
                sequence=self.sequence, blocks=blocks.messages(first, last, version), entries=[]
            ),
            after=copied,
            failed=self._copy_failed,
        )

    def _copy_failed(self, error: DeviceError) -> None:
        # On the outbox thread; the engine asks for the problem before it goes on.
        self._problem = self._problem or str(error)

    # -- updates -----------------------------------------------------------------------------------

    def wanted(self, optimizer: int) -> tuple[Wants, int]:
        """The blocks that this optimizer updates, and how many of them have been captured."""
        wants = self.blocks.wants(optimizer)
        return wants, wants.before(self._captured)

    def begin_update(self) -> None:
        """A pass has come to its first update."""
        self._update = _Update(recipes=[None] * len(self._inventory.optimizers))

    def sent_in_update(self) -> list[Sent]:
        """What other optimizers have sent in this pass; it is given back with the rest of it."""
        return [] if self._update is None else list(self._update.sent)

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

    def end_update(self, version: int) -> None:
        """The pass has ended: send the update when its gradients have arrived."""
        update, self._update = self._update, None
        if not self._captured:
            return
        if update is None:  # the scaler skipped it: nothing changed
            update = _Update(recipes=[None] * len(self._inventory.optimizers))

        def make() -> Update | None:
            problem = next(filter(None, map(Sent.problem, update.sent)), None)
            if problem is not None or self.lost:
                self._problem = self._problem or problem
                self._give_back(update.sent)
                return None
            for sent in update.sent:
                sent.release()
                self._client.totals.gradient_bytes += sent.nbytes
            values = {name: float(value) for name, value in update.values}
            return Update(
                sequence=self.sequence,
                version=version,
                updates=[recipe and fill(recipe, values) for recipe in update.recipes],
                gradients=[gradient for sent in update.sent for gradient in sent.gradients],
            )

        self._post_update(make, update)

    def give_up(self) -> None:
        """It will not be finished: what an update has in the ring that was not sent goes back."""
        update, self._update = self._update, None
        if update is not None:
            self._post_update(lambda: self._give_back(update.sent), update)

    def _post_update(self, make: Callable[[], Update | None], update: _Update) -> None:
        copies = All(update.copies)

        def failed(error: DeviceError) -> None:
            self._copy_failed(error)
            copies.let_end(ENDING_S)
            self._give_back(update.sent)

        self._client.post(make, after=copies, failed=failed)

    def _give_back(self, batches: list[Sent]) -> None:
        # Only when nothing is copied there any more.
        for sent in batches:
            sent.release()
            self._client.ring_free(sent.tickets)

    # -- the end -----------------------------------------------------------------------------------

    def seal(
        self,
        step: int,
        content: Sealing,
        *,
        held: Collection[int],
        start: int,
        room: int,
        proof: bool,
    ) -> None:
        """Queue all that is still missing, and the proof; ``step`` is the target.

        Args:
            held: entries that lie in the slot already.
            start: where tensors of ``content`` lie in the image, with ``room`` bytes for them.

        Raises:
            ExtrasError: they do not fit there.
        """
        entries = content.entries(start, room)
        self._queue_rest(step)
        whole = [*self.views.whole, *content.buffers.items()]
        self._queue_whole(step, [one for one in whole if one[0] not in held])
        entries_there = [index for index, _ in whole]
        self._copy_extras(entries, content)
        self.state_copies = list(self.window_copies)
        seed = zlib.crc32(self._opened.launch_id.encode()) + self.sequence
        if proof:
            self.window_copies.append(self._queue_proof(step, seed, content.buffers))
        self.sealed, self.target, self.sealing = True, step, content
        self._client.post(
            lambda: Captured(sequence=self.sequence, blocks=[], entries=entries_there, target=step),
            after=All(self.state_copies),
            failed=self._copy_failed,
        )
        self._others = [(tensor, tensor._version) for _, tensor in self.views.whole]
        present = self.views.present_indices

        def make() -> Seal:
            return Seal(
                sequence=self.sequence,
                step=step,
                present=present,
                extra_entries=entries,
                groups=content.groups(),
                extras={"tree": content.extras.encoded()},
                seed=seed,
                proved=proof,
                lr=content.lr,
            )

        self._make_seal = make
        self._client.targeted(self.sequence, step)

    def confirm(self, late: Callable[[str], None]) -> bool:
        """The last window has closed and nothing was wrong: let the agent finish it.

        Args:
            late: told, on the outbox thread, what was found wrong after all; the checkpoint has
                failed with it.

        Returns:
            False if the agent could not go on with it already.
        """
        if not self._client.confirmed(self.sequence):
            return False
        make = self._make_seal

        def fail(problem: str) -> None:
            # Found behind the training's back: too late to take the step again, and nothing that a
            # proof has to find.
            late(problem)
            self._client.drop(self.sequence, problem, failed=True)

        def seal() -> Seal | None:
            if make is None:
                return None
            if self._problem is not None:
                fail(self._problem)
                return None
            made = make()
            self._client.sealed(made)
            return made

        self._client.post(
            seal, after=All(self.window_copies), failed=lambda error: fail(str(error))
        )
        return True

    def can_be_retaken(self) -> bool:
        """Whether all that the forward may change still stands as it did at the target."""
        return all(tensor._version == version for tensor, version in self._others)

    def link_rate(self) -> float | None:
        """Bytes a second that the link gave the last window's state; None if that is not known.

        Of a policy that copies in pieces: what it would give without them, as the plan takes off
        itself what pieces lose.
        """
        copies = self.block_copies
        if not self.window_bytes or not all(copied.done() for copied in copies):
            return None  # none, withdrawn in part, or not yet there
        seconds = sum(copied.seconds or 0.0 for copied in copies)
        if seconds < MEASURABLE_S:
            return None
        return self.window_bytes / seconds / self._policy.piece_efficiency

    def proof_seconds(self) -> float | None:
        """Seconds that the device read for the proof; None if that is not known."""
        proving = self._proving
        return proving.seconds if proving is not None and proving.done() else None

    def _queue_whole(self, step: int, tensors: Sequence[tuple[int, Tensor]]) -> None:
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
        scratch = self._client.scratch(self.slot)
        made: list[Pair] = []

        def compute() -> None:
            sums = torch.zeros(prints.runs, dtype=torch.int64, device=prints.device)
            samples = torch.zeros_like(sums)
            made.append((scratch.view(0, prints.runs, torch.int64), sums))
            made.append((scratch.view(prints.runs * 8, prints.runs, torch.int64), samples))
            prints.run(seed, sums, samples)
            if buffers:
                taken = fingerprint.Fingerprinter(
                    self._inventory.layout, list(buffers.items()), prints.device
                )
                taken.run(seed, sums, samples)

        self._proving = self._device.run(
            compute,
            device_bytes=prints.nbytes + sum(tensor.nbytes for tensor in buffers.values()),
            lane="proof",
            step=step,
        )
        return self._device.copy(lambda: made, lane="proof", step=step)


class All:
    """Several completions as one."""

    def __init__(self, parts: Sequence[Copied]) -> None:
        self._parts = list(parts)

    def wait(self, timeout: float) -> bool:
        """Wait for at most ``timeout`` seconds; whether all have ended."""
        deadline = time.monotonic() + timeout
        return all(part.wait(max(0.0, deadline - time.monotonic())) for part in self._parts)

    def let_end(self, timeout: float) -> None:
        """Wait for at most ``timeout`` seconds until all have ended, well or badly."""
        deadline = time.monotonic() + timeout
        for part in self._parts:
            with suppress(DeviceError):
                part.wait(max(0.0, deadline - time.monotonic()))
