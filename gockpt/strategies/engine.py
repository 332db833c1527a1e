"""The engine: when a checkpoint opens, what each pass adds to it, and what ends it early.

Runs on the training thread: :meth:`Engine.before_update` and :meth:`Engine.after_update` in the
hooks of ``optimizer.step()``, :meth:`Engine.end_pass` at the end of a pass. What always holds: the
step that was promised is the step that is saved; whatever breaks the assumptions of multi-step
capture ends it without touching training, and the same step is taken by one plain copy. A
checkpoint is sealed for the agent only when the last window has closed and nothing was changed in
it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from gockpt import faults, inventory, optim
from gockpt.agent.client import AgentClient
from gockpt.agent.handle import Handle, Stage
from gockpt.devices.base import Device
from gockpt.errors import AgentError, ConfigError, GockptError, ProofError, StateError
from gockpt.extras import Extras
from gockpt.inventory import Inventory
from gockpt.plan import Plan
from gockpt.recipe import take_recipe
from gockpt.state import PAGE, align
from gockpt.strategies import sealing, turns
from gockpt.strategies.blocks import Blocks
from gockpt.strategies.capture import Capture
from gockpt.strategies.fences import Fences
from gockpt.strategies.frozen import Frozen
from gockpt.strategies.gradients import NO_UPCAST, send
from gockpt.strategies.memory import Memory
from gockpt.strategies.meter import Meter
from gockpt.strategies.planner import Limits, Planner
from gockpt.strategies.policy import Policy
from gockpt.strategies.preparation import Preparation
from gockpt.strategies.rehearsal import PASS, Rehearsal
from gockpt.strategies.staging import Staging
from gockpt.strategies.trust import Trust

log = logging.getLogger("gockpt")

WAIT = 600.0
"""Seconds that training waits for a slot, for room in the ring, or for a durable write."""

FLUSH = 60.0
"""Seconds that who waits for a checkpoint gives the outbox; what it finds later is told late."""

WhenBusy = Literal["wait", "skip"]
OnError = Literal["raise", "warn"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user chose; see :class:`gockpt.Checkpointer`."""

    every: int | None
    windows: int | None
    link_share: float
    slots: int
    proof: bool
    when_busy: WhenBusy
    on_error: OnError
    launch_id: str
    replay_rate: float
    write_rate: float | None


class Engine:
    """One strategy at work on one training loop."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        extras: Extras,
        policy: Policy,
        device: Device,
        client: AgentClient,
        settings: Settings,
    ) -> None:
        self.current_step = 0
        self.events: dict[str, int] = {}
        """Counts of what happened out of the ordinary."""
        self.windows_used: list[int] = []
        self.state_bytes = 0
        self.trust = Trust(settings.every)
        self._model = model
        self._optimizers = dict(optimizers)
        self._extras = extras
        self._policy = policy
        self._device = device
        self._client = client
        self._settings = settings
        self._thread = threading.get_ident()
        self._capture: Capture | None = None
        self._closing: Capture | None = None
        self._late: str | None = None
        """What was found wrong with a checkpoint after it had been confirmed."""
        self._handles: dict[int, Handle] = {}
        self._prepare_due = False
        self._awake_at = 0
        self._slept_with: Plan | None = None
        self._sealed_at = 0
        """The newest step that was sealed or restored."""
        self._stop_at: float | None = None
        """When training must have ended (``time.monotonic()``), once it is asked to stop."""
        self._updated: set[int] = set()
        self._skipped = False
        self._narrow = True
        self._derive = True
        """Whether weights that are the cast of their master are left out."""
        self._casts_checked = False
        self._fences = Fences(device)
        self._meter = Meter(
            link_rate=device.link_rate(computing=True), replay_rate=settings.replay_rate
        )
        self._refused: dict[tuple[int, int], str] = {}
        self._obstacles: dict[str, int] = {}
        self._spare = align(max(sealing.SPARE, 2 * self._extras_bytes()), PAGE)
        self.inventory = self._take_inventory()
        self._staging = Staging(device, len(self.inventory.replayable))
        self._rehearsal = Rehearsal(list(self._optimizers.values()), device, self._staging)
        self._preparation = Preparation(client, self._staging, policy.piece_bytes)
        self._frozen = Frozen(client)
        self._allocate()

    # -- memory ------------------------------------------------------------------------------------

    def _extras_bytes(self) -> int:
        bare = inventory.take(self._model, self._optimizers)
        return sealing.take(bare, self._extras, {}).nbytes

    def _take_inventory(self) -> Inventory:
        found = inventory.take(
            self._model,
            self._optimizers,
            allow_slow=self._settings.windows is not None,
            refused=self._refused,
            spare=self._spare,
            derive=self._derive,
        )
        obstacles = found.obstacles() if self._several() else {}
        for reason in obstacles.keys() - self._obstacles.keys():
            log.info(
                "%d parameters are copied whole in the last window: %s", obstacles[reason], reason
            )
        self._obstacles = obstacles
        return found

    def _several(self) -> bool:
        """Whether checkpoints may take several windows."""
        return self._policy.max_windows > 1 and self._settings.windows != 1

    def _allocate(self) -> None:
        self.memory = Memory.needed(
            self.inventory, slots=self._settings.slots, several=self._several()
        )
        self.memory.allocate(self._client, self._device)
        self.planner = Planner(self._policy, self._meter, self._device, self._limits())

    @property
    def predicted_bytes(self) -> int:
        """Host memory that checkpointing adds, by the newest plan."""
        masters = any(live.model_tensor is not None for live in self.inventory.replayable)
        return self.memory.predicted(
            self.planner.current,
            held_on_host=all(p.device.type == "cpu" for p in self._model.parameters()),
            compared=self._narrow and masters,
        )

    def _limits(self) -> Limits:
        return Limits(
            every=self._settings.every,
            windows=self._settings.windows,
            share=self._settings.link_share,
            slots=self._settings.slots,
            slot_bytes=self.memory.slot,
            ring_bytes=self.memory.ring,
            write_rate=self._settings.write_rate,
            proof=self._settings.proof,
        )

    @contextmanager
    def _holding(self, name: str) -> Iterator[None]:
        """What the engine does on the training thread, as quickly as it can."""
        with self._device.hold(name, self.current_step), turns.kept():
            yield

    # -- the user's calls --------------------------------------------------------------------------

    def request(self) -> Handle:
        """Ask for a checkpoint at the earliest step that costs no stall; joins one on its way."""
        for capture in (self._capture, self._closing):
            if capture is not None:
                return capture.handle
        self._awake_at = 0
        if self._handles:
            return self._handles[min(self._handles)]
        return self._handle(self.current_step + self._planned_windows())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that were sent."""
        return self._client.totals.gradient_bytes

    def scaler_skipped(self) -> None:
        """The loss scaler found an infinity and left the update of this pass out."""
        self._skipped = True

    def end_pass(self) -> bool:
        """A pass has ended; False if it made no update (gradient accumulation).

        Raises:
            GockptError: what an earlier checkpoint failed with (``on_error="raise"``).
        """
        if not self._updated and not self._skipped:
            return False
        self.current_step += 1
        self._updated.clear()
        self._skipped = False
        if not self._asleep():
            with self._holding("step"):
                try:
                    self._finish_pass()
                    self._advance()
                    self._fall_asleep()
                except GockptError as error:
                    self._give_up(error)
            self._meter.pass_ended(self._device.blocked_seconds(), resting=self.resting)
        if self._client.troubled:
            self.raise_errors()
        return True

    def raise_errors(self) -> None:
        """Raise, or log, what has failed since the last call."""
        found = self._client.take_errors()
        for error in found:
            self._count("failed")
            log.warning("%s", error)
            if isinstance(error, ProofError) and not self._frozen.mistaken(error):
                self._found_wrong(str(error))
        late, self._late = self._late, None
        if late is not None:
            self._distrust(late)
        if found and self._settings.on_error == "raise":
            raise found[0]

    def finish(self) -> None:
        """Save the current step if a checkpoint is open or was asked for."""
        if self._updated:  # in the middle of a pass there is no step to save
            self.abort("the training ended in the middle of a pass")
            return
        self.settle()
        unsaved = self._stop_at is not None and self._sealed_at != self.current_step
        if self._capture is not None or self._handles or unsaved:
            try:
                with self._holding("close"):
                    self._save_now()
            except GockptError as error:
                self._give_up(error)
        self._fail_handles(AgentError("the training was closed before"))

    def stop(self, deadline: float | None) -> None:
        """The next step is to be saved at once; or not so any more (None).

        Args:
            deadline: ``time.monotonic()`` at which nothing is waited for any longer.
        """
        self._stop_at = deadline
        self._awake_at = 0

    def _save_now(self) -> None:
        """Save the present step, whatever was planned: what is open with all that it lacks."""
        capture = self._capture
        if capture is not None and (reason := self._obstacle_to(capture, last=True)) is not None:
            self._abandon(reason)
            capture = None
        if capture is not None:
            self._seal(capture)
        else:
            # Whoever was promised the next one gets this one.
            wanted = self._handles.pop(min(self._handles, default=0), None)
            self._handles[self.current_step] = wanted or self._handle(self.current_step)
            self._open_if_due()
        self.settle()
        self._handles.pop(self.current_step, None)

    def settle(self) -> None:
        """Let the last window close now: nothing changes while the caller waits."""
        capture = self._closing
        if capture is None:
            return
        with self._holding("settle"):
            try:
                self._end_closing(capture, self.trust.changed(thorough=True), flush=True)
            except GockptError as error:
                self._give_up(error)

    def _end_closing(self, capture: Capture, changed: str | None, *, flush: bool) -> None:
        """Close the last window and confirm, or take again, what it belongs to."""
        capture.close_window(self.current_step)
        self._closing = None
        if flush:  # who waits anyway: what is wrong with a gradient can still be helped
            self._client.flush(FLUSH)
        self._confirm(capture, changed)

    def abort(self, reason: str) -> None:
        """Give an open checkpoint up; those that are sealed are not touched."""
        self.settle()
        if self._capture is not None:
            log.warning("the checkpoint of step %d is dropped: %s", self._capture.target, reason)
            self._drop(self._capture, AgentError(reason))
            self._capture = None
        self._fail_handles(AgentError(reason))
        self._fences.unwatch()
        self.trust.guards = {}

    def _give_up(self, error: GockptError) -> None:
        """What is due cannot be saved: that costs a checkpoint, not the training."""
        self._client.failed(error)
        for capture in (self._capture, self._closing):
            if capture is not None:
                self._drop(capture, error)
        self._capture = self._closing = None
        self._fail_handles(error, upto=self.current_step)
        self._fences.unwatch()
        self.trust.unwatch()

    def _fail_handles(self, error: GockptError, *, upto: int | None = None) -> None:
        """Tell who waits for checkpoints that nobody will take."""
        for step in [one for one in self._handles if upto is None or one <= upto]:
            self._handles.pop(step).advance(Stage.FAILED, error=error)

    def _drop(self, capture: Capture, error: GockptError) -> None:
        """It has failed on this side."""
        capture.give_up()
        self._client.drop(capture.sequence, str(error), failed=False)
        capture.handle.advance(Stage.FAILED, error=error)
        self._handles.pop(capture.handle.step, None)

    def restored(self, step: int) -> None:
        """The state was replaced by that of a checkpoint."""
        self._awake_at = 0
        self.current_step = self._sealed_at = step
        self._updated.clear()
        self.inventory = self._take_inventory()

    def refresh(self) -> None:
        """Make sure that the inventory is that of the present structure."""
        if self.inventory.stale() is not None:
            self._retake()

    @property
    def open_sequence(self) -> int | None:
        """Number of the checkpoint that is being captured, or None."""
        return None if self._capture is None else self._capture.sequence

    def close(self) -> None:
        """Unpin the memory."""
        self._device.synchronize()
        for segment in self._client.segments:
            self._device.unregister(segment.tensor)
        self._staging.close()

    # -- hooks -------------------------------------------------------------------------------------

    def before_update(self, index: int, *, unsure: str | None) -> None:
        """An optimizer is about to change the state.

        Args:
            unsure: why its gradients are not yet those that it will use, or None.

        Raises:
            ConfigError: it has already done so in this pass.
        """
        if index in self._updated:
            raise ConfigError(
                "two updates of one optimizer in one pass; call ckpt.step() after each of them"
            )
        first = not self._updated
        self._updated.add(index)
        if self.resting:
            return
        if first:
            self._meter.update_begins(self._device.blocked_seconds())
        several = self._policy.max_windows > 1
        if several:
            self._fences.observe(self.inventory, index)
        rehearse = several and self._rehearsal.due(self.current_step)
        if not (self._capture or self._closing or self.trust.guards or rehearse):
            return
        with self._holding("update"):
            try:
                if first:
                    self._close_window()
                if self._capture is not None and unsure is not None:
                    self._abandon(unsure)
                if self._capture is not None:
                    self._send_gradients(self._capture, index)
            except GockptError as error:
                self._give_up(error)
            if rehearse and unsure is None:
                self._rehearsal.before(index, self.inventory)

    def after_update(self, index: int) -> None:
        """An optimizer has changed the state."""
        if self.resting:
            return
        if self.trust.guards or self._rehearsal.due(self.current_step):
            with self._holding("update"):
                self._rehearsal.after(index)
                self.trust.updated(index)
        self._meter.update_ended(self._device.blocked_seconds())

    def fence(self) -> None:
        """``zero_grad(set_to_none=False)`` is about to write gradient buffers."""
        self._fences.zeroing()

    @property
    def resting(self) -> bool:
        """Whether nothing is open and nothing can be due before the end of this pass."""
        return self.current_step < self._awake_at

    def _asleep(self) -> bool:
        """Whether nothing can be due at the end of this pass, as in most passes."""
        return self.resting and self.planner.current is self._slept_with

    def _fall_asleep(self) -> None:
        """Do nothing until the next checkpoint opens, if nothing is going on."""
        busy = (
            self._capture is not None
            or self._closing is not None
            or self._handles
            or self.trust.reason is not None
            or self.trust.guards
            or not self._preparation.begun
            or (self._several() and self._settings.windows is None and not self.planner.current)
            or (self._policy.max_windows > 1 and self._rehearsal.due(self.current_step))
        )
        target = None if busy else self._next_target()
        self._awake_at = 0 if target is None else target - self._planned_windows() + 1
        self._slept_with = self.planner.current

    # -- a pass ------------------------------------------------------------------------------------

    def _close_window(self) -> None:
        """The first update of a pass is about to be made."""
        capture = self._capture or self._closing
        reason = self.trust.changed(thorough=self._capture is None)
        if capture is None:
            return
        if not faults.armed("capture.skip-gate"):
            capture.close_window(self.current_step)
        self._learn(capture)
        if self._closing is not None:
            self._closing = None
            self._confirm(capture, reason)
        elif reason is not None:
            self._abandon(reason)
        else:
            capture.begin_update()

    def _finish_pass(self) -> None:
        capture = self._capture
        last = capture is None or capture.target == self.current_step
        reason = self.trust.changed(thorough=last)
        if self._policy.max_windows > 1 and self._rehearsal.due(self.current_step - 1):
            self._rehearsal.pass_ended()
            if self._rehearsal.refused:
                self._refused = self._rehearsal.refused
                self._retake()
        if self._closing is not None and reason is not None:  # the scaler skipped the update
            self._end_closing(self._closing, reason, flush=False)
        if self._capture is not None and reason is not None:
            self._abandon(reason)
        if self._capture is not None:
            self._capture.end_update(self.current_step)
            self._fences.watch(self.inventory)
        elif self._closing is None:
            self._fences.unwatch()
        if not self._casts_checked:
            self._check_casts()
        if (self._prepare_due or self._unprepared()) and self._capture is None:
            # At the end of a pass: the interpreter is needed least in the forward that follows.
            self._prepare_due = False
            self._client.post(self._prepare)
        self.trust.pass_ended()

    def _advance(self) -> None:
        """Open, continue or seal a checkpoint at the end of this pass."""
        if self._stop_at is not None:
            self._save_now()
            return
        capture = self._capture
        last = capture is not None and capture.target == self.current_step
        if capture is not None and (reason := self._obstacle_to(capture, last=last)) is not None:
            self._abandon(reason)
            capture = None
        if capture is None:
            self._open_if_due()
        elif last:
            self._seal(capture)
        else:
            capture.open_window(self.current_step)

    def _obstacle_to(self, capture: Capture, *, last: bool) -> str | None:
        """Why the capture cannot go on, or None."""
        if capture.problem is not None:
            return capture.problem
        if capture.lost:
            return "the agent was lost"
        if not (last or self.inventory.suspect() or capture.views.suspect()):
            return None
        return self.inventory.stale() or self._renew_views(capture)

    def _open_if_due(self) -> None:
        target = self._next_target()
        if target is None or self.current_step < target - self._planned_windows() + 1:
            return
        last = target == self.current_step
        slot = self._acquire(wait=last)
        if slot is not None:
            self._open(slot, target)
        elif last:
            self._skip(target)

    def _next_target(self) -> int | None:
        wanted = [step for step in self._handles if step >= self.current_step]
        if self._settings.every is not None:
            wanted.append(
                -(-max(self.current_step, 1) // self._settings.every) * self._settings.every
            )
        return min(wanted, default=None)

    def _acquire(self, *, wait: bool) -> int | None:
        self.settle()  # where the scaler skipped the update, the last one is still unconfirmed
        self.refresh()  # before a slot is taken: it may need larger ones
        slot = self._client.acquire()
        may_skip = self._settings.when_busy == "skip" and self._stop_at is None
        if slot is not None or not wait or may_skip:
            return slot
        self._count("waited_for_slot")
        return self._wait_for(self._client.acquire, "a free slot")

    def _wait_for(self, attempt: Callable[[], T | None], what: str) -> T | None:
        """Wait, as training, until an attempt succeeds; None if training has to stop before."""
        found: list[T] = []
        stop_at = self._stop_at

        def succeeded() -> bool:
            result = attempt()
            if result is not None:
                found.append(result)
            return result is not None

        with self._device.hold("wait", self.current_step):
            try:
                patience = WAIT if stop_at is None else max(0.0, stop_at - time.monotonic())
                self._client.wait_for(succeeded, patience, what)
            except AgentError:
                if stop_at is None or time.monotonic() < stop_at:
                    raise
        return next(iter(found), None)

    def _skip(self, target: int) -> None:
        self._count("skipped_busy")
        reason = f"the checkpoint of step {target} is skipped: no slot is free"
        log.warning("%s", reason)
        self._handle(target).advance(Stage.FAILED, error=AgentError(reason))
        self._handles.pop(target, None)

    def _open(self, slot: int, target: int, *, sealed: sealing.Sealing | None = None) -> None:
        windows = target - self.current_step + 1
        blocks = self._blocks(slot, windows)
        fallback = self.trust.reason
        if fallback is None and self._inventory_obstacles and windows == 1:
            fallback = self._inventory_obstacles
        capture = Capture(
            handle=self._handle(target),
            client=self._client,
            device=self._device,
            policy=self._policy,
            slot=slot,
            base=self.current_step,
            target=target,
            blocks=blocks,
            fallback=fallback if self._policy.max_windows > 1 else None,
            launch_id=self._settings.launch_id,
            again=sealed is not None,
            header_reserve=self.memory.header,
            staging=self._staging,
        )
        self._capture = capture
        self._watch(capture)
        if windows == 1:
            self._seal(capture, sealed)
        else:
            capture.open_window(self.current_step)

    def _blocks(self, slot: int, windows: int) -> Blocks:
        """The blocks of a checkpoint in a slot that was taken for it.

        Raises:
            StateError: there is state that has no place; the next checkpoint will have one for it.
        """
        try:
            views = self._preparation.views(self.inventory)
            budgets = self.planner.budgets(self.inventory, windows)
            return self._preparation.blocks(slot, views, budgets)
        except StateError:
            self._client.release(slot)
            self._retake()
            raise

    @property
    def _inventory_obstacles(self) -> str | None:
        """Why nothing at all can be replayed, if so."""
        return None if self.inventory.replayable else next(iter(self._obstacles), None)

    def _seal(self, capture: Capture, sealed: sealing.Sealing | None = None) -> None:
        """The target is reached: everything else, at once."""
        step = self.current_step
        room = self._spare
        content = sealed or sealing.take(self.inventory, self._extras, capture.views.buffers)
        held: Collection[int] = ()
        if self._settings.proof:
            held = self._frozen.begin(capture.slot, capture.views, capture.handle, step)
            self.planner.reused = self._frozen.reused
        capture.seal(
            step,
            content,
            held=held,
            start=self.inventory.layout.size - room,
            room=room,
            proof=self._settings.proof,
        )
        self._handles.pop(capture.handle.step, None)
        self._capture, self._closing = None, capture
        self._sealed_at = step
        if self._policy.wait_copied:
            for copied in capture.state_copies:
                self._device.gate(copied, name="copy", step=step)
        if self.trust.exposed or self._policy.wait_durable:
            self.settle()
        if self._policy.wait_durable and self._stop_at is None:
            self._client.wait_for(capture.handle.done, WAIT, "the checkpoint to be durable")

    def _confirm(self, capture: Capture, changed: str | None = None) -> None:
        """The last window has closed: the checkpoint is what it should be, or is taken again."""
        self.trust.unwatch()
        if capture.handle.done():  # it failed as one that was taken again already
            return
        problem = changed or capture.problem or ("the agent was lost" if capture.lost else None)
        if problem is None and not capture.can_be_retaken():
            problem = "a tensor without gradient was changed while it was copied"
        if problem is None and not capture.confirm(self._found_late):
            problem = capture.problem or "the agent was lost"
        if problem is None:
            self._frozen.confirmed(capture.slot)
            self.windows_used.append(capture.target - capture.base + 1)
            self.state_bytes += capture.state_bytes
            self._prepare_due = True
            return
        self._distrust(problem)
        # Where the scaler skipped the update after it, the target is over.
        standing = capture.target == self.current_step and capture.can_be_retaken()
        if changed is not None or not standing:
            self._lose(capture, problem)
            return
        self._client.drop(capture.sequence, problem, failed=False)
        log.warning("the checkpoint of step %d is taken again: %s", capture.target, problem)
        self._handles[capture.target] = capture.handle
        slot = self._acquire(wait=True)
        if slot is None:
            self._skip(capture.target)
            return
        self._open(slot, capture.target, sealed=capture.sealing)
        again = self._closing
        if again is not None:
            again.close_window(self.current_step)
            self._closing = None
            if again.confirm(self._found_late):
                self._frozen.confirmed(again.slot)

    def _lose(self, capture: Capture, problem: str) -> None:
        """Its state does not stand any more: nothing can be taken again."""
        if not self._client.drop(capture.sequence, problem, failed=True):
            error = AgentError(problem)  # the agent had given it up, and left the rest to us
            self._client.failed(error)
            capture.handle.advance(Stage.FAILED, error=error)

    def _found_late(self, problem: str) -> None:
        # On the outbox thread; a reason and not the capture, which would keep its copies alive.
        self._late = problem

    # -- gradients ---------------------------------------------------------------------------------

    def _send_gradients(self, capture: Capture, index: int) -> None:
        """Queue the gradients of all captured blocks, ahead of the next window's state."""
        wants, count = capture.wanted(index)
        if not count:
            return
        optimizer = list(self._optimizers.values())[index]
        groups = wants.groups(count)
        recipe, values = take_recipe(optimizer, prefix=f"{index}.", groups=groups)
        writes = any(
            optim.writes_gradients(optimizer, optimizer.param_groups[group]) for group in groups
        )
        earlier = capture.sent_in_update()
        sent = send(
            wants,
            count,
            device=self._device,
            ring=self._client.ring_view,
            allocate=lambda nbytes, own: self._allocate_ring(
                nbytes, [*own, *(ticket for one in earlier for ticket in one.tickets)]
            ),
            staging=self._staging,
            narrow=self._narrow,
            step=self.current_step + 1,
        )
        faults.point("capture.gradients")
        capture.add_update(index, recipe, values, sent)
        self._fences.add(sent)
        if writes or self._policy.wait_gradients:
            self._fences.gate([sent])

    def _allocate_ring(self, nbytes: int, own: Sequence[int]) -> tuple[int, int] | None:
        """A place in the ring (on the copy stream's thread); None if there will be none.

        Args:
            own: tickets of the same update.
        """
        client, generation = self._client, self._client.generation
        found = client.ring_allocate(nbytes)
        if found is None:
            self._count("waited_for_ring")
        while found is None and client.ready and client.generation == generation:
            if client.ring_has_only(own):
                return None  # they are given back when all of them are there, so never
            client.wait_a_moment()
            found = client.ring_allocate(nbytes)
        return found

    # -- what breaks the assumption ----------------------------------------------------------------

    def _unprepared(self) -> bool:
        """Whether the first plan, or the first blocks, can be made now."""
        if not self._several() or self._settings.windows is not None:
            return not self._preparation.begun and self.current_step >= PASS
        return self.planner.wanting and not self._rehearsal.pending

    def _prepare(self) -> None:
        """Make ready for the next checkpoint (on the outbox thread)."""
        self._preparation.ahead(
            self.inventory,
            self.planner,
            slots=self._settings.slots,
            narrow=self._narrow,
            one=self.trust.reason is not None,
            gradients=self._fences.gradients,
        )

    def _renew_views(self, capture: Capture) -> str | None:
        """Let in state that first gradients have created; other changes of it are an obstacle."""
        views = self._preparation.views(self.inventory)
        if capture.views is not views:
            if (reason := capture.views.replaced()) is not None:
                return reason
            capture.blocks = self._preparation.blocks(capture.slot, views, capture.blocks.budgets)
            self._watch(capture)
        return None

    def _watch(self, capture: Capture) -> None:
        """What stands now is what is captured: notice if anything else changes it."""
        self.trust.watch({} if self._policy.wait_copied else capture.views.guards)

    def _abandon(self, reason: str) -> None:
        """End a multi-step capture; its step will be taken by one plain copy."""
        capture = self._capture
        if capture is None:
            return
        log.warning(
            "the checkpoint of step %d is taken in one window, because %s", capture.target, reason
        )
        capture.give_up()
        self._client.drop(capture.sequence, reason, failed=False)
        self._handles[capture.target] = capture.handle
        self._capture = None
        self._fences.unwatch()
        self._distrust(reason)

    def _check_casts(self) -> None:
        """Weights that were the cast of their master at the start must stay so in an update."""
        self._casts_checked = True
        both = zip(self.inventory.replayable, self.inventory.layout.params, strict=True)
        if not all(inventory.is_cast(live) for live, param in both if param.derived is not None):
            log.info("weights are not the cast of their master copies: they are sent as well")
            self._derive = False
            self._retake()

    def _found_wrong(self, reason: str) -> None:
        """Only the proof saw it, so only another lost checkpoint could show that it is over."""
        self._derive = False
        if self._capture is not None and self._policy.max_windows > 1:
            self._abandon(reason)
            self.trust.lose(reason, for_good=True)
        else:
            self._distrust(reason, for_good=True)
        self._retake()

    def _distrust(self, reason: str, *, for_good: bool = False) -> None:
        """Take checkpoints in one window for the time being."""
        self._count("fallbacks")
        cured = reason.endswith(NO_UPCAST)
        if cured:  # all bits are sent from now on
            self._narrow = False
        self.trust.lose(reason, cured=cured, for_good=for_good)
        self.planner.forget()

    def _count(self, name: str) -> None:
        self.events[name] = self.events.get(name, 0) + 1

    # -- planning ----------------------------------------------------------------------------------

    def _planned_windows(self) -> int:
        """K for the next checkpoint."""
        if self.trust.reason is not None:
            return 1
        if self._policy.max_windows > 1:
            pending = self._rehearsal.pending
            if not pending:
                self._narrow = self._narrow and self._rehearsal.narrow()
            elif self._settings.windows is None:
                return 1
        return self.planner.windows(self.inventory)

    def _learn(self, capture: Capture) -> None:
        """Take in how fast the link and the replay really were."""
        rate = capture.link_rate()
        if rate is not None:
            # No copy beside the training is faster than one alone: it was held up, and caught up.
            self._meter.link.add(min(rate, self._device.link_rate(computing=False)))
        if (seconds := capture.proof_seconds()) is not None:
            self._meter.proof.value = seconds
        totals = self._client.totals
        if totals.replay_s > 0:
            self._meter.replay.value = totals.replayed / totals.replay_s

    # -- structure ---------------------------------------------------------------------------------

    def _retake(self) -> None:
        """Take the inventory anew, and more memory if it needs that."""
        self.inventory = self._take_inventory()
        self.trust.guards = {}
        self.planner.forget()
        if self.inventory.layout.size > self._client.slot_bytes:
            log.info("the state has grown; its slots are allocated anew")
            self._client.wait_for(self._client.drained, WAIT, "earlier checkpoints to be durable")
            self._allocate()

    def _handle(self, step: int) -> Handle:
        handle = self._handles.get(step)
        if handle is None:
            handle = self._handles[step] = Handle(step, before_wait=self._before_wait)
        return handle

    def _before_wait(self) -> None:
        # Whoever waits on the training thread would otherwise wait for its own next update.
        if threading.get_ident() == self._thread:
            self.settle()
