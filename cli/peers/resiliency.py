"""nvidia-resiliency-ext: ``TorchAsyncCheckpoint``, its asynchronous ``torch.save``.

It copies everything to the host while training waits, and a process that it keeps writes the file.
It must be asked whether that is done. Of CUDA it takes two things for granted that an emulated
accelerator has not: that ``.to("cpu")`` copies, and ``torch.cuda.synchronize``. Both are put in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt import torch_ckpt
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from gockpt.cli.peers.engine import Saving, State, done, place
from gockpt.cli.peers.host import Disk, Host
from gockpt.cli.peers.shared import allow_many_files


def paced_save(disk: Disk, state: Any, path: Path) -> None:
    """What the engine's process does, over the modelled disk."""
    with disk.writing(path):
        torch.save(state, path)


class Resiliency:
    """Every checkpoint has buffers of its own."""

    in_flight = 2

    def __init__(self, directory: Path, host: Host) -> None:
        allow_many_files()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self._directory, self._host = directory, host
        self._engine = torch_ckpt.TorchAsyncCheckpoint()
        torch_ckpt.TorchAsyncCheckpoint.async_fn = partial(paced_save, host.disk)
        self._open: deque[Future[None]] = deque()

    def save(self, state: State, step: int) -> Saving:
        self._host.link.expect(state.nbytes, step)
        with self._copying(next(iter(state.tensors.values())).is_cpu):
            self._engine.async_save(state.whole, place(self._directory, step))
        self._open.append(Future())
        return Saving(staged=done(), saved=self._open[-1])

    def poll(self) -> None:
        """It finishes checkpoints in the order in which they began."""
        self._engine.finalize_async_save(blocking=False, no_dist=True)
        left = self._engine._async_calls_queue.get_num_unfinalized_calls()
        while len(self._open) > left:
            self._open.popleft().set_result(None)

    def load(self, step: int, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
        found = torch.load(place(self._directory, step), map_location="cpu", weights_only=True)
        return {name: found[name] for name in into if name in found}

    def close(self) -> None:
        self._engine.finalize_async_save(blocking=True, no_dist=True, terminate=True)
        dist.destroy_process_group()

    @contextmanager
    def _copying(self, without_cuda: bool) -> Iterator[None]:
        """Its copying goes over the link; and it finds what it takes for granted of CUDA."""
        copy = _copied if without_cuda else torch_ckpt.preload_tensors
        with ExitStack() as stack:
            linked = self._host.link.over(copy)
            stack.enter_context(mock.patch.object(torch_ckpt, "preload_tensors", linked))
            if without_cuda:
                stack.enter_context(mock.patch.object(torch.cuda, "synchronize"))
            yield


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
    }
