"""Pacing: doing real work no faster than a modelled rate, or no longer at a time than is polite.

The emulated accelerator uses it for its link, the agent for the modelled replay and SSD rates.
Where no rate is modelled there is no pacer, so real machines run at full speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

UNHURRIED = 0.002
"""Seconds that :func:`gently` may pause for where nobody waits for the result."""


class Pacer:
    """Holds one stream of work to a rate, without drifting over many small pieces.

    A stream that was idle starts afresh: unused time is never saved up for later. But a turn that
    is booked a little late (the owner woke up late) still begins where the last one ended, so that
    many small turns do not add their lateness up. Threads may share a stream: its turns are taken
    one behind the other, whoever takes them.
    """

    LATE = 0.005
    """Seconds that count as a late wake-up, not as idleness."""

    def __init__(self, rate: float) -> None:
        """``rate`` in units (bytes, elements) per second."""
        self.rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def book(self, amount: float, rate: float | None = None) -> float:
        """Take the stream's next turn for ``amount`` units; return when it will have ended."""
        with self._lock:
            start = max(self._free_at, time.monotonic() - self.LATE)
            self._free_at = start + amount / (self.rate if rate is None else rate)
            return self._free_at

    def take(self, amount: float) -> None:
        """Book ``amount`` units and sleep until they would have been done."""
        sleep_until(self.book(amount))


def sleep_until(when: float) -> None:
    """Sleep until ``time.monotonic()`` reaches ``when``."""
    while (rest := when - time.monotonic()) > 0:
        time.sleep(rest)


def gently(items: Iterable[T], *, pause: float = 0.0, every: int = 8) -> Iterator[T]:
    """Iterate on a background thread, giving the interpreter away after ``every`` items.

    Where there is no hurry, a pause of milliseconds lets the training thread make many
    steps in between instead of one. On the main thread it is a plain iteration.
    """
    alone = threading.current_thread() is threading.main_thread()
    for number, item in enumerate(items):
        if number % every == every - 1 and not alone:
            time.sleep(pause)
        yield item
