"""DLRover's flash checkpoint: ``DdpCheckpointer``, without its launcher.

Training waits while the state is copied into shared memory; a process that it forks writes it. One
buffer, and a save that comes while it is being written is skipped, so that must be waited for.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from dlrover.python.common.constants import CheckpointConstant, NodeEnv
from dlrover.python.common.multi_process import SOCKET_TMP_DIR
from dlrover.python.common.serialize import ClassMeta
from dlrover.python.common.storage import PosixDiskStorage
from dlrover.trainer.torch.flash_checkpoint import ddp
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from torch import Tensor

from gockpt.cli.peers.engine import Saving, State, done, place
from gockpt.cli.peers.host import Disk, Host

_LOOK_S = 0.005
"""Seconds between two looks at the file in which it says what is saved."""

_DEADLINE_S = 600.0


class PacedStorage(PosixDiskStorage):
    """Its storage, over the modelled disk. Lives in the process that it forks."""

    def __init__(self, rate: float | None = None) -> None:
        super().__init__()
        self._rate, self._disk = rate, Disk(rate)

    def write_state_dict(
        self, state_dict: Any, path: str, write_func: Callable[[Any, str], None] | None = None
    ) -> None:
        with self._disk.writing(Path(path)):
            super().write_state_dict(state_dict, path, write_func)

    def get_class_meta(self) -> ClassMeta:
        meta: ClassMeta = super().get_class_meta()
        meta.kwargs = {"rate": self._rate}
        return meta


class Dlrover:
    """Its steps are one more than ours: it takes a step 0 for none at all."""

    in_flight = 1

    def __init__(self, directory: Path, host: Host) -> None:
        self._name = f"gockpt-{os.getpid()}"
        os.environ[NodeEnv.TORCHELASTIC_RUN_ID] = self._name  # in the names of all that it shares
        self._directory, self._host = directory, host
        self._tracker = directory / CheckpointConstant.TRACER_FILE_NAME
        storage = PacedStorage(host.disk.rate)
        with mock.patch.object(ddp, "get_checkpoint_storage", return_value=storage):
            self._engine = ddp.DdpCheckpointer(str(directory))
        memory = self._engine._engine._shm_handler
        memory.save_state_dict = host.link.over(memory.save_state_dict)
        self._watching = ThreadPoolExecutor(1, "dlrover-wait")

    def save(self, state: State, step: int) -> Saving:
        path = str(place(self._directory, step))
        self._host.link.expect(state.nbytes, step)
        self._engine.save_checkpoint(step + 1, state.whole, path, StorageType.DISK)
        if self._engine._engine.latest_step != step + 1:
            raise RuntimeError(f"it skipped the checkpoint of step {step}")
        return Saving(staged=done(), saved=self._watching.submit(self._watch, step + 1))

    def _watch(self, number: int) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not (self._tracker.exists() and self._tracker.read_text() == str(number)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"its step {number} was not saved in {_DEADLINE_S:.0f} s")
            time.sleep(_LOOK_S)

    def poll(self) -> None:
        """Nothing must be asked."""

    def load(self, step: int, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
        # Its own load would answer from memory, with the newest step only; this is how it reads a
        # file, but for weights_only.
        found = torch.load(place(self._directory, step), map_location="cpu", weights_only=True)
        return {name: found[name] for name in into if name in found}

    def close(self) -> None:
        self._watching.shutdown()
        engine = self._engine._engine
        engine._shm_handler.unlink()
        engine.close()
        if engine.saver_proc is not None:
            engine.saver_proc.terminate()
            engine.saver_proc.join()
        shutil.rmtree(Path(SOCKET_TMP_DIR) / self._name, ignore_errors=True)
        with suppress(OSError):  # other jobs may have sockets there
            Path(SOCKET_TMP_DIR).rmdir()
