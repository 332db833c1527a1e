"""One file as ``torch.save`` writes it, that ``torch.load(weights_only=True)`` reads.

That reader knows tensors and plain containers only. So in the user's objects and the generators
numpy's arrays become tensors, numpy's numbers Python's, and the rarer containers lists and
dictionaries (:func:`plain`). Model and optimizer state are as torch's own ``state_dict()``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from gockpt.cli.sink import new_file
from gockpt.contents import Contents

_KEPT = (type(None), bool, int, float, complex, str, bytes, Tensor, torch.Size, torch.dtype,
         torch.device)  # fmt: skip


def whole_state(contents: Contents, read: Callable[[str], Tensor], *, only: str) -> dict[str, Any]:
    """What is saved: the model's state dict (``only="model"``), or all of the checkpoint."""
    model = contents.model_state(read)
    if only == "model":
        return {name: plain(value) for name, value in model.items()}
    state: dict[str, Any] = {
        "model": {name: plain(value) for name, value in model.items()},
        "optimizer": plain(one_or_all(contents.optimizer_states(read))),
        "extras": plain(contents.checkpoint.objects()),
        "step": contents.checkpoint.step,
    }
    masters = contents.masters(read)
    return {**state, "master": masters} if masters else state


def one_or_all(states: Mapping[str, Any]) -> Any:
    """The state of the only optimizer, or those of several by their keys."""
    return next(iter(states.values())) if len(states) == 1 else dict(states)


def write_file(state: Mapping[str, Any], path: Path, tick: Callable[[int], object]) -> None:
    """Write ``state`` durably with ``torch.save``.

    Raises:
        StorageError: it cannot be written.
    """
    with new_file(path, tick) as sink:
        torch.save(state, cast(IO[bytes], sink))


def plain(value: Any) -> Any:
    """The value in types that ``torch.load(weights_only=True)`` knows, as near as they come."""
    kind = type(value)
    if kind in _KEPT:
        return value
    if isinstance(value, np.ndarray):
        return _plain_array(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind in (Counter, OrderedDict):
        return kind({plain(key): plain(item) for key, item in value.items()})
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if kind in (tuple, list):
        return kind(plain(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return {plain(item) for item in value}
    if isinstance(value, (deque, range)):
        return [plain(item) for item in value]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _plain_array(value: np.ndarray[Any, Any]) -> Any:
    try:
        return torch.from_numpy(value.copy())
    except TypeError:  # texts, and numbers that torch does not have
        return value.tolist()
