"""Stop signals: SIGTERM and its like as a note of the time, for a loop that looks at it.

Python runs the handler on the main thread, between two instructions of whatever that does just now.
So it takes no lock, writes no log and touches no checkpoint. What always holds:

- The handler that was there before is called too, at the first signal. It is put back by
  :meth:`StopSignals.close`. The default action, which would end the process, is what is held back.
- Launchers often send a signal twice (a scheduler to every process, and ``torchrun`` once more).
  Repetitions within :data:`REPEATED` seconds count as one; a later one acts as if nobody listened.
- A forked child (a data worker) has its signals as they were before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from gockpt.errors import ConfigError

log = logging.getLogger("gockpt")

REPEATED = 2.0
"""Seconds within which further signals are the first one, sent again."""

_NOT_TO_CATCH = ("SIGKILL", "SIGSTOP")

_listening: list[StopSignals] = []
"""Those whose handlers are in place, in the order in which they came."""


class StopSignals:
    """Notes the first of some signals."""

    def __init__(self, names: Sequence[str]) -> None:
        """
        Raises:
            ConfigError: a name is not that of a signal that can be handled.
        """
        self.received: float | None = None
        """``time.monotonic()`` of the first signal, or None."""
        self.name = ""
        """Which one it was."""
        self.numbers = list(dict.fromkeys(map(_number, names)))
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._closed = True

    def listen(self) -> None:
        """Take the signals over, where that is possible (on the main thread)."""
        self._closed = False
        for number in self.numbers:
            before = signal.getsignal(number)
            name = signal.Signals(number).name
            if before is None or before == signal.SIG_IGN:
                why = "ignored" if before else "handled outside of Python"
                log.info("%s is %s, and stays so: it does not stop the training", name, why)
                continue
            try:
                signal.signal(number, self._handle)
            except ValueError:
                log.info("not on the main thread: %s will not stop the training", name)
                continue
            self._before[number] = before
        _listening.append(self)

    def close(self) -> None:
        """Put back what was there before; a handler that somebody has built upon passes on."""
        self._closed = True
        if self in _listening:
            _listening.remove(self)
        for number in self._before:
            top = found = signal.getsignal(number)
            while isinstance(one := getattr(found, "__self__", None), StopSignals) and one._closed:
                found = one._before[number]
            if found is not top:
                with contextlib.suppress(ValueError):  # not on the main thread
                    signal.signal(number, found)

    def just_received(self) -> bool:
        """Whether the first signal is so new that others are its repetitions."""
        return self.received is not None and time.monotonic() - self.received <= REPEATED

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._closed or os.getpid() != self._process:
            self._as_before(number, frame)
        elif self.received is None:
            self.name, self.received = signal.Signals(number).name, time.monotonic()
            if (before := self._chained(number)) is not None:
                before(number, frame)
        elif not self.just_received():
            self._as_before(number, frame)

    def _chained(self, number: int) -> Callable[[int, FrameType | None], Any] | None:
        before = self._before[number]
        return before if callable(before) and before is not signal.default_int_handler else None

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif not any(one.just_received() for one in _listening):
            signal.signal(number, before)
            os.kill(os.getpid(), number)


def _number(name: str) -> signal.Signals:
    found = signal.Signals.__members__.get(name)
    if found is None or name in _NOT_TO_CATCH:
        raise ConfigError(f"stop_signals: {name!r} cannot be handled; name some like 'SIGTERM'")
    return found


_masks = threading.local()


def _before_fork() -> None:
    # Python forgets what a child has received before it is ready: hold that back until it is.
    numbers = {number for one in _listening for number in one.numbers}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    """It dies of these signals as it would without us."""
    for one in reversed(list(_listening)):
        one.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
