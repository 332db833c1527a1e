"""The agent's sign of life, once a second, from a thread of its own.

The agent's loop also makes directories and files and deletes them, and a disk may hang in any of
these calls; an agent that only waits for its disk must not be taken for dead. The rule: there is a
sign of life for as long as the loop comes round, or is in a file call, whatever that takes. A
process that was stopped gives none, nor does one whose loop hangs in anything else. Beside it goes
the file call that has been under way for longest, of whatever thread: the trainer says which disk
does not answer (:mod:`gockpt.agent.diskwatch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gockpt.agent.protocol import Alive
from gockpt.storage import underway

EVERY = 1.0
"""Seconds between two signs of life."""

STOP_WAIT = 1.0
"""Seconds that the thread may take to end: it may be held up by a trainer that was stopped."""


class Pulse:
    """Watches the loop on whose thread it is made, and tells of it while used as a context."""

    def __init__(self, tell: Callable[[Alive], None]) -> None:
        """
        Args:
            tell: called on the pulse's thread; raises nothing.
        """
        self._tell = tell
        self._loop = threading.get_ident()
        self._turns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gockpt-agent-pulse", daemon=True)

    def turn(self) -> None:
        """The loop has come round (called by the loop)."""
        self._turns += 1

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(STOP_WAIT)

    def _run(self) -> None:
        seen = -1
        while not self._stop.wait(EVERY):
            turns = self._turns
            if turns != seen or underway.of(self._loop) is not None:
                seen = turns
                self._tell(_alive())


def _alive() -> Alive:
    call = underway.oldest()
    return Alive() if call is None else Alive(path=str(call.path), seconds=call.seconds)
