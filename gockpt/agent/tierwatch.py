"""What the trainer knows of the second tier: told by the agent, warned of now and then.

Runs on the trainer's threads, under the lock of :class:`gockpt.agent.client.AgentClient`. Never
looks at the tier itself, which may hang. What always holds: trouble with the tier is a warning
while training goes on; only the end, when its newest checkpoint is not there, makes it an error.
"""

from __future__ import annotations

import logging
import time

from gockpt.agent.protocol import TierState
from gockpt.storage.tier import Tier

log = logging.getLogger("gockpt")

WARN_EVERY = 600.0
"""Seconds between two warnings of the same kind."""


class TierWatch:
    """Follows the states that the agent tells."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._moved = time.monotonic()
        self._warned = ("", 0.0)
        self.state: TierState | None = None
        """The newest that was told."""

    def note(self, state: TierState) -> None:
        """Take in what the agent tells."""
        before, self.state = self.state, state
        if before is None or (before.copied, before.sequence) != (state.copied, state.sequence):
            self._moved = time.monotonic()
        if state.kind is not None:
            self._warn(state.kind, state)
        elif before is not None and before.kind is not None:
            self._warned = ("", 0.0)
            log.info("the tier %s can be used again", self._tier.path)

    def ending(self) -> None:
        """From now on somebody waits for it: its patience begins anew."""
        self._moved = time.monotonic()

    def holds(self, sequence: int) -> bool:
        """Whether it has this checkpoint or a later one, and lacks nothing."""
        return self.state is not None and self.state.sequence >= sequence and not self.state.lacking

    @property
    def stuck(self) -> bool:
        """Whether it has made no progress for too long."""
        return time.monotonic() - self._moved > self._tier.patience

    @property
    def trouble(self) -> tuple[str, str]:
        """Class of :mod:`gockpt.errors`, and a line: why it does not have the newest checkpoint."""
        state = self.state
        what = f"the newest checkpoint did not reach the tier {self._tier.path}"
        if state is None:
            return "StorageError", f"{what}: it has not answered; is its file system hung?"
        if state.kind is not None:
            return state.kind, f"{what}: {state.reason}"
        has = f"it has step {state.step}" if state.sequence else "it has none"
        return "StorageError", f"{what} in time ({has}); is its file system slow or hung?"

    def _warn(self, kind: str, state: TierState) -> None:
        now = time.monotonic()
        before, at = self._warned
        if before == kind and now - at < WARN_EVERY:
            return
        self._warned = (kind, now)
        log.warning(
            "the tier %s is not being filled, the newest there is step %d: %s (%s)",
            self._tier.path, state.step, state.reason, kind,
        )  # fmt: skip
