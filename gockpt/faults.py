"""Named fault points: places where a test may make the world fail.

Nothing here acts unless a fault was armed in this very process. A point that is not armed costs one
look at an empty dictionary. Faults are plain data, so that a parent can hand them to an agent.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable

import msgspec


class Fault(msgspec.Struct, kw_only=True):
    """What happens at a point.

    ``action`` is ``kill`` (SIGKILL to this process), ``errno:NAME`` (an OSError), ``delay:SECONDS``
    or ``mark`` (nothing by itself: the code around the point asks :func:`armed` and misbehaves).
    The first ``after`` passes are let through; then it acts ``times`` times (0: for ever).
    """

    point: str
    action: str
    after: int = 0
    times: int = 1


_armed: dict[str, Fault] = {}


def arm(faults: Iterable[Fault]) -> None:
    """Arm faults in this process, replacing those of the same points."""
    for fault in faults:
        _armed[fault.point] = fault


def disarm() -> None:
    """Forget all armed faults."""
    _armed.clear()


def armed(point: str) -> bool:
    """Whether the fault of this point is due now; counts as one pass through the point."""
    if not _armed:
        return False
    fault = _armed.get(point)
    if fault is None:
        return False
    if fault.after > 0:
        fault.after -= 1
        return False
    if fault.times:
        fault.times -= 1
        if not fault.times:
            del _armed[point]
    return True


def point(name: str) -> None:
    """A place where a fault may strike.

    Raises:
        OSError: when an ``errno:NAME`` fault is due here.
    """
    if not _armed:
        return
    fault = _armed.get(name)
    if fault is None or not armed(name):
        return
    kind, _, argument = fault.action.partition(":")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "errno":
        number = getattr(errno, argument)
        raise OSError(number, os.strerror(number), name)
    elif kind == "delay":
        time.sleep(float(argument))
