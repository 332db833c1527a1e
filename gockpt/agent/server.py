"""The agent: owns the slots' later life — replay, proof, writing, commit, deletion.

Runs as a process of its own (``python -m gockpt.agent``) or as a thread of the trainer; the loop is
the same. It never touches the accelerator. When its trainer has gone it finishes the checkpoints
that are complete, drops the others, and leaves.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path

import msgspec

from gockpt import faults
from gockpt.agent.channel import Channel, ChannelClosed
from gockpt.agent.job import Job, last_ticket
from gockpt.agent.output import Directory, Output
from gockpt.agent.proof import Verdict
from gockpt.agent.protocol import (
    PROTOCOL,
    Adopt,
    AnyMessage,
    Attach,
    Bye,
    Captured,
    Committed,
    Consistent,
    Drop,
    Failed,
    Freed,
    Hello,
    Message,
    Open,
    Protect,
    Ready,
    Recorded,
    Refused,
    Seal,
    Structure,
    Update,
)
from gockpt.arena import Segment
from gockpt.errors import AgentError, GockptError, StorageError
from gockpt.events import Recorder
from gockpt.pace import Pacer
from gockpt.storage.catalog import examine, next_sequence
from gockpt.storage.lock import Lock
from gockpt.storage.names import CheckpointName
from gockpt.storage.retention import collect_leftovers, discard

log = logging.getLogger("gockpt.agent")

IDLE = 0.2
"""Seconds between two looks at the world when there is nothing to do."""

HELLO_TIMEOUT = 60.0
"""Seconds that a trainer may take to introduce itself."""

REPORT_EVERY = 0.25
"""Seconds between two reports of spans."""


class Agent:
    """Serves one trainer over one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._segments: dict[str, Segment] = {}
        self._jobs: dict[int, tuple[Job, Output]] = {}
        self._writing: list[Output] = []
        self._structure: Structure | None = None
        self._recorder = Recorder()
        self._reported = 0.0
        self._leaving = False
        self._trainer_gone = False

    def run(self) -> None:
        """Serve until the trainer says good-bye or is gone, then finish what is complete."""
        hello = self._await_hello()
        if hello is None:
            return
        try:
            lock = self._take_directory(hello)
        except GockptError as error:
            self._send(Refused(kind=type(error).__name__, reason=str(error)))
            return
        try:
            self._serve()
        except Exception:
            # The trainer learns of it by the closed channel; the reason stands in the log.
            log.exception("the agent failed")
            raise
        finally:
            lock.release()
            self._report(force=True)
            self._channel.close()

    def _await_hello(self) -> Hello | None:
        try:
            received = self._channel.receive(HELLO_TIMEOUT)
        except ChannelClosed:
            return None
        if received is None or not isinstance(received[0], Hello):
            return None
        hello = received[0]
        if hello.protocol != PROTOCOL:
            reason = f"the trainer speaks protocol {hello.protocol}, this agent {PROTOCOL}"
            self._send(Refused(kind="AgentError", reason=reason))
            return None
        return hello

    def _take_directory(self, hello: Hello) -> Lock:
        faults.arm(hello.faults)
        root = Path(hello.directory)
        payload = {"pid": os.getpid(), "host": socket.gethostname(), "launch": hello.launch_id}
        lock = Lock.acquire(root, hello.rank, payload)
        try:
            for path in collect_leftovers(root, hello.launch_id):
                log.info("deleted %s, left behind by an earlier launch", path.name)
            self._hello = hello
            pacer = None if hello.pace.write is None else Pacer(hello.pace.write)
            self._directory = Directory(hello, lock, self._recorder, pacer, set())
            self._send(Ready(pid=os.getpid(), next_sequence=next_sequence(root)))
        except BaseException:
            lock.release()
            raise
        return lock

    # -- the loop ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not (self._leaving and not self._jobs and not self._writing):
            self._take_messages()
            self._work()
            self._write_in_turn()
            self._report()
            if self._leaving:
                self._drop_incomplete()

    def _take_messages(self) -> None:
        """Handle everything that has come; wait a little if there is nothing to do."""
        timeout = self._patience()
        while not self._trainer_gone:
            try:
                received = self._channel.receive(timeout)
            except ChannelClosed:
                log.info("the trainer has gone; finishing what is complete")
                self._trainer_gone = self._leaving = True
                return
            if received is None:
                return
            self._handle(*received)
            timeout = 0.0
        time.sleep(timeout)

    def _patience(self) -> float:
        now = time.monotonic()
        working = [job.busy_until for job, _ in self._jobs.values() if job.has_work]
        if working:
            return max(0.0, min(working) - now)
        return 0.02 if self._writing else IDLE

    def _handle(self, message: AnyMessage, segment: Segment | None) -> None:
        if isinstance(message, Attach):
            if segment is not None:
                self._segments[message.name] = segment
        elif isinstance(message, Structure):
            self._structure = message
        elif isinstance(message, Open):
            self._open(message, self._structure)
        elif isinstance(message, Adopt):
            self._adopt(message)
        elif isinstance(message, Protect):
            self._directory.protect.add(Path(message.path))
        elif isinstance(message, Bye):
            self._leaving = True
        elif isinstance(message, Captured | Update | Seal | Drop):
            self._for_job(message)

    def _open(self, message: Open, structure: Structure | None) -> Job:
        if structure is None or structure.number != message.structure:
            raise AgentError(f"the structure {message.structure} was never described")
        output = Output(self._directory)
        job = Job(
            message,
            structure,
            self._hello,
            self._segments[f"slot-{message.slot}"],
            self._segments[f"scratch-{message.slot}"],
            self._segments["ring"],
            recorder=self._recorder,
            ready=output.ready,
            freed=lambda ticket: self._send(Freed(ticket=ticket)),
        )
        output.bind(job)
        self._jobs[message.sequence] = (job, output)
        return job

    def _adopt(self, message: Adopt) -> None:
        """Write what an earlier agent had proved, unless it had even committed it."""
        opened = msgspec.structs.replace(message.opened, step=message.seal.step)
        name = CheckpointName(
            step=opened.step, sequence=opened.sequence, launch=opened.launch_id[:8]
        )
        path = self._directory.root / str(name)
        job = self._open(opened, message.structure)
        job.adopt(message.seal, _verdict(message.outcome))
        if examine(path).problem is None:
            del self._jobs[opened.sequence]
            self._send(_committed(job, path))
        else:
            discard(path)

    def _for_job(self, message: Captured | Update | Seal | Drop) -> None:
        found = self._jobs.get(message.sequence)
        if found is None:
            # It has failed already; only its memory still matters.
            if isinstance(message, Update) and (ticket := last_ticket(message)):
                self._send(Freed(ticket=ticket))
            if isinstance(message, Drop):
                self._send(
                    Failed(sequence=message.sequence, step=0, kind="AgentError", reason="dropped")
                )
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

    def _work(self) -> None:
        now = time.monotonic()
        for job, output in list(self._jobs.values()):
            if not job.has_work or job.busy_until > now:
                continue
            try:
                if job.work():
                    self._finish(job, output)
            except Exception as error:  # noqa: BLE001 - this one checkpoint is lost, not the agent
                self._fail(job, output, _as_gockpt(error))
            return

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

    def _finish(self, job: Job, output: Output) -> None:
        if job.outcome is not None:
            self._send(Consistent(sequence=job.opened.sequence, outcome=job.outcome.verdict))

    def _commit(self, job: Job, output: Output) -> None:
        del self._jobs[job.opened.sequence]
        self._writing.append(output)

        def done(result: Path | GockptError) -> None:
            if isinstance(result, GockptError):
                self._send(_failure(job, result))
                return
            self._report(force=True)
            self._send(_committed(job, result))

        output.finish(done)

    def _fail(self, job: Job, output: Output, error: GockptError) -> None:
        log.error("the checkpoint of step %d failed: %s", job.opened.step, error)
        self._jobs.pop(job.opened.sequence, None)
        output.discard()
        for ticket in job.tickets():
            self._send(Freed(ticket=ticket))
        self._send(_failure(job, error))

    def _drop_incomplete(self) -> None:
        for job, output in list(self._jobs.values()):
            if job.seal_message is None:
                self._fail(job, output, AgentError("the trainer ended before it was complete"))

    # -- talking -----------------------------------------------------------------------------------

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._reported > REPORT_EVERY:
            self._reported = now
            if spans := self._recorder.drain():
                self._send(Recorded(spans=spans))

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)  # type: ignore[arg-type]
        except ChannelClosed:
            # The trainer's death is noticed by the loop; what is complete is finished for it.
            log.debug("nobody to tell: %r", message)


def _verdict(outcome: str) -> Verdict:
    return "close" if outcome == "close" else "off" if outcome == "off" else "exact"


def _as_gockpt(error: Exception) -> GockptError:
    if isinstance(error, GockptError):
        return error
    log.error("a defect", exc_info=error)
    return AgentError(f"the agent could not go on with this checkpoint: {error!r}")


def _committed(job: Job, path: Path) -> Committed:
    return Committed(
        sequence=job.opened.sequence,
        step=job.opened.step,
        path=str(path),
        outcome=job.outcome.verdict if job.outcome else "off",
        nbytes=job.opened.header_reserve + job.layout.size,
        replayed=job.replayed,
        replay_s=job.replay_s,
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
    )
