"""The trainer's side of the agent: one object for the connection, the memory, and the checkpoints.

Beside the training thread it has two: the *outbox* turns finished copies into messages, in the
order in which they were queued (:mod:`gockpt.agent.outbox`); the *inbox* takes the agent's messages
and starts a new agent when the old one is gone (:mod:`gockpt.agent.inbox`). The training thread
only looks at what they have noted in the :mod:`ledger <gockpt.agent.ledger>`, or waits with a
deadline. None of them hashes, writes or replays anything. What more than one of them uses is
guarded by one lock, whose condition tells of every change.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from gockpt.agent.channel import ChannelClosed
from gockpt.agent.diskwatch import DiskWatch
from gockpt.agent.handle import Handle
from gockpt.agent.inbox import Inbox
from gockpt.agent.launch import AgentMode, Running, log_path, occupy_standard, start
from gockpt.agent.ledger import Ledger, Tracked, named_error
from gockpt.agent.outbox import Finished, Outbox
from gockpt.agent.protocol import (
    Alive,
    AnyMessage,
    Bye,
    Committed,
    Consistent,
    Drop,
    Failed,
    Freed,
    Hello,
    Image,
    Open,
    Protect,
    Ready,
    Recall,
    Recalled,
    Recorded,
    Refused,
    Seal,
    Structure,
    TierState,
)
from gockpt.agent.rendezvous import agent_pid, forget, key, sockets
from gockpt.agent.shared import Shared
from gockpt.agent.takeover import inherit
from gockpt.agent.tierwatch import TierWatch
from gockpt.arena import Segment, SlotState
from gockpt.errors import AgentError, DeviceError, GockptError
from gockpt.events import Recorder

log = logging.getLogger("gockpt")

START_TIMEOUT = 120.0
"""Seconds that a new agent may take until it is ready (importing torch from a cold disk)."""

RECALL_TIMEOUT = 60.0
"""Seconds that the agent may take to say what it has in memory (it may have to hash that)."""

DRAIN_TIMEOUT = 3600.0
"""Seconds that memory which does not fit is kept until all in it has been written."""

MAX_RESTARTS = 3
"""Agents replaced one after the other, without a checkpoint between; the next loss is the end."""


class AgentClient:
    """Owns the connection to the agent and the memory that both share."""

    def __init__(
        self, hello: Hello, *, mode: AgentMode, recorder: Recorder, stuck_after: float = 600.0
    ) -> None:
        """Start an agent, or find the one that a dead trainer has left.

        Raises:
            LockedError: the directory is in use.
            AgentError: no process can be started.
        """
        occupy_standard()
        self._hello = hello
        self._mode: AgentMode = mode
        self._recorder = recorder
        self._log = log_path(hello.directory, hello.rank)
        self._changed = threading.Condition()
        self._shared = Shared()
        self._ledger = Ledger(self._changed, self._shared)
        self._protected: Path | None = None
        self._sequence = 1
        self._closing = False
        self._left = False
        """Whether the agent was left to finish alone."""
        self._described = (0, 0)
        """(generation, structure) that the agent was told last."""
        self.generation = 0
        """Counts the agents; what was sent to an earlier one is lost."""
        self.ready = False
        """Whether there is an agent that can be used now."""
        self.totals = self._ledger.totals
        self.problems = self._ledger.problems
        self.tier = TierWatch(hello.tier) if hello.tier is not None else None
        """How far the second tier has come, if there is one."""
        self._disk = DiskWatch()
        self._recalled: list[Image] | None = None
        """What the agent has in memory; None: it was not asked, or has not answered."""
        self._inherited = inherit(hello)
        """The agent of an earlier trainer, until its memory has been taken over."""
        self._running: Running = (
            start(mode, self._log) if self._inherited is None else self._inherited.running
        )
        self._outbox = Outbox(self._send, self._note_fatal, stuck_after)
        self._inbox = Inbox(
            agent=lambda: self._running,
            note=self._note,
            lost=self._replace,
            ended=lambda: self._closing and (self._left or self._running.join(0)),
            failed=self._note_fatal,
            may_end_it=mode == "process",
        )

    # -- start -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait for the agent to be ready.

        Raises:
            LockedError: the directory is in use.
            AgentError: the agent did not start.
        """
        try:
            if self._inherited is not None:
                self._take_over()
            else:
                self._introduce()
        except BaseException:
            self._closing = True  # its threads were not started: there is nothing to close
            self._running.kill()
            self._running.channel.close()
            self._clear_away()
            raise
        self._outbox.start()
        self._inbox.start()

    def _take_over(self) -> None:
        """Make the memory of an earlier trainer, and what is in it, this one's own."""
        inherited, self._inherited = self._inherited, None
        if inherited is None:
            return
        log.info("agent %d goes on with the memory of an earlier trainer", inherited.ready.pid)
        with self._changed:
            self._sequence = inherited.ready.next_sequence
            self.generation += 1
            self._shared.take_over(inherited.segments)
            for held in inherited.ready.held:
                self._ledger.hold(held, self.generation)
            self.ready = True

    def _introduce(self) -> None:
        channel = self._running.channel
        deadline = time.monotonic() + START_TIMEOUT
        try:
            channel.send(self._hello)
            received = None
            while received is None and time.monotonic() < deadline:
                received = channel.receive(1.0)
        except ChannelClosed as error:
            raise AgentError(f"the agent did not start: {self._running.log}") from error
        if received is None:
            raise AgentError(f"the agent was not ready after {START_TIMEOUT:.0f} s")
        message = received[0]
        if isinstance(message, Refused):
            raise named_error(message.kind, message.reason)
        if not isinstance(message, Ready):
            raise AgentError(f"the agent said {type(message).__name__} instead of Ready")
        with self._changed:
            self._sequence = max(self._sequence, message.next_sequence)
            self.generation += 1
            self._hand_over_memory()
            self.ready = True
            self._changed.notify_all()
        if self._closing:  # the good-bye was for the one that is dead
            channel.send(Bye())

    def _hand_over_memory(self) -> None:
        """Give a new agent the memory, and what the last one had proved but not made durable."""
        channel = self._running.channel
        self._shared.give(channel)
        if self._protected is not None:
            channel.send(Protect(path=str(self._protected)))
        for tracked in self._ledger.whole(self.generation):
            self._pass_on(tracked)

    def _pass_on(self, tracked: Tracked) -> None:
        """Let this agent finish what the last one could not."""
        adopt = tracked.pass_on()
        if adopt is not None:
            self._running.channel.send(adopt)

    def _replace(self) -> bool:
        """Start a new agent in place of a dead one; False if that is given up."""
        with self._changed:
            if self._closing:
                return False
            self.ready = False
            self._ledger.agent_lost()
            self._shared.agent_lost()
            self._changed.notify_all()
        log.warning("the agent was lost (%s); starting another one", self._running.log)
        try:
            with contextlib.suppress(OSError):
                self._running.kill()
            self._running.channel.close()
            if self.totals.agents_lost > MAX_RESTARTS:
                lost = self.totals.agents_lost
                raise AgentError(f"{lost} agents were lost in a row; {self._running.log}")
            self._running = start(self._mode, self._log)
            self._hello = msgspec.structs.replace(self._hello, faults=[], sequence=self._sequence)
            self._introduce()
        except (GockptError, ChannelClosed) as error:
            if not self._closing:
                self._note_fatal(error)
            return False
        return True

    # -- memory ------------------------------------------------------------------------------------

    def fits(self, *, slots: int, slot_bytes: int, scratch_bytes: int, ring_bytes: int) -> bool:
        """Whether the memory that there is already, an earlier trainer's, is what is needed."""
        return self._shared.fits(
            slots=slots, slot_bytes=slot_bytes, scratch_bytes=scratch_bytes, ring_bytes=ring_bytes
        )

    @property
    def shared_bytes(self) -> int:
        """Size of all memory that is shared with the agent."""
        return sum(segment.size for segment in self.segments)

    def allocate(self, *, slots: int, slot_bytes: int, scratch_bytes: int, ring_bytes: int) -> None:
        """Make the shared memory (before the first checkpoint) and give it to the agent.

        Memory that there is and that fits is used as it is; other memory goes, once all in it has
        been written.

        Raises:
            AgentError: there is not enough memory.
        """
        sizes = {"slot_bytes": slot_bytes, "scratch_bytes": scratch_bytes, "ring_bytes": ring_bytes}
        if self._shared.fits(slots=slots, **sizes):
            self._shared.renew_ring()
            return
        self.wait_for(self.drained, DRAIN_TIMEOUT, "earlier checkpoints to be written")
        with self._changed:
            self._shared.allocate(slots=slots, **sizes)
            if self.ready:
                self._hand_over_memory()

    @property
    def segments(self) -> list[Segment]:
        """All memory that device copies may go to."""
        return self._shared.segments

    def slot(self, number: int) -> Segment:
        """The memory of a slot."""
        return self._shared.slots[number].segment

    def scratch(self, number: int) -> Segment:
        """The scratch beside a slot."""
        return self._shared.slots[number].scratch

    @property
    def slot_bytes(self) -> int:
        """Size of a slot; 0 before there are any."""
        return self._shared.slots[0].segment.size if self._shared.slots else 0

    def ring_view(self, dtype: torch.dtype) -> Tensor:
        """The whole gradient ring, as a 1-D tensor of a dtype."""
        return self._shared.ring_view(dtype)

    def ring_allocate(self, nbytes: int) -> tuple[int, int] | None:
        """(ticket, byte offset) of a free stretch of the ring, or None while there is none."""
        with self._changed:
            return self._shared.ring.allocate(nbytes)

    def ring_free(self, tickets: Sequence[int]) -> None:
        """Give stretches back that the agent was never told of, once nothing is copied there."""
        with self._changed:
            self._shared.ring.free(tickets)
            self._changed.notify_all()

    def ring_has_only(self, tickets: Collection[int]) -> bool:
        """Whether the ring is empty but for these stretches."""
        with self._changed:
            return self._shared.ring.only(tickets)

    def acquire(self) -> int | None:
        """Take a slot for a new checkpoint, or None while none is free."""
        with self._changed:
            return self._shared.acquire(self._ledger.newest_consistent) if self.ready else None

    def release(self, number: int) -> None:
        """Give a slot back that no checkpoint was begun in."""
        with self._changed:
            self._shared.slots[number].state = SlotState.FREE
            self._changed.notify_all()

    # -- checkpoints -------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        """The number of the next checkpoint (fixed on the training thread)."""
        with self._changed:
            self._sequence += 1
            return self._sequence - 1

    def track(
        self, handle: Handle, slot: int, opened: Open, structure: Structure, *, final: bool
    ) -> None:
        """A checkpoint begins; tell the agent.

        Args:
            final: its failure is its end (see :meth:`confirmed`).
        """
        with self._changed:
            self._ledger.track(
                Tracked(
                    handle=handle,
                    slot=slot,
                    opened=opened,
                    structure=structure,
                    generation=self.generation,
                    final=final,
                )
            )
            described = self._described == (self.generation, structure.number)
            self._described = (self.generation, structure.number)
        if not described:
            self.post(lambda: structure)
        self.post(lambda: opened)

    def targeted(self, sequence: int, step: int) -> None:
        """The target has been reached: the latencies of this checkpoint count from here."""
        with self._changed:
            self._ledger.targeted(sequence, step)

    def confirmed(self, sequence: int) -> bool:
        """Nobody will take this checkpoint again; False if it has failed before that was said."""
        with self._changed:
            return self._ledger.confirmed(sequence)

    def sealed(self, seal: Seal) -> None:
        """Remember what makes the checkpoint complete, in case that the agent dies."""
        with self._changed:
            late = self._ledger.sealed(seal, self._serving)
        if late is not None:
            self._pass_on(late)

    def drop(self, sequence: int, reason: str, *, failed: bool) -> bool:
        """End a checkpoint that will not be finished; its slot is free when the agent says so.

        Args:
            failed: tell its handle (else another capture of the same step takes over).

        Returns:
            False if it was not on its way any more; then nobody is told.
        """
        with self._changed:
            if not self._ledger.drop(sequence, reason, self._serving, failed=failed):
                return False
        self.post(lambda: Drop(sequence=sequence, reason=reason))
        return True

    @property
    def _serving(self) -> int | None:
        """The generation of the agent that can be used now."""
        return self.generation if self.ready else None

    def protect(self, path: Path) -> None:
        """Do not delete this checkpoint, until another one is protected."""
        self._protected = path
        self.post(lambda: Protect(path=str(path)))

    def failed(self, error: GockptError) -> None:
        """Something failed on the trainer's side: to be raised like what the agent tells."""
        with self._changed:
            self._ledger.add_error(error)

    @property
    def troubled(self) -> bool:
        """Whether :meth:`take_errors` may have something to tell (a look without a lock)."""
        return bool(self._ledger.errors) or self._ledger.fatal is not None

    def take_errors(self) -> list[GockptError]:
        """What has failed since the last call."""
        with self._changed:
            return self._ledger.take_errors(ending=self._closing)

    # -- waiting -----------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait on the training thread for something that the agent brings about.

        Raises:
            AgentError: it did not happen in time, or there is no agent any more.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not condition():
                if self._ledger.fatal is not None:
                    raise self._ledger.fatal
                rest = deadline - time.monotonic()
                if rest <= 0:
                    raise AgentError(
                        f"waited {timeout:.0f} s for {what}; the agent: {self._running.log}"
                    )
                self._changed.wait(min(rest, 1.0))

    def wait_a_moment(self) -> None:
        """Wait until the agent has brought something about, for at most a quarter of a second."""
        with self._changed:
            self._changed.wait(0.25)

    def idle(self, open_sequence: int | None) -> bool:
        """Whether no checkpoint is on its way but the one that is still being captured."""
        return not self._ledger.tracked.keys() - {open_sequence}

    def proved(self, open_sequence: int | None) -> bool:
        """Whether all checkpoints but the one that is still being captured can be restored."""
        with self._changed:
            tracked = {**self._ledger.tracked}
        tracked.pop(open_sequence or 0, None)
        return self.ready and all(one.outcome is not None for one in tracked.values())

    def drained(self) -> bool:
        """Whether no checkpoint is on its way, and the agent has let go of those dropped."""
        return not self._ledger.tracked and not self._shared.dropped

    def recall(self) -> list[tuple[Image, Segment]]:
        """The checkpoints that can be restored from memory, the newest first.

        Raises:
            AgentError: the agent does not say, or is lost meanwhile.
        """
        with self._changed:
            self._recalled = None
            generation = self.generation
        self.post(Recall)
        self.wait_for(
            lambda: self._recalled is not None or generation != self.generation,
            RECALL_TIMEOUT,
            "what is in memory",
        )
        images: list[Image] = self._recalled or []
        return [(image, self.slot(image.slot)) for image in images]

    # -- the end -----------------------------------------------------------------------------------

    def close(self, timeout: float, *, leave: bool = False) -> None:
        """Let the agent finish what is complete, and end it.

        That the newest checkpoint did not reach the second tier is among the errors to be taken.

        Args:
            leave: an agent that does not finish in time is left to do so alone.

        Raises:
            AgentError: it did not finish in time.
        """
        if self._closing:
            return
        late: AgentError | None = None
        deadline = time.monotonic() + timeout
        try:
            self.wait_for(self.drained, timeout, "the last checkpoints to be written")
            if self.tier is not None:
                self._fill(self.tier, deadline)
        except AgentError as error:
            late = error
        self._closing = True
        self.post(Bye)
        self._outbox.close(30)
        if not self._running.join(30 if late is None else 0.1):
            if leave:
                self._left = True
                self._running.leave()
            else:
                self._running.kill()
        self._inbox.join(30)
        self._running.channel.close()
        self._clear_away()
        with self._changed:
            self._ledger.give_up(late or AgentError("its agent ended before it was durable"))
        self._shared.close()
        if late is not None and not self._left:
            raise late

    def _clear_away(self) -> None:
        """Remove the socket of an agent that was killed: none comes after it that would do so."""
        hello, pid = self._hello, self._running.pid
        if self._left or hello.meeting is None:
            return
        for path in sockets(Path(hello.meeting), key(hello.directory, hello.rank)):
            if agent_pid(path) == pid:
                forget(path)

    def _fill(self, tier: TierWatch, deadline: float) -> None:
        """Wait until the tier has the newest checkpoint, or is stuck."""
        tier.ending()

        def full() -> bool:
            return tier.holds(self._ledger.newest_committed)

        with contextlib.suppress(AgentError):  # that of the deadline; a lost agent's is fatal
            rest = max(0.0, deadline - time.monotonic())
            self.wait_for(lambda: full() or tier.stuck, rest, "the tier")
        if not full():
            kind, reason = tier.trouble
            where = self._hello.directory
            self._ledger.errors.append(named_error(kind, f"{reason} (it is safe in {where})"))

    # -- messages ----------------------------------------------------------------------------------

    def post(
        self,
        make: Callable[[], AnyMessage | None],
        after: Finished | None = None,
        failed: Callable[[DeviceError], None] | None = None,
    ) -> None:
        """Call ``make`` on the outbox thread once ``after`` has ended, and send what it returns.

        Args:
            failed: called there instead if ``after`` has ended badly; without it nothing more can
                be saved then.
        """
        self._outbox.post(make, after, self.generation, failed)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was posted so far has been looked at and sent; whether it has."""
        return self._outbox.flush(timeout)

    def _send(self, message: AnyMessage | None, generation: int) -> None:
        self._ledger.remember(message)
        # The channel before the look: what is meant for a dead agent must not be the first
        # that a new one hears.
        channel = self._running.channel
        if message is not None and generation == self._serving:
            channel.send(message)

    def _note(self, message: AnyMessage) -> None:
        ledger = self._ledger
        with self._changed:
            if isinstance(message, Freed):
                self._shared.ring.free(message.tickets)
            elif isinstance(message, Consistent):
                ledger.note_consistent(message)
            elif isinstance(message, Committed):
                ledger.note_committed(message)
            elif isinstance(message, Failed):
                ledger.note_failed(message)
            elif isinstance(message, Recorded):
                self._recorder.extend(message.spans)
            elif isinstance(message, Alive):
                self._disk.note(message)
            elif isinstance(message, TierState) and self.tier is not None:
                self.tier.note(message)
            elif isinstance(message, Recalled):
                self._recalled = message.images
            self._changed.notify_all()

    def _note_fatal(self, error: BaseException) -> None:
        with self._changed:
            self._ledger.note_fatal(error)
