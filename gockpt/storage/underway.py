"""File calls that are under way, so that one that does not return can be told, by its path.

Every thread that makes calls through :mod:`gockpt.storage.fs` notes them here; any other thread may
look. What always holds: a thread has one call under way at most, and looking waits for nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Call:
    """One that has begun and not returned."""

    path: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """For how long it has been under way."""
        return time.monotonic() - self.began


_calls: dict[int, Call] = {}


@contextmanager
def noted(path: Path) -> Iterator[None]:
    """This thread makes a call on ``path``."""
    thread = threading.get_ident()
    _calls[thread] = Call(path)
    try:
        yield
    finally:
        del _calls[thread]


def of(thread: int) -> Call | None:
    """The call that the thread of this ident is in."""
    return _calls.get(thread)


def oldest() -> Call | None:
    """The one of this process that has been under way for longest."""
    return min(list(_calls.values()), key=lambda call: call.began, default=None)
