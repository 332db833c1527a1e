"""Trust: whether several windows may be used, or something in the loop speaks against it.

Runs on the training thread. What always holds: what breaks the assumptions of multi-step capture
costs it some passes in which nothing of the kind happens, before it is used again; what only the
proof could see costs it for good, as a second try would cost another checkpoint.
"""

from __future__ import annotations

import logging

from gockpt.strategies.guard import Guard

log = logging.getLogger("gockpt")

QUIET_PASSES = 3
"""Passes without a violation, beyond one interval, after which several windows are tried again."""


class Trust:
    """Watches the loop, with a guard for each optimizer."""

    def __init__(self, interval: int | None) -> None:
        self.reason: str | None = None
        """Why checkpoints are taken in one window for the time being, or None."""
        self.exposed = False
        """Whether the loop changes the state between two passes: then no window may stay open."""
        self.guards: dict[int, Guard] = {}
        self._patience = QUIET_PASSES + (interval or 0)
        self._quiet = 0
        self._for_good = False

    def watch(self, guards: dict[int, Guard]) -> None:
        """Note what stands now as right, and watch it from here on."""
        for guard in guards.values():
            guard.note()
        self.guards = guards

    def unwatch(self) -> None:
        """No window is open; watch on only where there is a cause that may end."""
        if self.reason is None:
            self.guards = {}

    def updated(self, index: int) -> None:
        """An optimizer has made its update."""
        if index in self.guards and not self.guards[index].still:
            self.guards[index].note()

    def changed(self, *, thorough: bool) -> str | None:
        """What was changed outside of updates since the last look, or None.

        Args:
            thorough: also ask the guards that can as well be asked later.
        """
        found: str | None = None
        for guard in self.guards.values():
            if guard.still and not thorough:
                continue
            reason = guard.change()
            if reason is not None:
                found = found or reason
                guard.note()
        if found is not None:
            self._quiet, self.exposed = 0, True
        return found

    def lose(self, reason: str, *, cured: bool = False, for_good: bool = False) -> None:
        """Use one window for the time being.

        Args:
            cured: what was wrong will not happen again, so the next pass may try anew.
            for_good: never try again.
        """
        self.reason = reason
        self._quiet = self._patience if cured else 0
        self._for_good = self._for_good or for_good

    def pass_ended(self) -> None:
        """One more pass; trust comes back if nothing has happened for long enough."""
        if self.reason is None or self._for_good:
            return
        self._quiet += 1
        if self._quiet > self._patience:
            log.info("several windows are tried again (what spoke against it: %s)", self.reason)
            self.reason, self.exposed, self.guards = None, False, {}
