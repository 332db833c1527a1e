"""The parent's side of a bench worker: start it, hear it, watch its memory, end it.

Runs in the parent; one thread per worker only reads its lines. What always holds: when
:meth:`Worker.results` has ended, for whatever reason, neither the worker nor its agent runs.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from gockpt.cli import memory
from gockpt.cli.bench_job import AnyMessage, Failed, Golden, Job, Measured, Progress
from gockpt.errors import AgentError

TICK = 0.25
"""Seconds between two looks at a worker's memory."""

SILENT = 900.0
"""Seconds without a word after which a worker is given up."""


class Worker:
    """A worker process with one job. Used in a ``with`` statement."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.peak = memory.Peak()
        directory = Path(job.directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._errors = directory / "worker.log"
        with self._errors.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gockpt.cli.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the parent, which ends the worker itself
            )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="bench-worker", daemon=True)
        self._reader.start()

    def messages(self) -> Iterator[AnyMessage | None]:
        """What the worker says, and None now and then in between; ends with its result.

        Raises:
            AgentError: it ended without one, or has been silent for too long.
        """
        self._send(self.job)
        heard = time.monotonic()
        watch = True
        while True:
            if watch:
                self.peak.sample(self._process.pid)
            line = self._next_line()
            if line is None:
                if time.monotonic() - heard > SILENT:
                    raise AgentError(f"the worker was silent for {SILENT:.0f} s; {self._tail()}")
                yield None
                continue
            heard = time.monotonic()
            message = msgspec.json.decode(line, type=AnyMessage)
            # Verifying reads whole checkpoints into memory: no longer what the strategy takes.
            watch = not (isinstance(message, Progress) and message.stage == "verifying") and watch
            yield message
            if isinstance(message, Golden | Measured | Failed):
                return

    def _next_line(self) -> bytes | None:
        try:
            line = self._lines.get(timeout=TICK)
        except queue.Empty:
            return None
        if line is None:
            raise AgentError(f"the worker ended without a result; {self._tail()}")
        return line

    def _send(self, job: Job) -> None:
        if self._process.stdin is None:
            raise AgentError("the worker has no stdin")
        try:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise AgentError(f"the worker did not start; {self._tail()}") from error

    def _read(self) -> None:
        if self._process.stdout is not None:
            with self._process.stdout as lines:
                for line in lines:
                    self._lines.put(line)
        self._lines.put(None)

    def _tail(self) -> str:
        """The last lines that it wrote to stderr."""
        lines = self._errors.read_bytes()[-4096:].decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-3:]) or "it said nothing"

    def close(self) -> None:
        """End the worker and its agent, at once if they have not ended by themselves."""
        agents = _handles(memory.children(self._process.pid))
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        for agent in agents:
            if agent.is_running():
                agent.kill()
        psutil.wait_procs(agents, timeout=30)
        self._reader.join(5)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _handles(pids: list[int]) -> list[psutil.Process]:
    """The processes of these numbers, each told apart from a later one of the same number."""
    found = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found
