"""The guard: notices when something other than the optimizer changes what is being captured.

Multi-step capture assumes that parameters and optimizer state change only inside
``optimizer.step()``. The guard takes note of each tensor's identity, address and version counter
when it is known to be right, and compares later. What torch does not count (writes through
``.data``, foreign kernels) is found by the proof instead.

Runs on the training thread, only while windows are open: about 0.1 µs a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gockpt.inventory import LiveParam


class Guard:
    """Watches the parameters of one optimizer with their state."""

    def __init__(self, params: Sequence[LiveParam]) -> None:
        self._params = params
        self._tensors: list[Tensor] = []
        self._names: list[str] = []
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._state: list[tuple[dict[str, object], str, Tensor]] = []
        self._dicts: list[tuple[LiveParam, dict[str, object]]] = []

    def note(self) -> None:
        """What stands now is right."""
        self._tensors = [live.param for live in self._params]
        self._names = [live.name for live in self._params]
        self._dicts = [(live, state) for live in self._params if (state := live.state)]
        self._state = [
            (state, key, value)
            for _, state in self._dicts
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]
        self._tensors += [value for _, _, value in self._state]
        self._versions = [tensor._version for tensor in self._tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def change(self) -> str | None:
        """What has changed since :meth:`note`, or None."""
        if not self._tensors:
            return None
        if [tensor._version for tensor in self._tensors] != self._versions:
            return f"{self._first_difference()} was changed outside of optimizer.step()"
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            return "the memory of a parameter was replaced outside of optimizer.step()"
        if any(state.get(key) is not value for state, key, value in self._state):
            return "optimizer state was replaced outside of optimizer.step()"
        if any(live.state is not state for live, state in self._dicts):
            return "optimizer state was replaced outside of optimizer.step()"
        return None

    def _first_difference(self) -> str:
        for index, tensor in enumerate(self._tensors):
            if tensor._version != self._versions[index]:
                if index < len(self._names):
                    return f"{self._names[index]!r}"
                return f"optimizer state {self._state[index - len(self._names)][1]!r}"
        return "a parameter"
