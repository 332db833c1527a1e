"""The agent's work in hand: the checkpoints that are being replayed, proved, and written in turn.

Runs in the agent's loop; only the end of a commit is told from the thread that made it. What always
holds: what fails costs its own checkpoint and nothing else; checkpoints are written one after the
other, the oldest first; each is told once, as durable or as failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gockpt.agent.job import Job, tickets_of
from gockpt.agent.kept import Slots, directory_of
from gockpt.agent.output import Directory, Output
from gockpt.agent.proof import Verdict
from gockpt.agent.protocol import (
    Adopt,
    Captured,
    Committed,
    Consistent,
    Drop,
    Failed,
    Freed,
    Message,
    Open,
    Seal,
    Structure,
    Update,
)
from gockpt.errors import AgentError, GockptError, ProofError, StorageError
from gockpt.storage.catalog import examine
from gockpt.storage.retention import discard

log = logging.getLogger("gockpt.agent")

WRITING = 0.02
"""Seconds between two looks at a checkpoint that is being written."""


class Work:
    """All checkpoints that are not done yet."""

    def __init__(
        self,
        directory: Directory,
        slots: Slots,
        send: Callable[[Message], None],
        report: Callable[[], None],
    ) -> None:
        """
        Args:
            send: tells the trainer.
            report: tells it of the spans recorded so far; before a checkpoint is told durable.
        """
        self._directory, self._slots = directory, slots
        self._send, self._report = send, report
        self._jobs: dict[int, tuple[Job, Output]] = {}
        self._writing: list[Output] = []
        self.structure: Structure | None = None
        """That of the checkpoints to come."""

    def __len__(self) -> int:
        """How many are not durable yet."""
        return len(self._jobs) + len(self._writing)

    @property
    def busy(self) -> bool:
        """Whether something in the slots is about to change."""
        return any(job.has_work for job, _ in self._jobs.values())

    def patience(self, idle: float) -> float:
        """Seconds until there may be something to do, ``idle`` at most."""
        working = [job.busy_until for job, _ in self._jobs.values() if job.has_work]
        if working:
            return max(0.0, min(working) - time.monotonic())
        return WRITING if self._writing else idle

    # -- what the trainer says ---------------------------------------------------------------------

    def begin(self, message: Open) -> None:
        """A checkpoint begins."""
        self._open(message, self.structure)

    def _open(self, message: Open, structure: Structure | None) -> Job:
        self._slots.forget(message.slot)
        if structure is None or structure.number != message.structure:
            raise AgentError(f"the structure {message.structure} was never described")
        output = Output(self._directory)
        job = Job(
            message,
            structure,
            self._directory.hello,
            self._slots.segment(f"slot-{message.slot}"),
            self._slots.segment(f"scratch-{message.slot}"),
            self._slots.segment("ring"),
            recorder=self._directory.recorder,
            ready=output.ready,
            freed=lambda tickets: self._send(Freed(tickets=tickets)),
        )
        output.bind(job)
        self._jobs[message.sequence] = (job, output)
        return job

    def adopt(self, message: Adopt) -> None:
        """Finish what an earlier agent left complete, unless it had even committed it."""
        opened = msgspec.structs.replace(message.opened, step=message.seal.step)
        job = self._open(opened, message.structure)
        _, output = self._jobs[opened.sequence]
        if message.outcome is None:
            for captured in message.captured:
                job.captured(captured)
            job.seal(message.seal)
            discard(directory_of(self._directory.root, opened))
            return
        job.adopt(message.seal, _verdict(message.outcome))
        kept = self._slots.keep(job)
        found = examine(kept.path(self._directory.root))
        if found.problem is None:
            kept.manifest = found.manifests[0]
            del self._jobs[opened.sequence]
            self._send(_committed(job, found.path, output))
        else:
            discard(found.path)

    def go_on(self, message: Captured | Update | Seal | Drop) -> None:
        """More of a checkpoint, or its end."""
        found = self._jobs.get(message.sequence)
        if found is None:
            self._decline(message)
            return
        job, output = found
        try:
            if isinstance(message, Captured):
                job.captured(message)
            elif isinstance(message, Update):
                job.update(message)
            elif isinstance(message, Seal):
                job.seal(message)
            else:
                raise AgentError(message.reason)
        except Exception as error:  # noqa: BLE001 - this one checkpoint is lost, not the agent
            self._fail(job, output, _as_gockpt(error))

    def _decline(self, message: Captured | Update | Seal | Drop) -> None:
        """It has failed already; only its memory still matters."""
        if isinstance(message, Update) and (tickets := tickets_of(message)):
            self._send(Freed(tickets=tickets))
        if isinstance(message, Drop):
            self._send(
                Failed(sequence=message.sequence, step=0, kind="AgentError", reason="dropped")
            )

    # -- work --------------------------------------------------------------------------------------

    def turn(self) -> None:
        """A slice of work on one checkpoint; begin or end the writing of one."""
        self._work()
        self._write_in_turn()

    def _work(self) -> None:
        now = time.monotonic()
        for job, output in list(self._jobs.values()):
            if not job.has_work or job.busy_until > now:
                continue
            try:
                if job.work():
                    self._finish(job)
            except Exception as error:  # noqa: BLE001 - this one checkpoint is lost, not the agent
                self._fail(job, output, _as_gockpt(error))
            return

    def _finish(self, job: Job) -> None:
        if job.outcome is not None:
            self._slots.keep(job)
            self._send(Consistent(sequence=job.opened.sequence, outcome=job.outcome.verdict))

    def _write_in_turn(self) -> None:
        """Let the oldest checkpoint write first; the next one starts when it has ended."""
        self._writing = [output for output in self._writing if not output.join(0)]
        if self._writing:
            return
        for job, output in list(self._jobs.values()):
            if job.outcome is None and not output.wants_to_start:
                continue
            try:
                if output.wants_to_start:
                    output.start()
                if job.outcome is not None:
                    self._commit(job, output)
            except GockptError as error:
                self._fail(job, output, error)
            return

    def _commit(self, job: Job, output: Output) -> None:
        del self._jobs[job.opened.sequence]
        self._writing.append(output)

        def done(result: Path | GockptError) -> None:
            self._report()
            with self._slots.changing:
                self._slots.written(job, output.manifest)
                if isinstance(result, GockptError):
                    self._send(_failure(job, result))
                else:
                    self._send(_committed(job, result, output))

        output.finish(done)

    def _fail(self, job: Job, output: Output, error: GockptError) -> None:
        log.error("the checkpoint of step %d failed: %s", job.opened.step, error)
        self._jobs.pop(job.opened.sequence, None)
        self._slots.forget(job.opened.slot)
        output.discard()
        if tickets := job.tickets():
            self._send(Freed(tickets=tickets))
        self._send(_failure(job, error))

    def drop_incomplete(self) -> None:
        """The trainer has gone: what it has not given all of can never be finished."""
        for job, output in list(self._jobs.values()):
            if job.seal_message is None:
                self._fail(job, output, AgentError("the trainer ended before it was complete"))


def _verdict(outcome: str) -> Verdict:
    return "close" if outcome == "close" else "off" if outcome == "off" else "exact"


def _as_gockpt(error: Exception) -> GockptError:
    if isinstance(error, GockptError):
        return error
    log.error("a defect", exc_info=error)
    return AgentError(f"the agent could not go on with this checkpoint: {error!r}")


def _committed(job: Job, path: Path, output: Output) -> Committed:
    return Committed(
        sequence=job.opened.sequence,
        step=job.opened.step,
        path=str(path),
        outcome=job.outcome.verdict if job.outcome else "off",
        nbytes=output.nbytes or job.opened.header_reserve + job.layout.size,
        replayed=job.replayed,
        replay_s=job.replay_s,
        slow=output.slow,
    )


def _failure(job: Job, error: GockptError) -> Failed:
    path = error.path if isinstance(error, StorageError) else None
    return Failed(
        sequence=job.opened.sequence,
        step=job.opened.step,
        kind=type(error).__name__,
        reason=str(error),
        path=None if path is None else str(path),
        errno=error.errno if isinstance(error, StorageError) else None,
        tensors=list(error.tensors) if isinstance(error, ProofError) else [],
    )
