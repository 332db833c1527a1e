"""torch_checkpointing: its ``CheckpointManager``, saving asynchronously.

It stages on a thread of its own into shared (on CUDA: pinned) memory, behind forward and backward,
and writes in another process. One set of buffers, so a checkpoint must be saved before the next may
be staged.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import (
    LocalFileSystemStorage,
    LocalFileSystemStorageConfig,
    WriteStream,
)

from gockpt.cli.peers.engine import Saving, State, place
from gockpt.cli.peers.host import Host
from gockpt.cli.peers.shared import allow_many_files
from gockpt.pace import Pacer

_STATE, _REST = "state", "rest"


class PacedStream(WriteStream):
    """A file of the engine's; every write takes the disk's time."""

    def __init__(self, path: Path, pacer: Pacer, use_direct_io: bool) -> None:
        super().__init__(path, "wb", use_direct_io)
        self._pacer = pacer

    def write(self, data: Any) -> int:
        self._pacer.take(memoryview(data).nbytes)
        return int(super().write(data))


class PacedStorage(LocalFileSystemStorage):
    """The engine's storage, over the modelled disk. Lives in the engine's own process."""

    def __init__(self, config: PacedStorageConfig) -> None:
        super().__init__(config)
        self._pacer = Pacer(config.rate)

    def stream_write(self, path: Path) -> PacedStream:
        return PacedStream(path, self._pacer, self._use_direct_io)


@dataclass
class PacedStorageConfig(LocalFileSystemStorageConfig):
    """Sent to the engine's process."""

    rate: float = 0.0

    def create_storage(self) -> PacedStorage:
        return PacedStorage(self)


class TorchCheckpointing:
    """The manager's defaults, but for what they need CUDA for and for direct writes, which fail."""

    in_flight = 1

    def __init__(self, directory: Path, host: Host) -> None:
        allow_many_files()
        self._directory = directory
        cuda = torch.cuda.is_available()
        staging = CheckpointStagerConfig(
            use_pinned_memory=cuda, use_non_blocking_copy=cuda, use_shared_memory=True
        )
        rate = host.disk.rate
        storage = (
            LocalFileSystemStorageConfig(use_direct_io=False)
            if rate is None
            else PacedStorageConfig(use_direct_io=False, rate=rate)
        )
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging), storage_config=storage
            )
        )
        stager = self._manager._saver.stager
        self._link = host.link
        stager._stage = host.link.over(stager._stage)

    def save(self, state: State, step: int) -> Saving:
        self._link.expect(state.nbytes, step)
        payload = {_STATE: dict(state.tensors), _REST: dict(state.objects)}
        saved = self._manager.save(str(place(self._directory, step)), payload)
        staged: Future[Any] | None = self._manager._staging_future
        if saved is None or staged is None:
            raise TypeError("its save returned no futures, as if it were synchronous")
        return Saving(staged=staged, saved=saved)

    def poll(self) -> None:
        """Nothing must be asked."""

    def load(self, step: int, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
        found = self._manager.load(str(place(self._directory, step)), {_STATE: into})
        tensors: Mapping[str, Tensor] = found[_STATE]
        return tensors

    def close(self) -> None:
        self._manager.close()
