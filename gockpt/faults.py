"""Named fault points: places where a test may make the world fail.

Nothing here acts unless a fault was armed in this very process. A point that is not armed costs one
look at an empty list. Faults are plain data, so that a parent can hand them to an agent; any
thread may pass a point. docs/architecture.md lists the points.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec


class Fault(msgspec.Struct, kw_only=True):
    """What happens at a point.

    ``action`` is ``kill`` (SIGKILL to this process), ``stop`` (SIGSTOP to it, so that somebody else
    decides what happens at this very point), ``errno:NAME`` (an OSError), ``delay:SECONDS`` or
    ``mark`` (nothing by itself: the code around the point asks :func:`armed` and misbehaves).
    The first ``after`` passes are let through; then it acts ``times`` times (0: for ever). Only
    passes whose path matches the glob ``match`` count (``*`` also takes slashes; none: all do), so
    that one of several files, volumes or tiers can be hit.
    """

    point: str
    action: str
    after: int = 0
    times: int = 1
    match: str | None = None

    def meets(self, point: str, path: Path | None) -> bool:
        """Whether a pass through ``point``, on ``path``, counts."""
        if self.point != point:
            return False
        return self.match is None or (path is not None and fnmatchcase(str(path), self.match))


_armed: list[Fault] = []
_counting = threading.Lock()


def arm(faults: Iterable[Fault]) -> None:
    """Arm faults in this process, replacing those of the same points and globs."""
    with _counting:
        for fault in faults:
            same = (fault.point, fault.match)
            _armed[:] = [one for one in _armed if (one.point, one.match) != same]
            _armed.append(fault)


def disarm() -> None:
    """Forget all armed faults."""
    with _counting:
        _armed.clear()


def armed(point: str, path: Path | None = None) -> bool:
    """Whether a fault of this point is due now; counts as one pass through the point."""
    return _due(point, path) is not None


def point(name: str, path: Path | None = None) -> None:
    """A place where a fault may strike.

    Args:
        path: the file or directory that is at stake, if there is one.

    Raises:
        OSError: when an ``errno:NAME`` fault is due here.
    """
    fault = _due(name, path)
    if fault is None:
        return
    kind, _, argument = fault.action.partition(":")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "errno":
        number = getattr(errno, argument)
        raise OSError(number, os.strerror(number), name)
    elif kind == "delay":
        time.sleep(float(argument))


def _due(point: str, path: Path | None) -> Fault | None:
    """The first fault that strikes at this pass; every one that it meets counts it."""
    if not _armed:
        return None
    with _counting:
        due = [fault for fault in list(_armed) if fault.meets(point, path) and _strikes(fault)]
    return due[0] if due else None


def _strikes(fault: Fault) -> bool:
    if fault.after > 0:
        fault.after -= 1
        return False
    if fault.times == 1:
        _armed.remove(fault)
    fault.times = max(0, fault.times - 1)
    return True
