"""``torch.save`` of everything to a new file, as most training scripts do it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gockpt.cli.peers.engine import Saving, State, done, place
from gockpt.cli.peers.host import Host


class TorchSave:
    """Training waits for the copy and for the file."""

    in_flight = 1

    def __init__(self, directory: Path, host: Host) -> None:
        self._directory, self._host = directory, host

    def save(self, state: State, step: int) -> Saving:
        path = place(self._directory, step)
        # torch copies a tensor's storage to the host and writes it, then the next: no overlap.
        with self._host.link.carrying(state.nbytes, step):
            """On the host itself there is nothing to copy."""
        with self._host.disk.writing(path):
            torch.save(state.whole, path)
        return Saving(staged=done(), saved=done())

    def poll(self) -> None:
        """Nothing is ever open."""

    def load(self, step: int, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
        found = torch.load(place(self._directory, step), map_location="cpu", weights_only=True)
        return {name: found[name] for name in into if name in found}

    def close(self) -> None:
        """Nothing is open."""
