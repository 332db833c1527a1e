"""How long a disk was busy, whatever else its writers waited for."""

from __future__ import annotations

import threading
import time


class Busy:
    """Seconds for which at least one thread was inside of its ``with`` statement."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._since = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """So far; a stretch counts once it has ended."""
        with self._lock:
            return self._seconds

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = time.monotonic()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._seconds += time.monotonic() - self._since
