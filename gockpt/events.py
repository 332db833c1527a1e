"""Spans and counters: what happened when, for the timeline and the figures.

A recorder belongs to one process and may be written from any of its threads. All times are
``time.monotonic()`` seconds, which Linux keeps common to all processes of a machine, so that the
spans of a trainer and of its agent lie on one axis.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of work in a lane (``compute``, ``state``, ``gradients``, ``stall``, …)."""

    lane: str
    name: str
    start: float
    end: float
    step: int


class Recorder:
    """Collects spans and counters; the oldest spans are dropped beyond ``limit``."""

    def __init__(self, *, limit: int = 1_000_000) -> None:
        self._spans: list[Span] = []
        self._counters: dict[str, float] = {}
        self._limit = limit
        self._lock = threading.Lock()

    def add(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        """Record a span that has ended."""
        with self._lock:
            if len(self._spans) >= self._limit:
                del self._spans[: self._limit // 10]
                self._counters["spans_dropped"] = (
                    self._counters.get("spans_dropped", 0) + self._limit // 10
                )
            self._spans.append(Span(lane=lane, name=name, start=start, end=end, step=step))

    @contextmanager
    def span(self, lane: str, name: str, step: int) -> Iterator[None]:
        """Record the body of a ``with`` statement as a span."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(lane, name, start, time.monotonic(), step)

    def count(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to a counter."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def extend(self, spans: list[Span]) -> None:
        """Take over spans that another process recorded."""
        for span in spans:
            self.add(span.lane, span.name, span.start, span.end, span.step)

    def drain(self) -> list[Span]:
        """Return all spans recorded so far and forget them."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    @property
    def counters(self) -> dict[str, float]:
        """A copy of the counters."""
        with self._lock:
            return dict(self._counters)
