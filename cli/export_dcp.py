"""A directory as ``torch.distributed.checkpoint.save`` writes it, made by one process.

Keys are those of ``{"model": …, "optimizer": …}`` with the two state dicts of
``torch.distributed.checkpoint.state_dict.get_state_dict``: the optimizer's parameters are called by
name. A tensor is read from the checkpoint when it is to be written. The user's objects, the
generators and the step are one entry each, ``extras.<name>`` and ``step``.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from gockpt.cli.export_torch import one_or_all, plain
from gockpt.cli.sink import Sink, new_file
from gockpt.contents import Contents
from gockpt.state import torch_dtype
from gockpt.storage import Checkpoint, fs


def write_directory(
    contents: Contents,
    directory: Path,
    tick: Callable[[int], object],
    *,
    only: str,
    one_file: bool,
) -> None:
    """Write the model's state (``only="model"``) or all of a checkpoint.

    Args:
        one_file: all tensors in one file, which torch holds in memory until it is written; else
            one file for each.

    Raises:
        StorageError: something cannot be written, or a tensor cannot be read.
    """
    planner = _Planner(contents.checkpoint)
    state: dict[str, Any] = {"model": contents.model_state(planner.stand)}
    if only == "all":
        states = contents.optimizer_states(planner.stand, by_name=True)
        state["optimizer"] = one_or_all(states)
        state["step"] = contents.checkpoint.step
        planner.objects = plain(contents.checkpoint.objects())
        masters = contents.masters(planner.stand)
        if masters:
            state["master"] = masters
    writer = FileSystemWriter(directory, single_file_per_rank=one_file, thread_count=1)
    writer.fs = _Files(tick)
    with _their_errors(directory), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is meant
        save(state, storage_writer=writer, planner=planner, no_dist=True)
    fs.fsync_dir(directory)


class _Planner(DefaultSavePlanner):
    """The default plan, made of stand-ins without memory; their tensors are read when written."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.objects: dict[str, Any] = {}
        self._checkpoint = checkpoint
        self._stands: dict[int, tuple[Tensor, str]] = {}

    def stand(self, name: str) -> Tensor:
        """What stands for the tensor of this name."""
        record = self._checkpoint.record(name)
        made = torch.empty(record.shape, dtype=torch_dtype(record.dtype), device="meta")
        self._stands[id(made)] = (made, name)
        return made

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        for name, value in self.objects.items():  # whole: taken apart, keys would become texts
            self.state_dict[f"extras.{name}"] = value
            self.mappings[f"extras.{name}"] = ("extras", name)

    def create_local_plan(self) -> SavePlan:
        """In the order in which the tensors lie in the checkpoint, to read it once."""
        plan = super().create_local_plan()
        names = [name for _, name in self._stands.values()]
        place = {name: number for number, name in enumerate(self._checkpoint.in_file_order(names))}

        def number(item: WriteItem) -> int:
            found = super(_Planner, self).lookup_object(item.index)
            return place[self._stands[id(found)][1]] if id(found) in self._stands else -1

        self.plan: SavePlan = dataclasses.replace(plan, items=sorted(plan.items, key=number))
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if id(found) not in self._stands:
            return found
        # A copy of its own size and in C order: what is saved is what the shape says.
        return self._checkpoint.tensor(self._stands[id(found)][1]).contiguous()


class _Files(FileSystem):
    """Their file system, with files made by our calls."""

    def __init__(self, tick: Callable[[int], object]) -> None:
        super().__init__()
        self._tick = tick

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Sink]:
        with new_file(Path(path), self._tick) as sink:
            yield sink


@contextmanager
def _their_errors(directory: Path) -> Iterator[None]:
    """They wrap whatever was raised, Ctrl-C too; raise it as it was."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError):
            raise fs.storage_error(cause, "write", directory) from error
        raise cause from None
