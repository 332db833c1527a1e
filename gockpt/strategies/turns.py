"""Who has Python's interpreter: the training thread, or those that help it.

Torch lets go of the interpreter in every operation. A thread that does many small ones gets it back
before the training thread wakes up, which then waits a whole switch interval: so that is short
while a Checkpointer is open. Where training itself waits for the engine it is the other way round:
a short interval would hand the interpreter to those whom the engine has just given work.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

SHARED = 0.0002
"""Seconds after which threads hand over the interpreter while a Checkpointer is open."""

KEPT = 0.005
"""Seconds for which the training thread keeps it, if it wants to, while the engine holds it up."""


def share() -> None:
    """Shorten the interval; whoever opened the Checkpointer puts it back."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SHARED))


@contextmanager
def kept() -> Iterator[None]:
    """Lengthen it for the body of a ``with`` statement."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(max(before, KEPT))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
