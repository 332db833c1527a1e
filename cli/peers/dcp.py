"""PyTorch's own distributed checkpoint: ``save``, and ``async_save`` with a thread or a process.

Of one rank. The writer is torch's, with its defaults; only the time of the modelled host is added.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
)

from gockpt.cli.peers.engine import Saving, State, done, place
from gockpt.cli.peers.host import Disk, Host, Link
from gockpt.cli.peers.shared import allow_many_files


class PacedWriter(FileSystemWriter):
    """torch's writer; what it writes takes the disk's time.

    From device tensors it copies ahead while it writes (``_OverlappingCpuLoader``), so link and
    disk then work at the same time.
    """

    def __init__(
        self, path: Path, disk: Disk, *, link: Link | None = None, nbytes: int = 0, step: int = 0
    ) -> None:
        """``link``: the tensors are still on the device, this many bytes."""
        super().__init__(path)
        self._disk, self._link, self._nbytes, self._step = disk, link, nbytes, step

    def write_data(self, plan: Any, planner: Any) -> Any:
        with ExitStack() as both:
            both.enter_context(self._disk.writing(Path(self.path)))
            if self._link is not None:
                both.enter_context(self._link.carrying(self._nbytes, self._step))
            return super().write_data(plan, planner)


def linked_stager(options: StagingOptions, link: Link) -> DefaultStager:
    """torch's stager; what it copies takes the link's time, on the thread that copies."""
    stager = DefaultStager(options)
    stager._stage = link.over(stager._stage)  # type: ignore[method-assign]
    return stager


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong instead of torch's collection of all ranks' errors, which is no
    ``Exception``."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise RuntimeError(f"{type(first).__name__}: {first}") from error


class Dcp:
    """``dcp.save``: training waits for copy and files."""

    in_flight = 1

    def __init__(self, directory: Path, host: Host) -> None:
        self._directory, self._host = directory, host
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def save(self, state: State, step: int) -> Saving:
        writer = PacedWriter(
            place(self._directory, step),
            self._host.disk,
            link=self._host.link,
            nbytes=state.nbytes,
            step=step,
        )
        with _plain_errors():
            state_dict_saver.save(state.whole, storage_writer=writer, no_dist=True)
        return Saving(staged=done(), saved=done())

    def poll(self) -> None:
        """Nothing must be asked."""

    def load(self, step: int, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
        with _plain_errors():
            state_dict_loader.load(into, checkpoint_id=place(self._directory, step), no_dist=True)
        return into

    def close(self) -> None:
        """Nothing is open."""


class DcpAsync(Dcp):
    """``dcp.async_save`` as it is by default: copied while training waits, written by a thread."""

    in_flight = 2

    def save(self, state: State, step: int) -> Saving:
        # What async_save makes itself if it is given none.
        stager = linked_stager(StagingOptions(False, False, False, False), self._host.link)
        self._host.link.expect(state.nbytes, step)
        saved = state_dict_saver.async_save(
            state.whole,
            storage_writer=PacedWriter(place(self._directory, step), self._host.disk),
            async_stager=stager,
            no_dist=True,
        )
        if not isinstance(saved, Future):
            raise TypeError(f"async_save returned {type(saved).__name__}, not a future")
        saved.add_done_callback(lambda _: stager.close())
        return Saving(staged=done(), saved=saved)


class DcpAsyncProcess(Dcp):
    """``dcp.async_save`` as torchtitan's ``async_with_pinned_mem`` mode has it.

    A stager kept for the whole run copies on a thread of its own behind forward and backward, into
    shared (on CUDA: pinned) memory; another process writes. One set of buffers, so a checkpoint
    must be saved before the next may be staged.
    """

    in_flight = 1

    def __init__(self, directory: Path, host: Host) -> None:
        super().__init__(directory, host)
        allow_many_files()
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # of the process that torch starts
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        cuda = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=cuda,
        )
        self._stager = linked_stager(options, host.link)

    def save(self, state: State, step: int) -> Saving:
        self._host.link.expect(state.nbytes, step)
        response = state_dict_saver.async_save(
            state.whole,
            storage_writer=PacedWriter(place(self._directory, step), self._host.disk),
            async_stager=self._stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        if not isinstance(response, AsyncSaveResponse):
            raise TypeError(f"async_save returned {type(response).__name__}, not both futures")
        return Saving(staged=response.staging_completion, saved=response.upload_completion)

    def close(self) -> None:
        self._stager.close()
        dist.destroy_process_group()
