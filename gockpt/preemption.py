"""Preemption: what a stop signal makes of a training loop and its checkpoints.

Runs on the training thread. What always holds: once :attr:`Preemption.should_stop` is set, the pass
that has just ended is safe on the disk, or the grace time is over, or its checkpoint has failed;
and a log line has said which of them it was. So a loop that ends when it is set loses no pass.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

from gockpt.agent.client import AgentClient
from gockpt.errors import ConfigError, GockptError
from gockpt.signals import StopSignals
from gockpt.storage import scan

log = logging.getLogger("gockpt")


class Preemption:
    """The stop signals of one training loop, and what has become of them."""

    def __init__(self, signals: Sequence[str], grace: float) -> None:
        """
        Args:
            grace: seconds from the signal until training must have ended.

        Raises:
            ConfigError: no such signals, or no such time.
        """
        if isinstance(signals, str):
            raise ConfigError(f"stop_signals must be a tuple of names: ({signals!r},)")
        if not (isinstance(grace, int | float) and math.isfinite(grace) and grace >= 0):
            raise ConfigError(f"grace must be a number of seconds, not {grace!r}")
        self.signals = StopSignals(signals)
        self.should_stop = False
        self._grace = grace

    @property
    def pending(self) -> bool:
        """Whether a signal came that no checkpoint has followed yet."""
        return self.signals.received is not None and not self.should_stop

    @property
    def deadline(self) -> float | None:
        """When the grace time ends (``time.monotonic()``); None if no signal came."""
        received = self.signals.received
        return None if received is None else received + self._grace

    def patience(self, usual: float) -> float:
        """For how many seconds to wait where it would be ``usual`` without a signal."""
        deadline = self.deadline
        return usual if deadline is None else max(0.0, min(usual, deadline - time.monotonic()))

    def settle(self, client: AgentClient, root: Path, step: int) -> None:
        """The state of ``step`` was handed to the agent: wait for it, then let the loop stop."""
        with contextlib.suppress(GockptError):  # too late, or no agent: told below
            client.wait_for(client.drained, self.patience(math.inf), "the last checkpoint")
        self.should_stop = True
        newest = next((one.step for one in scan(root) if one.problem is None), None)
        if newest == step:
            log.warning("stopped by %s at step %d, checkpoint committed", self.signals.name, step)
            return
        log.warning(
            "stopped by %s at step %d, but its checkpoint %s; %s",
            self.signals.name,
            step,
            "failed" if client.drained() else f"needs more than the {self._grace:g} s of grace",
            "there is no older one" if newest is None else f"the newest one is of step {newest}",
        )
