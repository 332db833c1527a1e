"""torchsnapshot: ``Snapshot.async_take``, as its documentation has it.

It stages everything while training waits, writing what is staged already; the rest is written by a
thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from torchsnapshot import Snapshot, StateDict

from gockpt.cli.peers.engine import Saving, State, done, place
from gockpt.cli.peers.host import Host

_KEY = "state"


class TorchSnapshot:
    """Each snapshot has buffers of its own."""

    in_flight = 2

    def __init__(self, directory: Path, host: Host) -> None:
        self._directory, self._host = directory, host
        self._finishing = ThreadPoolExecutor(self.in_flight, "torchsnapshot-wait")

    def save(self, state: State, step: int) -> Saving:
        path, began = place(self._directory, step), time.monotonic()
        with self._host.link.carrying(state.nbytes, step):
            pending = Snapshot.async_take(str(path), {_KEY: StateDict(**state.whole)})
        saved = self._finishing.submit(self._finish, pending, path, began)
        return Saving(staged=done(), saved=saved)

    def _finish(self, pending: Any, path: Path, began: float) -> None:
        pending.wait()
        self._host.disk.wrote(path, began)

    def poll(self) -> None:
        """Nothing must be asked."""

    def load(self, step: int, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
        target = StateDict(**into)
        Snapshot(str(place(self._directory, step))).restore({_KEY: target})
        return {name: target[name] for name in into}

    def close(self) -> None:
        self._finishing.shutdown()
