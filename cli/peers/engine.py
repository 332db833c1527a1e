"""What the bench asks of somebody else's engine, and no more than that.

All of it is called on the training thread, between two passes of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

REHEARSAL = 0
"""The step under which a checkpoint is made and removed before anything is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a checkpoint of now holds: the training's own tensors, not copies of them."""

    tensors: Mapping[str, Tensor]
    """By the names that the golden run gives them; detached, on the training's device."""
    objects: Mapping[str, Any]
    """Everything else: scheduler, data position, RNG; plain Python values."""

    @property
    def whole(self) -> dict[str, Any]:
        """Both in one dictionary, as people hand their state to such engines."""
        return {**self.tensors, **self.objects}

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def empty(self) -> dict[str, Tensor]:
        """Host tensors to load a checkpoint into, filled with what no checkpoint holds."""
        return {
            name: torch.full_like(tensor, -77, device="cpu")
            for name, tensor in self.tensors.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A checkpoint on its way."""

    staged: Future[Any]
    """Done when the training may change its tensors again. Raises what went wrong."""
    saved: Future[Any]
    """Done when the engine says that the checkpoint is saved. Raises what went wrong."""


class Engine(Protocol):
    """An engine over one directory. Made with a directory and a :class:`.host.Host`."""

    in_flight: int
    """The most checkpoints that it may have open at once."""

    def save(self, state: State, step: int) -> Saving:
        """Begin a checkpoint. However long this takes, training waits for it."""
        ...

    def poll(self) -> None:
        """Called in every pass: for an engine that must be asked whether it has finished."""
        ...

    def load(self, step: int, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint, read by the engine's own reader; may use ``into``."""
        ...

    def close(self) -> None:
        """End its threads and processes; nothing is open."""
        ...


def done() -> Future[None]:
    """A future of what has already happened."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def place(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies, whatever the engine makes there: a directory or file."""
    return directory / f"step-{step:09d}"


def size(path: Path) -> int:
    """Bytes of all files in there."""
    if path.is_file():
        return path.stat().st_size
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
