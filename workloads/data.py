"""Text as byte tokens, and a loader whose position is two integers. Runs on the training thread.

What always holds: the batch at a position depends on the seed, the text and the batch's shape
alone; every chunk of the text is seen once an epoch; a loader resumes at any position in O(1).
"""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gockpt.errors import ConfigError, StateError

LIBRARY_BYTES = 4 << 20
"""How much of the standard library's source is read: enough for any run of the harness."""


def library_text() -> bytes:
    """Source of Python's standard library: a text that is there on every machine.

    Its top-level modules in the order of their names, so it changes only with Python itself.
    """
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= LIBRARY_BYTES:
            break
    return bytes(text[:LIBRARY_BYTES])


def read_text(path: str | Path | None = None) -> bytes:
    """The bytes of a file, or of the standard library's sources if there is no ``path``.

    Raises:
        ConfigError: the file is missing, unreadable or empty.
    """
    if path is None:
        text = library_text()
        if not text:
            raise ConfigError("this Python has no library sources to train on; give a text file")
        return text
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ConfigError(f"data file {str(path)!r}: {reason}; give a readable file") from error
    if not text:
        raise ConfigError(f"data file {str(path)!r} is empty; give a file with text")
    return text


class Loader:
    """Batches of (inputs, targets), each int64 of shape (rows, length), without end.

    The text is cut into chunks of ``length`` + 1 bytes. An epoch visits all of them, in a walk with
    a start and a stride drawn from the seed and the epoch's number. ``position`` counts the batches
    that were handed out.
    """

    def __init__(
        self,
        text: bytes,
        *,
        rows: int,
        length: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows, self.length, self.seed = rows, length, seed
        self.device = torch.device(device)
        self.position = 0
        self.chunks = len(text) // (length + 1)
        if not self.chunks:
            raise ConfigError(
                f"the data has {len(text)} bytes but one sequence needs {length + 1}; "
                f"give a longer text"
            )
        usable = bytearray(text[: self.chunks * (length + 1)])  # frombuffer wants it writable
        self._text = torch.frombuffer(usable, dtype=torch.uint8).view(self.chunks, length + 1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        first = self.position * self.rows
        picked = [self._chunk(first + row) for row in range(self.rows)]
        self.position += 1
        batch = self._text[picked].to(self.device, torch.int64)
        return batch[:, :-1], batch[:, 1:]

    def _chunk(self, index: int) -> int:
        """Which chunk is the ``index``-th ever seen."""
        epoch, index = divmod(index, self.chunks)
        draw = random.Random(f"{self.seed}/{epoch}")  # its own generator: the global one stays
        start, stride = draw.randrange(self.chunks), draw.randrange(self.chunks)
        while math.gcd(stride, self.chunks) != 1:
            stride += 1
        return (start + index * stride) % self.chunks

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the last batch that was handed out.

        Raises:
            StateError: the position is one in another text, batch shape or seed.
        """
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise StateError(
                    f"the data position was saved with {key} {state.get(key)!r} and this run has "
                    f"{mine!r}; resume with the same data, seed and batch"
                )
        self.position = int(state["position"])

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "rows": self.rows,
            "length": self.length,
            "chunks": self.chunks,
        }
