"""The parent's side of one life of a trainer: start it, hear it, see it stop or die.

Runs in the parent, on its main thread. Trainers are forked from a server that has imported torch
once, so that a trial takes seconds. What always holds: when a :class:`Life` was closed, its trainer
does not run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait

import msgspec

from gockpt.cli.crash_job import AnyMessage, Broke, Ended, Job, Made, Pass, Ready, Stepped
from gockpt.cli.crash_leftovers import Mark, stopped
from gockpt.errors import AgentError

START_TIMEOUT = 120.0
"""Seconds until a trainer must have its state."""

SILENT = 60.0
"""Seconds without a pass after which a trainer hangs, where no hang was made."""

_LOOK = 0.003

_forks = multiprocessing.get_context("forkserver")
# (The first optimizer that is made imports torch._dynamo.)
_forks.set_forkserver_preload(["gockpt.cli.crash_child", "torch._dynamo"])


class Life:
    """A trainer from its start to its end."""

    def __init__(self, job: Job, mark: Mark) -> None:
        self.job = job
        self.mark = mark
        self.ready: Ready | None = None
        self._made: list[Pass] = []
        self.stepped: list[Stepped] = []
        self.ended: Ended | None = None
        self.broke: Broke | None = None
        self.durable: set[int] = set()
        """Steps whose checkpoints it was told to be durable."""
        self.agents: list[int] = []
        self.died_at: float | None = None
        self._heard = time.monotonic()
        self.began_at = time.time()
        self._ours, theirs = _forks.Pipe()
        from gockpt.cli.crash_child import main

        self._process = _forks.Process(
            target=main, args=(msgspec.json.encode(job), theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def over(self) -> bool:
        """Whether the process has ended."""
        return self.died_at is not None

    @property
    def passes(self) -> list[Pass]:
        """All that it computed; it may have died before the last one's step had ended."""
        return self._made

    @property
    def step(self) -> int:
        """The last step that was completed."""
        if self.stepped:
            return self.stepped[-1].step
        return (self.ready.restored or 0) if self.ready else 0

    @property
    def failed(self) -> int:
        """Checkpoints that failed."""
        if self.ended is not None:
            return self.ended.failed
        return self.stepped[-1].failed if self.stepped else 0

    def silent(self) -> float:
        """Seconds since it said something."""
        return time.monotonic() - self._heard

    def poll(self, timeout: float) -> None:
        """Hear what it says within ``timeout`` seconds, or that it has ended."""
        if self.over:
            return
        found = wait([self._ours, self._process.sentinel], timeout)
        self._hear()
        if self._process.sentinel in found:
            self._hear()  # what it said last
            self._process.join()
            self.died_at = time.time()

    def _hear(self) -> None:
        with suppress(EOFError, ConnectionResetError):
            while self._ours.poll():
                self._take(msgspec.json.decode(self._ours.recv_bytes(), type=AnyMessage))

    def _take(self, message: AnyMessage) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Ready):
            self.ready = message
            self.agents = [one.pid for one in self.mark.processes() if one.pid != self.pid]
        elif isinstance(message, Made):
            self._made.append(message.made)
        elif isinstance(message, Stepped):
            self.stepped.append(message)
            self.durable.update(message.durable)
        elif isinstance(message, Ended):
            self.ended = message
            self.durable.update(message.durable)
        else:
            self.broke = message

    def until(self, reached: Callable[[], bool], timeout: float) -> bool:
        """Wait until ``reached``; False if it has ended before.

        Raises:
            AgentError: it says nothing for too long, or ``timeout`` seconds have passed.
        """
        deadline = time.monotonic() + timeout
        while not reached():
            if self.over:
                return False
            limit = SILENT if self.ready else START_TIMEOUT
            if time.monotonic() > deadline or self.silent() > limit:
                raise AgentError(f"the trainer says nothing since step {self.step}")
            self.poll(_LOOK)
        return True

    def until_over(self, timeout: float) -> None:
        """Wait until the process has ended.

        Raises:
            AgentError: it does not.
        """
        self.until(lambda: self.over, timeout)

    def stopped_pid(self) -> int | None:
        """Which of trainer and agents stands still at a point, if one does."""
        return next((pid for pid in (self.pid, *self.agents) if stopped(pid)), None)

    def send(self, number: signal.Signals) -> None:
        """Send the trainer a signal."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def send_agents(self, number: signal.Signals) -> None:
        """Send its agents a signal."""
        for pid in self.agents:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End the process, if it has not ended by itself."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(30)
        self.died_at = self.died_at or time.time()
        self._ours.close()
