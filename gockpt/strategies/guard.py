"""The guard: notices when something other than the optimizer changes what is being captured.

Multi-step capture assumes that parameters and optimizer state change only inside
``optimizer.step()``. The guard takes note of each tensor's version counter when they are known to
be right, and compares later. What torch does not count (writes through ``.data``,
foreign kernels) is found by the proof instead.

Runs on the training thread, only while windows are open: about 0.1 µs a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

_version = attrgetter("_version")


class Guard:
    """Watches parameters that one optimizer updates, and their state."""

    def __init__(
        self, params: Sequence[tuple[str, Tensor]], state: Sequence[Tensor], *, still: bool
    ) -> None:
        """
        Args:
            still: the optimizer's own updates do not move the counters (fused kernels): then what
                was noted stays right, and a look at the last moment sees all that went before.
        """
        self.still = still
        self._names = [name for name, _ in params]
        self._tensors = [*(tensor for _, tensor in params), *state]
        self.note()

    def note(self) -> None:
        """What stands now is right."""
        # Built by map and not by a comprehension: this runs four times a pass over every tensor.
        self._versions = list(map(_version, self._tensors))

    def change(self) -> str | None:
        """What has changed since :meth:`note`, or None; looks at the counters only."""
        versions = list(map(_version, self._tensors))
        if versions != self._versions:
            name = self._first(versions, self._versions)
            return f"{name} was changed outside of its optimizer"
        return None

    def _first(self, one: list[int], two: list[int]) -> str:
        for name, a, b in zip(self._names, one, two, strict=False):
            if a != b:
                return repr(name)
        return "optimizer state"
