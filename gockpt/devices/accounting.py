"""Two small accounts that every device keeps: time it blocked training, and pairs it has begun."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gockpt.events import Recorder


class Blocked:
    """Host time for which the engine held up training, each second counted once.

    Holds and gates nest. The spans in the ``stall`` lane never overlap: an inner one interrupts the
    outer one, so that their sum is the total. One thread at a time may be inside.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.seconds = 0.0
        self._recorder = recorder
        self._open: list[tuple[str, int]] = []
        self._since = 0.0

    @property
    def active(self) -> bool:
        """Whether training is being held right now."""
        return bool(self._open)

    @contextmanager
    def during(self, name: str, step: int) -> Iterator[None]:
        """Count the body of a ``with`` statement as blocked."""
        self._switch()
        self._open.append((name, step))
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def _switch(self) -> None:
        """Book the time up to now to the innermost one open, and start the next stretch."""
        now = time.monotonic()
        if self._open:
            name, step = self._open[-1]
            self._recorder.add("stall", name, self._since, now, step)
            self.seconds += now - self._since
        self._since = now


class Progress:
    """How many pairs of one copy have begun, and how many may. Safe from any thread."""

    def __init__(self, total: int | None) -> None:
        """``total`` is None where the pairs are only found out later; those all go."""
        self._lock = threading.Lock()
        self._begun = 0
        self._limit = sys.maxsize if total is None else total

    def begin(self, upto: int) -> bool:
        """The link wants to begin every pair before index ``upto``; False if withdrawn."""
        with self._lock:
            if upto > self._limit:
                return False
            self._begun = upto
            return True

    def withdraw(self) -> int:
        """Let no further pair begin; return how many have."""
        with self._lock:
            self._limit = min(self._limit, self._begun)
            return self._limit
