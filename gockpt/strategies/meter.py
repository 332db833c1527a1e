"""What the plan is made from, measured while training runs: moving averages of the phases and
rates.

Runs on the training thread; costs two clock readings a pass.
"""

from __future__ import annotations

import time

WEIGHT = 0.3
"""Of the newest value in a moving average."""

FORWARD_SHARE = 1 / 3
"""Of forward and backward together: a backward does twice the arithmetic of its forward."""


class Average:
    """An exponential moving average; None before the first value."""

    def __init__(self, value: float | None = None) -> None:
        self.value = value

    def add(self, value: float) -> None:
        """Take in a new value."""
        self.value = value if self.value is None else self.value + WEIGHT * (value - self.value)


class Meter:
    """Times of a pass, less what the engine itself held it up."""

    def __init__(self, *, link_rate: float, replay_rate: float) -> None:
        self.window = Average()
        """Seconds from the end of a pass to its first update."""
        self.update = Average()
        """Seconds from the first update to the end of the last."""
        self.link = Average(link_rate)
        """Bytes a second to the host inside windows."""
        self.replay = Average(replay_rate)
        """Parameter updates a second."""
        self.proof = Average(0.0)
        """Seconds that the device reads for the proof of one checkpoint."""
        self.passes = 0
        self._mark = 0.0
        self._held = 0.0

    def pass_ended(self, held: float, *, resting: bool) -> None:
        """A pass has ended.

        Args:
            held: total time blocked so far.
            resting: the next pass is not measured.
        """
        self._mark, self._held = 0.0 if resting else time.monotonic(), held

    def update_begins(self, held: float) -> None:
        """The first update of a pass is about to be made."""
        now = time.monotonic()
        if self._mark:
            self.window.add(max(1e-6, now - self._mark - (held - self._held)))
            self.passes += 1
        self._mark, self._held = now, held

    def update_ended(self, held: float) -> None:
        """The last update of a pass (so far) has been made."""
        now = time.monotonic()
        if self._mark:
            self.update.add(max(1e-6, now - self._mark - (held - self._held)))

    @property
    def known(self) -> bool:
        """Whether there is enough to plan with."""
        return self.passes >= 2 and self.update.value is not None
