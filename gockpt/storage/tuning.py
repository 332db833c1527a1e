"""How to write at a directory, found out from the writes that are made anyway.

Two things are asked: how many writes to keep in flight, and whether to make them straight from the
slot or through a stage, a small piece of memory in huge pages which the bytes are copied to. A disk
is given the pages of a slot one by one, and where the kernel has only small ones for shared memory
that may cost more than the copy, which is in the processor's cache and hashed there.

Pure but for a lock: the writer's threads report each write that has ended, and are told how many
there may be from now on. What always holds: only stretches in which further writes were waiting
are measured, so that a slot which fills slowly is not taken for a slow disk; and nothing is written
for the sake of measuring.

The number doubles while the rate grows by a tenth, and stays at the best one; then the other way is
tried with that number, and must be better by as much. When the rate has changed since (another
load, a drive whose cache is full), the search begins anew.
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


class Tuning:
    """How one directory is written; kept from one checkpoint to the next.

    Attributes:
        depth: writes in flight.
        staged: whether they go through a stage.
        rate: bytes per second of what was settled on; None while searching.
    """

    depth: int
    staged: bool
    rate: float | None
    _turned: bool
    _best_rate: float

    def __init__(self, first: int = FIRST, most: int = MOST) -> None:
        """``first`` in flight to begin with and at most ``most``; if equal it never changes."""
        self._first, self._most = first, most
        self._lock = threading.Lock()
        self._search()
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
            return self.depth

    def _restart(self) -> None:
        self._count = self._nbytes = 0
        self._since = 0.0

    def _sample(self, nbytes: int, when: float) -> float | None:
        """The rate of a sample, when one is complete."""
        self._count += 1
        if self._count <= self.depth:  # those were begun before
            self._since = when
            return None
        self._nbytes += nbytes
        seconds = when - self._since
        if self._count < 3 * self.depth or seconds < _SECONDS:
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
            self._best, self._best_rate, self._poor = (self.depth, self.staged), rate, 0
            if self.depth < self._most and not self._turned:
                self.depth = min(2 * self.depth, self._most)
                return
        else:
            self._poor += 1
            if self._poor < _SAMPLES:
                return
        self._settle()

    def _settle(self) -> None:
        """Go back to the best so far, and try the other way if that has not been done."""
        (self.depth, self.staged), self._poor = self._best, 0
        if self._turned:
            self.rate = self._best_rate
        else:
            self.staged, self._turned = not self.staged, True

    def _search(self) -> None:
        self.depth, self.staged, self._turned = self._first, True, False
        self._best, self._best_rate = (self.depth, self.staged), 0.0
        self.rate, self._poor = None, 0  # samples in a row that speak against what is tried
