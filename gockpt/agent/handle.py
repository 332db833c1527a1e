"""The future of one checkpoint, as the user and the engine see it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from gockpt.errors import GockptError


class Stage(IntEnum):
    """How far a checkpoint has come."""

    FILLING = 0
    CONSISTENT = 1
    COMMITTED = 2
    FAILED = 3


class Handle:
    """One checkpoint on its way. Any thread may wait for it."""

    def __init__(self, step: int, *, before_wait: Callable[[], None] | None = None) -> None:
        self._step = step
        self._before_wait = before_wait
        self._stage = Stage.FILLING
        self._error: GockptError | None = None
        self._path: Path | None = None
        self._changed = threading.Condition()

    @property
    def step(self) -> int:
        """The step that it holds."""
        return self._step

    @property
    def path(self) -> Path | None:
        """Its directory, once it is durable."""
        return self._path

    @property
    def stage(self) -> Stage:
        """How far it has come."""
        return self._stage

    def done(self) -> bool:
        """Whether it is durable, or has failed."""
        return self._stage >= Stage.COMMITTED

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until it is durable and return its directory.

        Raises:
            TimeoutError: it was neither durable nor failed after ``timeout`` seconds.
            GockptError: it failed; what kind says why.
        """
        if self._before_wait is not None and not self.done():
            self._before_wait()
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError(f"the checkpoint of step {self._step} is not durable yet")
        if self._error is not None:
            raise self._error
        if self._path is None:
            raise GockptError(f"the checkpoint of step {self._step} has no directory")
        return self._path

    def advance(
        self,
        stage: Stage,
        *,
        step: int | None = None,
        path: Path | None = None,
        error: GockptError | None = None,
    ) -> None:
        """Move on to ``stage`` (for the engine; a checkpoint that is done never moves again)."""
        with self._changed:
            if self.done():
                return
            self._stage = stage
            self._step = self._step if step is None else step
            self._path = path
            self._error = error
            self._changed.notify_all()

    @property
    def error(self) -> GockptError | None:
        """Why it failed, or None."""
        return self._error
