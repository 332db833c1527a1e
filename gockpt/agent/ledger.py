"""What the trainer knows of its checkpoints: which are on their way, how far, and what failed.

Written by the training thread, which begins and seals them, and by the client's inbox, which hears
of the rest; under the client's lock. What always holds: each checkpoint ends once, as durable or as
failed, and its handle is told; a slot's state follows its checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from gockpt import errors
from gockpt.agent.handle import Handle, Stage
from gockpt.agent.protocol import (
    Adopt,
    AnyMessage,
    Captured,
    Committed,
    Consistent,
    Failed,
    Held,
    Open,
    Seal,
    Structure,
)
from gockpt.agent.shared import Shared
from gockpt.arena import SlotState
from gockpt.errors import AgentError, GockptError

log = logging.getLogger("gockpt")


@dataclass(slots=True, kw_only=True)
class Tracked:
    """A checkpoint that is not done yet."""

    handle: Handle
    slot: int
    opened: Open
    structure: Structure
    generation: int
    """Of the agent that knows of it."""
    final: bool
    """Whether nobody takes it again if it fails: then that is its end, and is told."""
    seal: Seal | None = None
    outcome: str | None = None
    captured: list[Captured] = field(default_factory=list)
    """All that the agent was told of, where nothing is replayed on it."""
    retried: bool = False
    """Whether a second agent was told the same: it may be what ends them."""

    @property
    def whole(self) -> bool:
        """Whether a new agent can finish it from what lies in the slot."""
        plain = self.opened.windows == 1 and not self.retried
        return self.seal is not None and (self.outcome is not None or plain)

    def pass_on(self) -> Adopt | None:
        """What lets another agent finish it."""
        if self.seal is None:
            return None
        self.retried = True
        return Adopt(
            opened=self.opened,
            structure=self.structure,
            seal=self.seal,
            outcome=self.outcome,
            captured=self.captured if self.outcome is None else [],
        )


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


class Ledger:
    """All of them. ``serving``, where asked for, is the generation of the agent that can be used
    now, or None."""

    def __init__(self, changed: threading.Condition, shared: Shared) -> None:
        self._changed = changed
        self._shared = shared
        self.tracked: dict[int, Tracked] = {}
        self.totals = Totals()
        self.problems: dict[int, str] = {}
        """Why the agent could not go on with a checkpoint that is still being captured."""
        self.newest_consistent = 0
        self.newest_committed = 0
        self.fatal: GockptError | None = None
        """Why there is no agent any more."""
        self.errors: list[GockptError] = []
        """What has failed and was not taken yet."""
        self._lost: tuple[int, GockptError] | None = None
        """The newest checkpoint that was lost with its agent, unless a later one is durable."""

    # -- by the training thread --------------------------------------------------------------------

    def track(self, tracked: Tracked) -> None:
        """A checkpoint begins."""
        sequence = tracked.opened.sequence
        self._shared.slots[tracked.slot].sequence = sequence
        self.tracked[sequence] = tracked
        self.totals.in_flight_max = max(self.totals.in_flight_max, len(self.tracked))

    def targeted(self, sequence: int, step: int) -> None:
        """The target has been reached."""
        if sequence in self.tracked:
            self.totals.latencies.append((step, "target", time.monotonic()))

    def confirmed(self, sequence: int) -> bool:
        """Nobody will take it again; False if it has failed before that was said."""
        tracked = self.tracked.get(sequence)
        if tracked is not None:
            tracked.final = True
        return tracked is not None

    def sealed(self, seal: Seal, serving: int | None) -> Tracked | None:
        """It is complete; return it if a new agent was told of all but this one."""
        tracked = self.tracked.get(seal.sequence)
        if tracked is None:
            return None
        tracked.seal = seal
        served = tracked.generation == serving
        if not served and not tracked.whole:
            self._lose(seal.sequence, tracked)
        if serving is None or served or not tracked.whole:
            return None
        tracked.generation = serving
        return tracked

    def drop(self, sequence: int, reason: str, serving: int | None, *, failed: bool) -> bool:
        """It will not be finished; whether it was on its way."""
        tracked = self.tracked.pop(sequence, None)
        if tracked is None:
            return False
        # The agent, if it lives, may be replaying into it at this very moment.
        served = tracked.generation == serving
        self._shared.slots[tracked.slot].state = SlotState.DROPPED if served else SlotState.FREE
        if failed:
            self._fail(tracked, AgentError(reason))
        return True

    def add_error(self, error: GockptError) -> None:
        """Something failed on the trainer's side."""
        if error is not self.fatal:
            self.totals.failed += 1
            self.errors.append(error)

    def take_errors(self, *, ending: bool) -> list[GockptError]:
        """What has failed since the last call."""
        found, self.errors = self.errors, []
        if self.fatal is not None:
            found.append(self.fatal)
        if self._lost is not None and ending:
            found.append(self._lost[1])
        return found

    # -- by the outbox and the inbox ---------------------------------------------------------------

    def remember(self, message: AnyMessage | None) -> None:
        """What is only copied, another agent can finish, if it is told the same."""
        if isinstance(message, Captured):
            tracked = self.tracked.get(message.sequence)
            if tracked is not None and tracked.opened.windows == 1:
                tracked.captured.append(message)

    def note_consistent(self, message: Consistent) -> None:
        tracked = self.tracked.get(message.sequence)
        if tracked is None:
            return
        tracked.outcome = message.outcome
        self._shared.slots[tracked.slot].state = SlotState.CONSISTENT
        self.newest_consistent = max(self.newest_consistent, message.sequence)
        step = tracked.opened.step if tracked.seal is None else tracked.seal.step
        self.totals.latencies.append((step, "consistent", time.monotonic()))
        tracked.handle.advance(Stage.CONSISTENT)

    def note_committed(self, message: Committed) -> None:
        tracked = self.tracked.pop(message.sequence, None)
        if tracked is None:
            return
        self._shared.slots[tracked.slot].state = SlotState.RETAINED
        self.newest_committed = max(self.newest_committed, message.sequence)
        if self._lost is not None and self._lost[0] < message.sequence:
            self._lost = None
        if message.slow is not None:
            log.warning("step %d: %s", message.step, message.slow)
        totals = self.totals
        totals.committed += 1
        totals.agents_lost = 0
        totals.persisted_bytes += message.nbytes
        totals.replayed += message.replayed
        totals.replay_s += message.replay_s
        totals.latencies.append((message.step, "durable", time.monotonic()))
        tracked.handle.advance(Stage.COMMITTED, step=message.step, path=Path(message.path))

    def note_failed(self, message: Failed) -> None:
        tracked = self.tracked.pop(message.sequence, None)
        for slot in self._shared.slots:
            if slot.sequence == message.sequence:
                slot.state = SlotState.FREE
        open_still = tracked is not None and not tracked.final
        if open_still and message.kind != "ProofError":
            # It can still be helped: the engine takes the same step in another way. What
            # the proof says is never helped silently.
            self.problems[message.sequence] = message.reason
        elif tracked is not None:
            self._fail(tracked, named_error(message.kind, message.reason, message))

    def _fail(self, tracked: Tracked, error: GockptError) -> None:
        error.step = tracked.handle.step
        self.totals.failed += 1
        self.errors.append(error)
        tracked.handle.advance(Stage.FAILED, error=error)

    # -- agents that come and go -------------------------------------------------------------------

    def hold(self, held: Held, generation: int) -> None:
        """What an earlier trainer's agent still has in a slot."""
        slot, pending = self._shared.slots[held.slot], held.pending
        slot.sequence = held.sequence
        slot.state = SlotState.RETAINED if pending is None else SlotState.CONSISTENT
        self.newest_consistent = max(self.newest_consistent, held.sequence)
        if pending is not None:
            handle = Handle(pending.seal.step)
            handle.advance(Stage.CONSISTENT)
            self.tracked[held.sequence] = Tracked(
                handle=handle,
                slot=held.slot,
                opened=pending.opened,
                structure=pending.structure,
                generation=generation,
                final=True,
                seal=pending.seal,
                outcome=pending.outcome,
            )

    def whole(self, generation: int) -> list[Tracked]:
        """What a new agent, of this generation, is to finish."""
        found = [tracked for tracked in self.tracked.values() if tracked.whole]
        for tracked in found:
            tracked.generation = generation
        return found

    def agent_lost(self) -> None:
        """What it had not proved is torn: replayed to no version that anybody knows."""
        self.totals.agents_lost += 1
        for sequence, tracked in list(self.tracked.items()):
            if tracked.seal is not None and not tracked.whole:
                self._lose(sequence, tracked)

    def _lose(self, sequence: int, tracked: Tracked) -> None:
        """A sealed checkpoint that its agent had not proved is lost with it."""
        del self.tracked[sequence]
        self._shared.slots[tracked.slot].state = SlotState.FREE
        step = tracked.handle.step
        error = AgentError(
            f"the agent was lost before step {step} was complete: some of its parts had been "
            "replayed, and nobody knows how far; the next checkpoint is taken when it is due"
        )
        error.step = step
        # Told by the handle and the log; raised only if no later checkpoint makes up for it.
        self._lost = (sequence, error)
        self.totals.failed += 1
        tracked.handle.advance(Stage.FAILED, error=error)
        log.warning("%s", error)
        self._changed.notify_all()

    def give_up(self, error: GockptError) -> None:
        """Nobody will hear of what is still on its way; whoever waits for it is told so."""
        for tracked in self.tracked.values():
            tracked.handle.advance(Stage.FAILED, error=error)
        self.tracked.clear()

    def note_fatal(self, error: BaseException) -> None:
        """There is no agent any more, and there will be none."""
        self.fatal = error if isinstance(error, GockptError) else AgentError(repr(error))
        self.give_up(self.fatal)
        self._changed.notify_all()


def named_error(kind: str, reason: str, failed: Failed | None = None) -> GockptError:
    """The exception that the agent named."""
    found = getattr(errors, kind, AgentError)
    if not (isinstance(found, type) and issubclass(found, GockptError)):
        found = AgentError
    if issubclass(found, errors.StorageError):
        path = None if failed is None else failed.path
        return found(reason, path=path, errno=None if failed is None else failed.errno)
    if issubclass(found, errors.ProofError):
        return found(reason, () if failed is None else failed.tensors)
    return found(reason)
