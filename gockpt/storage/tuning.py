"""How many writes to keep in flight at a directory, found out from the writes that are made anyway.

Pure but for a lock: the writer's threads report each write that has ended, and are told how many
there may be from now on. What always holds: only stretches in which further writes were waiting
are measured, so that a slot which fills slowly is not taken for a slow disk; and nothing is written
for the sake of measuring.

The number doubles while the rate grows by a tenth, and stays at the best one. When the rate has
changed since (another load, a drive whose cache is full), the search begins anew.
"""

from __future__ import annotations

import threading

FIRST = 2
"""Writes in flight to begin with: one extent is hashed while another one is written."""

MOST = 16

_GROWTH = 1.1
"""Ratio of rates from which more writes in flight are worth their threads."""

_CHANGE = 0.7
"""Ratio of rates from which a disk counts as another one."""

_SAMPLES = 2
"""Samples that must agree: other users of a disk spoil one now and then."""

_SECONDS = 0.02
"""Shortest sample."""


class Depth:
    """Writes in flight at one directory; kept from one checkpoint to the next."""

    def __init__(self, first: int = FIRST, most: int = MOST) -> None:
        """``first`` to begin with and at most ``most``; where they are equal it never changes."""
        self.now = first
        self.rate: float | None = None
        """Bytes per second of the number that was settled on; None while searching."""
        self._first, self._most = first, most
        self._lock = threading.Lock()
        self._best, self._best_rate = first, 0.0
        self._poor = 0  # samples in a row that speak for another number
        self._restart()

    def ended(self, nbytes: int, when: float, *, more: bool) -> int:
        """A write has ended; return how many may be in flight from now on.

        Args:
            when: seconds on a monotonic clock.
            more: whether a further write was waiting for its turn, else the disk was not busy.
        """
        with self._lock:
            if not more:
                self._restart()
            elif (rate := self._sample(nbytes, when)) is not None:
                self._judge(rate)
            return self.now

    def _restart(self) -> None:
        self._count = self._nbytes = 0
        self._since = 0.0

    def _sample(self, nbytes: int, when: float) -> float | None:
        """The rate of a sample, when one is complete."""
        self._count += 1
        if self._count <= self.now:  # those were begun before
            self._since = when
            return None
        self._nbytes += nbytes
        seconds = when - self._since
        if self._count < 3 * self.now or seconds < _SECONDS:
            return None
        rate = self._nbytes / seconds
        self._restart()
        return rate

    def _judge(self, rate: float) -> None:
        if self.rate is None:
            self._climb(rate)
        elif _CHANGE < rate / self.rate < 1 / _CHANGE:
            self._poor = 0
        else:
            self._poor += 1
            if self._poor == _SAMPLES:
                self._search()

    def _climb(self, rate: float) -> None:
        if rate > _GROWTH * self._best_rate:
            self._best, self._best_rate, self._poor = self.now, rate, 0
            if self.now < self._most:
                self.now = min(2 * self.now, self._most)
            else:
                self._settle()
            return
        self._poor += 1
        if self._poor == _SAMPLES:
            self._settle()

    def _settle(self) -> None:
        self.now, self.rate, self._poor = self._best, self._best_rate, 0

    def _search(self) -> None:
        self.now, self.rate, self._poor = self._first, None, 0
        self._best, self._best_rate = self._first, 0.0
