"""The trainer's side of the agent: memory, messages, liveness, replacement.

Two threads of the trainer: the *outbox* turns finished copies into messages, in the order in which
they were queued; the *inbox* takes the agent's messages, and starts a new agent when the old one is
gone. The training thread only looks at what they have noted, or waits with a deadline. None of them
hashes, writes or replays anything.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from gockpt import errors
from gockpt.agent.channel import ChannelClosed
from gockpt.agent.handle import Handle, Stage
from gockpt.agent.launch import AgentMode, LogTail, Running, start
from gockpt.agent.protocol import (
    Adopt,
    AnyMessage,
    Attach,
    Bye,
    Committed,
    Consistent,
    Drop,
    Failed,
    Freed,
    Hello,
    Open,
    Protect,
    Ready,
    Recorded,
    Refused,
    Seal,
    Structure,
)
from gockpt.arena import Ring, Segment, SlotState
from gockpt.errors import AgentError, GockptError
from gockpt.events import Recorder

log = logging.getLogger("gockpt")

START_TIMEOUT = 120.0
"""Seconds that a new agent may take until it is ready (importing torch from a cold disk)."""

MAX_RESTARTS = 3
"""Agents lost one after the other, without a checkpoint between, before it is given up."""


class Finished(Protocol):
    """A completion to wait for (the part of :class:`gockpt.devices.base.Copied` used here)."""

    def wait(self, timeout: float) -> bool:
        """Wait for at most ``timeout`` seconds; whether it has ended."""
        ...


@dataclass(slots=True)
class _Slot:
    segment: Segment
    scratch: Segment
    state: SlotState = SlotState.FREE
    sequence: int = 0


@dataclass(slots=True)
class _Tracked:
    """A checkpoint that is not done yet."""

    handle: Handle
    slot: int
    opened: Open
    structure: Structure
    generation: int
    seal: Seal | None = None
    outcome: str | None = None


@dataclass(slots=True)
class Totals:
    """Sums over all checkpoints so far."""

    committed: int = 0
    failed: int = 0
    gradient_bytes: int = 0
    persisted_bytes: int = 0
    replayed: int = 0
    replay_s: float = 0.0
    in_flight_max: int = 0
    agents_lost: int = 0
    latencies: list[tuple[int, str, float]] = field(default_factory=list)
    """(step, ``target`` | ``consistent`` | ``durable``, time.monotonic())."""


class AgentClient:
    """Owns the connection to the agent and the memory that both share."""

    def __init__(
        self, hello: Hello, *, mode: AgentMode, recorder: Recorder, stuck_after: float = 600.0
    ) -> None:
        self._hello = hello
        self._mode: AgentMode = mode
        self._recorder = recorder
        self._stuck_after = stuck_after
        self._log = Path(hello.directory) / ".gockpt" / f"rank-{hello.rank:05d}.log"
        self._changed = threading.Condition()
        self._slots: list[_Slot] = []
        self._ring_segment: Segment | None = None
        self._ring_views: dict[torch.dtype, Tensor] = {}
        self._ring = Ring(0)
        self._tracked: dict[int, _Tracked] = {}
        self._errors: list[GockptError] = []
        self._protected: Path | None = None
        self._newest_consistent = 0
        self._sequence = 1
        self._closing = False
        self._fatal: GockptError | None = None
        self._lost: tuple[int, GockptError] | None = None
        """The newest checkpoint that was lost with its agent, unless a later one is durable."""
        self._described = (0, 0)
        """(generation, structure) that the agent was told last."""
        self.generation = 0
        """Counts the agents; what was sent to an earlier one is lost."""
        self.ready = False
        """Whether there is an agent that can be used now."""
        self.totals = Totals()
        self.problems: dict[int, str] = {}
        """Why the agent could not go on with a checkpoint that is still being captured."""
        self._outbox: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._running: Running = start(mode, self._log)
        self._threads = [
            threading.Thread(target=self._send_loop, name="gockpt-outbox", daemon=True),
            threading.Thread(target=self._receive_loop, name="gockpt-inbox", daemon=True),
        ]

    # -- start -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait for the agent to be ready.

        Raises:
            LockedError: the directory is in use.
            AgentError: the agent did not start.
        """
        try:
            self._introduce()
        except BaseException:
            self._closing = True  # its threads were not started: there is nothing to close
            self._running.kill()
            self._running.channel.close()
            raise
        for thread in self._threads:
            thread.start()

    def _introduce(self) -> None:
        channel = self._running.channel
        deadline = time.monotonic() + START_TIMEOUT
        try:
            channel.send(self._hello)
            received = None
            while received is None and time.monotonic() < deadline and not self._closing:
                received = channel.receive(1.0)
        except ChannelClosed as error:
            raise AgentError(f"the agent did not start: {LogTail(self._log)}") from error
        if received is None:
            raise AgentError(f"the agent was not ready after {START_TIMEOUT:.0f} s")
        message = received[0]
        if isinstance(message, Refused):
            raise _error(message.kind, message.reason)
        if not isinstance(message, Ready):
            raise AgentError(f"the agent said {type(message).__name__} instead of Ready")
        with self._changed:
            self._sequence = max(self._sequence, message.next_sequence)
            self.generation += 1
            self._hand_over_memory()
            self.ready = True
            self._changed.notify_all()

    def _hand_over_memory(self) -> None:
        """Give a new agent the memory, and what the last one had proved but not made durable."""
        channel = self._running.channel
        for number, slot in enumerate(self._slots):
            channel.send(Attach(name=f"slot-{number}", size=slot.segment.size), slot.segment)
            channel.send(Attach(name=f"scratch-{number}", size=slot.scratch.size), slot.scratch)
        if self._ring_segment is not None:
            channel.send(Attach(name="ring", size=self._ring_segment.size), self._ring_segment)
        if self._protected is not None:
            channel.send(Protect(path=str(self._protected)))
        for tracked in self._tracked.values():
            if tracked.seal is not None and tracked.outcome is not None:
                tracked.generation = self.generation
                channel.send(
                    Adopt(
                        opened=tracked.opened,
                        structure=tracked.structure,
                        seal=tracked.seal,
                        outcome=tracked.outcome,
                    )
                )

    def allocate(self, *, slots: int, slot_bytes: int, scratch_bytes: int, ring_bytes: int) -> None:
        """Make the shared memory (once, before the first checkpoint) and give it to the agent.

        Raises:
            AgentError: there is not enough memory.
        """
        with self._changed:
            try:
                self._slots = [
                    _Slot(
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
            self._ring = Ring(self._ring_segment.size)
            self._ring_views = {}
            if self.ready:
                self._hand_over_memory()

    @property
    def segments(self) -> list[Segment]:
        """All memory that device copies may go to."""
        found = [segment for slot in self._slots for segment in (slot.segment, slot.scratch)]
        return found + ([self._ring_segment] if self._ring_segment is not None else [])

    def slot(self, number: int) -> Segment:
        """The memory of a slot."""
        return self._slots[number].segment

    def scratch(self, number: int) -> Segment:
        """The scratch beside a slot."""
        return self._slots[number].scratch

    def ring_view(self, dtype: torch.dtype) -> Tensor:
        """The whole gradient ring, as a 1-D tensor of a dtype."""
        if self._ring_segment is None:
            raise AgentError("there is no gradient ring yet")
        found = self._ring_views.get(dtype)
        if found is None:
            found = self._ring_views[dtype] = self._ring_segment.tensor.view(dtype)
        return found

    def ring_allocate(self, nbytes: int) -> tuple[int, int] | None:
        """(ticket, byte offset) of a free stretch of the ring, or None while there is none."""
        with self._changed:
            return self._ring.allocate(nbytes)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot; 0 before there are any."""
        return self._slots[0].segment.size if self._slots else 0

    # -- checkpoints -------------------------------------------------------------------------------

    def acquire(self) -> int | None:
        """Take a slot for a new checkpoint, or None while none is free."""
        with self._changed:
            if not self.ready:
                return None
            for state in (SlotState.FREE, SlotState.RETAINED):
                for number, slot in enumerate(self._slots):
                    newest = slot.sequence == self._newest_consistent
                    if slot.state is state and not (state is SlotState.RETAINED and newest):
                        slot.state = SlotState.FILLING
                        return number
            return None

    def next_sequence(self) -> int:
        """The number of the next checkpoint (fixed on the training thread)."""
        with self._changed:
            self._sequence += 1
            return self._sequence - 1

    def track(self, handle: Handle, slot: int, opened: Open, structure: Structure) -> None:
        """A checkpoint begins; tell the agent."""
        with self._changed:
            self._slots[slot].sequence = opened.sequence
            self._tracked[opened.sequence] = _Tracked(
                handle, slot, opened, structure, self.generation
            )
            in_flight = len(self._tracked)
            self.totals.in_flight_max = max(self.totals.in_flight_max, in_flight)
            described = self._described == (self.generation, structure.number)
            self._described = (self.generation, structure.number)
        if not described:
            self.post(lambda: structure)
        self.post(lambda: opened)

    def targeted(self, sequence: int, step: int) -> None:
        """The target has been reached: the latencies of this checkpoint count from here."""
        with self._changed:
            if sequence in self._tracked:
                self.totals.latencies.append((step, "target", time.monotonic()))

    def sealed(self, seal: Seal) -> None:
        """Remember what makes the checkpoint complete, in case that the agent dies."""
        with self._changed:
            tracked = self._tracked.get(seal.sequence)
            if tracked is None:
                return
            tracked.seal = seal
            if not self.ready or tracked.generation != self.generation:
                self._lose(seal.sequence, tracked)

    def drop(self, sequence: int, reason: str, *, failed: bool) -> None:
        """End a checkpoint that will not be finished; its slot is free when the agent says so.

        Args:
            failed: tell its handle (else another capture of the same step takes over).
        """
        with self._changed:
            tracked = self._tracked.pop(sequence, None)
            if tracked is None:
                return
            # The agent, if it lives, may be replaying into it at this very moment.
            served = self.ready and tracked.generation == self.generation
            self._slots[tracked.slot].state = SlotState.DROPPED if served else SlotState.FREE
            if failed:
                self._failed(tracked, AgentError(reason))
        self.post(lambda: Drop(sequence=sequence, reason=reason))

    def protect(self, path: Path) -> None:
        """Never delete this checkpoint."""
        self._protected = path
        self.post(lambda: Protect(path=str(path)))

    def post(self, make: Callable[[], AnyMessage | None], after: Finished | None = None) -> None:
        """Call ``make`` on the outbox thread once ``after`` has ended, and send what it returns."""
        self._outbox.put(_Parcel(make, after, self.generation))

    def failed(self, error: GockptError) -> None:
        """Something failed on the trainer's side: to be raised like what the agent tells."""
        with self._changed:
            if error is not self._fatal:
                self.totals.failed += 1
                self._errors.append(error)

    def take_errors(self) -> list[GockptError]:
        """What has failed since the last call."""
        with self._changed:
            found, self._errors = self._errors, []
            if self._fatal is not None:
                found.append(self._fatal)
            if self._lost is not None and self._closing:
                found.append(self._lost[1])
            return found

    # -- waiting -----------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait on the training thread for something that the agent brings about.

        Raises:
            AgentError: it did not happen in time, or there is no agent any more.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not condition():
                if self._fatal is not None:
                    raise self._fatal
                rest = deadline - time.monotonic()
                if rest <= 0:
                    raise AgentError(f"waited {timeout:.0f} s for {what}; {LogTail(self._log)}")
                self._changed.wait(min(rest, 1.0))

    def wait_a_moment(self) -> None:
        """Wait until the agent has brought something about, for at most a quarter of a second."""
        with self._changed:
            self._changed.wait(0.25)

    def idle(self, open_sequence: int | None) -> bool:
        """Whether no checkpoint is on its way but the one that is still being captured."""
        return not self._tracked.keys() - {open_sequence}

    def drained(self) -> bool:
        """Whether no checkpoint is on its way."""
        return not self._tracked

    def close(self, timeout: float) -> None:
        """Let the agent finish what is complete, and end it.

        Raises:
            AgentError: it did not finish in time.
        """
        if self._closing:
            return
        late: AgentError | None = None
        try:
            self.wait_for(self.drained, timeout, "the last checkpoints to be written")
        except AgentError as error:
            late = error
        self._closing = True
        self.post(Bye)
        self._outbox.put(None)
        self._threads[0].join(30)
        if not self._running.join(30 if late is None else 0.1):
            self._running.kill()
        self._threads[1].join(30)
        self._running.channel.close()
        for segment in self.segments:
            segment.close()
        if late is not None:
            raise late

    # -- threads -----------------------------------------------------------------------------------

    def _send_loop(self) -> None:
        while (parcel := self._outbox.get()) is not None:
            try:
                if not self._await(parcel):
                    continue
                message = parcel.make()
                # The channel before the look: what is meant for a dead agent must not be the first
                # that a new one hears.
                channel = self._running.channel
                if message is not None and self.ready and parcel.generation == self.generation:
                    channel.send(message)
            except ChannelClosed:
                continue  # the inbox notices, and starts a new agent
            except Exception as error:  # noqa: BLE001 - raised on the training thread
                self._note_fatal(error)

    def _await(self, parcel: _Parcel) -> bool:
        """Wait for the copy; False if the agent it was meant for is gone."""
        if parcel.after is None:
            return True
        deadline = time.monotonic() + self._stuck_after
        while not parcel.after.wait(0.5):
            if time.monotonic() > deadline:
                raise AgentError(f"a copy did not end within {self._stuck_after:.0f} s")
        return True

    def _receive_loop(self) -> None:
        while True:
            try:
                received = self._running.channel.receive(0.5)
            except ChannelClosed:
                if self._closing:
                    return
                if not self._replace():
                    return
                continue
            if received is not None:
                self._note(received[0])
            elif self._closing and self._running.join(0):
                return

    def _note(self, message: AnyMessage) -> None:
        with self._changed:
            if isinstance(message, Freed):
                self._ring.free(message.ticket)
            elif isinstance(message, Consistent):
                self._note_consistent(message)
            elif isinstance(message, Committed):
                self._note_committed(message)
            elif isinstance(message, Failed):
                tracked = self._tracked.pop(message.sequence, None)
                for slot in self._slots:
                    if slot.sequence == message.sequence:
                        slot.state = SlotState.FREE
                open_still = tracked is not None and tracked.seal is None
                if open_still and message.kind != "ProofError":
                    # It can still be helped: the engine takes the same step in another way. What
                    # the proof says is never helped silently.
                    self.problems[message.sequence] = message.reason
                elif tracked is not None:
                    self._failed(tracked, _error(message.kind, message.reason, message))
            elif isinstance(message, Recorded):
                self._recorder.extend(message.spans)
            self._changed.notify_all()

    def _note_consistent(self, message: Consistent) -> None:
        tracked = self._tracked.get(message.sequence)
        if tracked is None:
            return
        tracked.outcome = message.outcome
        self._slots[tracked.slot].state = SlotState.CONSISTENT
        self._newest_consistent = max(self._newest_consistent, message.sequence)
        step = tracked.opened.step if tracked.seal is None else tracked.seal.step
        self.totals.latencies.append((step, "consistent", time.monotonic()))
        tracked.handle.advance(Stage.CONSISTENT)

    def _note_committed(self, message: Committed) -> None:
        tracked = self._tracked.pop(message.sequence, None)
        if tracked is None:
            return
        self._slots[tracked.slot].state = SlotState.RETAINED
        if self._lost is not None and self._lost[0] < message.sequence:
            self._lost = None
        self.totals.committed += 1
        self.totals.agents_lost = 0
        self.totals.persisted_bytes += message.nbytes
        self.totals.replayed += message.replayed
        self.totals.replay_s += message.replay_s
        self.totals.latencies.append((message.step, "durable", time.monotonic()))
        tracked.handle.advance(Stage.COMMITTED, step=message.step, path=Path(message.path))

    def _failed(self, tracked: _Tracked, error: GockptError) -> None:
        self.totals.failed += 1
        self._errors.append(error)
        tracked.handle.advance(Stage.FAILED, error=error)

    def _replace(self) -> bool:
        """Start a new agent in place of a dead one; False if that is given up."""
        with self._changed:
            if self._closing:
                return False
            self.ready = False
            self.totals.agents_lost += 1
            # What an agent had not proved is torn: replayed to no version that anybody knows.
            for sequence, tracked in list(self._tracked.items()):
                if tracked.outcome is None and tracked.seal is not None:
                    self._lose(sequence, tracked)
            for slot in self._slots:
                if slot.state is SlotState.DROPPED:
                    slot.state = SlotState.FREE
            self._ring = Ring(self._ring.size)
            self._changed.notify_all()
        log.warning("the agent was lost (%s); starting another one", LogTail(self._log))
        self._running.channel.close()
        try:
            if self.totals.agents_lost > MAX_RESTARTS:
                raise AgentError(f"{MAX_RESTARTS} agents were lost in a row; {LogTail(self._log)}")
            with contextlib.suppress(OSError):
                self._running.kill()
            self._running = start(self._mode, self._log)
            self._hello = msgspec.structs.replace(self._hello, faults=[])
            self._introduce()
        except GockptError as error:
            if not self._closing:
                self._note_fatal(error)
            return False
        return True

    def _lose(self, sequence: int, tracked: _Tracked) -> None:
        """A sealed checkpoint that its agent had not proved is lost with it."""
        del self._tracked[sequence]
        self._slots[tracked.slot].state = SlotState.FREE
        error = AgentError(f"the agent was lost before step {tracked.handle.step} was complete")
        # Told by the handle and the log; raised only if no later checkpoint makes up for it.
        self._lost = (sequence, error)
        self.totals.failed += 1
        tracked.handle.advance(Stage.FAILED, error=error)
        log.warning("%s", error)
        self._changed.notify_all()

    def _note_fatal(self, error: BaseException) -> None:
        with self._changed:
            self._fatal = error if isinstance(error, GockptError) else AgentError(repr(error))
            for tracked in self._tracked.values():
                tracked.handle.advance(Stage.FAILED, error=self._fatal)
            self._tracked.clear()
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Parcel:
    make: Callable[[], AnyMessage | None]
    after: Finished | None
    generation: int


def _error(kind: str, reason: str, failed: Failed | None = None) -> GockptError:
    """The exception that the agent named."""
    found = getattr(errors, kind, AgentError)
    if not (isinstance(found, type) and issubclass(found, GockptError)):
        found = AgentError
    if issubclass(found, errors.StorageError):
        path = None if failed is None else failed.path
        return found(reason, path=path, errno=None if failed is None else failed.errno)
    return found(reason)
