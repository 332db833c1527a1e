"""What the trainer says of a disk that does not answer.

Runs on the trainer's inbox thread. What always holds: one warning for each path, until the agent
waits for no disk any more; training goes on, and so does the agent, which is not replaced for it.
"""

from __future__ import annotations

import logging

from gockpt.agent.protocol import Alive

log = logging.getLogger("gockpt")

PATIENCE = 10.0
"""Seconds that one file call may take before it is told."""


class DiskWatch:
    """Follows what the agent's signs of life say of its file calls."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, alive: Alive) -> None:
        """Take in a sign of life."""
        if alive.path is None or alive.seconds < PATIENCE:
            if self._told:
                log.info("the disk answers again (%s)", ", ".join(sorted(self._told)))
                self._told.clear()
        elif alive.path not in self._told:
            self._told.add(alive.path)
            log.warning(
                "the disk does not answer: a call on %s was begun %.0f s ago; training goes on, "
                "what needs this disk waits",
                alive.path,
                alive.seconds,
            )
