"""Reading a checkpoint without a model: its tensors, bit for bit, and all else it recorded.

Runs in whichever process restores, inspects or verifies. What always holds: no byte is given out
whose hash was not checked on the way from the disk, and the file's own header must agree with the
manifest. Nothing here executes anything from a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gockpt.errors import ConfigError, CorruptError, NoCheckpointError, StorageError
from gockpt.state import bits, dtype_name, memory_order, torch_dtype
from gockpt.storage import fs
from gockpt.storage.catalog import Found, examine, scan
from gockpt.storage.image import ImageFile, SlotFile, each_extent, image_files
from gockpt.storage.pool import Pool
from gockpt.storage.records import Extent, Json, TensorRecord
from gockpt.tagged import decode

TIER_ANSWER = 60.0
"""Seconds that a second tier may take to say what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """How a checkpoint came about."""

    path: Path
    step: int
    sequence: int
    run_id: str
    launch_id: str
    world_size: int
    created: str
    strategy: str
    windows: int
    base: int
    fallback: str | None
    proof: dict[str, Json]
    recipe: dict[str, Json]
    nbytes: int
    """Size of all its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run of a tensor's bytes lies: ``start`` to ``stop``, from the file's start."""

    file: Path
    start: int
    stop: int
    extents: tuple[Extent, ...]
    """What is read and checked to get at them."""


class Checkpoint:
    """A valid checkpoint, read lazily; made by :func:`open`.

    Opening reads the manifests alone. :meth:`tensor`, :meth:`rows` and :meth:`read_into` then read
    the file's header once and the extents (at most 16 MiB each) in which the bytes lie, each
    checked. Memory: the result and one extent; that last extent is kept, so that small tensors that
    lie side by side are read from the disk once. May be used from several threads.
    """

    def __init__(self, found: Found) -> None:
        self.path = found.path
        self.manifests = found.manifests
        self._files = tuple(image_files(found.path, one, found.volumes) for one in found.manifests)
        self._sound_headers: set[Path] = set()
        self._held: tuple[ImageFile, Extent, memoryview] | None = None
        self._where: dict[str, tuple[int, TensorRecord]] = {}
        for rank, manifest in enumerate(found.manifests):
            for record in manifest.tensors:
                for name in (record.name, *record.aliases):
                    self._where.setdefault(name, (rank, record))

    @property
    def step(self) -> int:
        return self.manifests[0].step

    @property
    def groups(self) -> Json:
        """The optimizers' group options by name (tagged JSON; see :meth:`value`)."""
        return self.manifests[0].groups

    @property
    def extras(self) -> Json:
        """The user's objects and the random generators (tagged JSON; see :meth:`objects`)."""
        return self.manifests[0].extras

    def value(self, tagged: Json) -> Any:
        """The Python value that tagged JSON of this checkpoint stands for; its tensors are read.

        Raises:
            CorruptError: it is no tagged JSON, or a tensor in it is damaged.
        """
        return decode(tagged, _Lazily(self))

    def objects(self) -> dict[str, Any]:
        """``extras`` as Python values: the state of each object by its name, generators as "rng".

        Raises:
            CorruptError: they are damaged, or a tensor in them is.
        """
        found: dict[str, Any] = self.value(self.extras["tree"]) if "tree" in self.extras else {}
        return found

    @property
    def info(self) -> Info:
        first = self.manifests[0]
        return Info(
            path=self.path,
            step=first.step,
            sequence=first.sequence,
            run_id=first.run_id,
            launch_id=first.launch_id,
            world_size=first.world_size,
            created=first.created,
            strategy=first.strategy,
            windows=first.windows,
            base=first.base,
            fallback=first.fallback,
            proof=first.proof,
            recipe=first.recipe,
            nbytes=sum(file.size for one in self.manifests for file in one.files),
        )

    def names(self) -> list[str]:
        """Names of all tensors, those of tied ones included."""
        return list(self._where)

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """The names as their tensors lie in the files: read so, each extent is read once."""

        def begin(name: str) -> tuple[int, int, int]:
            rank, record = self._find(name)
            first = record.parts[0]
            return rank, first.file, first.offset

        return sorted(names, key=begin)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def record(self, name: str) -> TensorRecord:
        """What the manifest says of a tensor (aliases share a record).

        Raises:
            StorageError: there is no such tensor.
        """
        return self._find(name)[1]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it was, bit for bit, in memory of its own; only its extents are read.

        Dtype, shape and memory order (channels last, say) are those it was saved with. It lies on
        the CPU, does not require grad, and may be written to.

        Raises:
            StorageError: there is no such tensor, or it cannot be read.
            CorruptError: its bytes, or the file's header, are damaged; ``path``, ``extent`` and
                ``tensors`` of the error say where.
        """
        rank, record = self._find(name)
        raw = torch.empty(record.entry.nbytes, dtype=torch.uint8)
        self._fill(rank, record, 0, raw)
        return _shaped(raw, record, record.shape)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """``tensor(name)[start:stop]``, in memory of its own.

        Only the extents of these rows are read, if the first dimension is the outermost one in
        memory (it is, unless the tensor was transposed); else the whole tensor is.

        Raises:
            ConfigError: not ``0 <= start <= stop <= shape[0]``, or the tensor has no dimension.
            StorageError, CorruptError: as :meth:`tensor`.
        """
        rank, record = self._find(name)
        count = record.shape[0] if record.shape else 0
        if not record.shape or not 0 <= start <= stop <= count:
            raise ConfigError(
                f"{name!r} of shape {record.shape} has no rows {start} to {stop}; see record()"
            )
        if record.order[0] != 0:
            return self.tensor(name)[start:stop].clone()
        each = record.entry.nbytes // max(1, count)
        raw = torch.empty((stop - start) * each, dtype=torch.uint8)
        self._fill(rank, record, start * each, raw)
        return _shaped(raw, record, (stop - start, *record.shape[1:]))

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor into memory that is there already; ``out`` must have its dtype and shape.

        On an error ``out`` may hold a part of it. A tensor on the CPU of the recorded memory order
        is read without a copy of it.

        Raises:
            ConfigError: ``out`` has another dtype or shape.
            StorageError, CorruptError: as :meth:`tensor`.
        """
        rank, record = self._find(name)
        if dtype_name(out.dtype) != record.dtype or tuple(out.shape) != record.shape:
            raise ConfigError(
                f"{name!r} is {record.dtype} of shape {record.shape}, the tensor to read it into "
                f"{dtype_name(out.dtype)} of shape {tuple(out.shape)}; make it like tensor(name)"
            )
        if out.device.type == "cpu" and memory_order(out) == record.order:
            self._fill(rank, record, 0, bits(out))
        else:
            with torch.no_grad():
                out.copy_(self.tensor(name))

    def places(self, name: str) -> tuple[Place, ...]:
        """Where a tensor's bytes lie: several places if it was cut, none if it is empty.

        Raises:
            StorageError: there is no such tensor.
        """
        rank, record = self._find(name)
        found = []
        for part in record.parts:
            file = self._files[rank][part.file]
            start = file.record.data_start + part.offset
            stop = start + part.nbytes
            if part.nbytes:
                extents = file.overlapping(start, stop)
                found.append(Place(file=file.path, start=start, stop=stop, extents=extents))
        return tuple(found)

    def load(self, threads: int | None = None) -> dict[str, torch.Tensor]:
        """All tensors, read once and in parallel into one block of memory whose views they are.

        Every byte of every file is checked. Tied names map to the same tensor.

        Raises:
            CorruptError: naming what is damaged.
            StorageError: something cannot be read.
        """
        base: dict[Path, int] = {}
        total = 0
        for file in self._all_files():
            base[file.path] = total
            total += -(-file.record.size // fs.PAGE) * fs.PAGE
        memory = fs.page_memory(total)
        view = memoryview(memory)

        def place(file: ImageFile, fd: int, extent: Extent) -> None:
            file.read_extent(fd, extent, view[base[file.path] + extent.offset :])

        for problem in each_extent(self._all_files(), place, threads, stop_early=True):
            raise problem
        for file in self._all_files():
            file.check_header(bytes(view[base[file.path] :][: file.record.data_start]))
        return self._views(torch.frombuffer(memory, dtype=torch.uint8), base)

    def load_from(self, slot: memoryview, threads: int | None = None) -> dict[str, torch.Tensor]:
        """All tensors, as views of the slot that the checkpoint was (or will be) written from.

        Every byte of them is checked, as in :meth:`load`.

        Args:
            slot: its bytes; the checkpoint is that of one rank, in one file.

        Raises:
            CorruptError: naming what is damaged.
        """
        file = self._files[0][0]
        start = file.record.data_start
        if len(slot) < file.record.size - start:
            raise CorruptError(f"{file.path}: the slot in memory is too small", path=file.path)
        data = SlotFile(
            path=file.path,
            index=0,
            manifest=file.manifest,
            extents=tuple(extent for extent in file.extents if extent.offset >= start),
            data=slot,
        )

        def check(file: ImageFile, fd: int, extent: Extent) -> None:
            file.read_extent(fd, extent, slot)

        for problem in each_extent([data], check, threads, stop_early=True):
            raise problem
        return self._views(torch.frombuffer(slot, dtype=torch.uint8), {file.path: -start})

    def verify(self, threads: int | None = None) -> list[str]:
        """Read and check every byte; one line for each thing that is wrong, none when good.

        Each line names the file, the bytes and the tensors that lie there.
        """
        return [str(error) for error in self.damages(threads)]

    def damages(
        self, threads: int | None = None, *, tick: Callable[[int], object] = lambda nbytes: None
    ) -> list[StorageError]:
        """As :meth:`verify`, as the errors that reading would raise, with their attributes.

        Args:
            tick: called with the size of each extent after it was looked at, on any thread.
        """
        problems: list[StorageError] = []
        for file in self._all_files():
            try:
                self._check_header(file)
            except StorageError as error:
                problems.append(error)

        def check(file: ImageFile, fd: int, extent: Extent) -> None:
            try:
                file.read_extent(fd, extent, memoryview(fs.page_memory(extent.length)))
            finally:
                tick(extent.length)

        problems += each_extent(self._all_files(), check, threads, stop_early=False)
        return list({str(error): error for error in problems}.values())

    def _all_files(self) -> list[ImageFile]:
        return [file for of_rank in self._files for file in of_rank]

    def _find(self, name: str) -> tuple[int, TensorRecord]:
        try:
            rank, record = self._where[name]
        except KeyError:
            raise StorageError(
                f"{self.path} has no tensor {name!r}; see names()", path=self.path
            ) from None
        if record.shape != record.global_shape:
            raise StorageError(f"{name!r} is cut over ranks, which this version cannot join")
        return rank, record

    def _check_header(self, file: ImageFile) -> None:
        if file.path not in self._sound_headers:
            with file.opened() as fd:
                file.check_header(file.read_header(fd))
            self._sound_headers.add(file.path)

    def _fill(self, rank: int, record: TensorRecord, first: int, raw: torch.Tensor) -> None:
        """Fill ``raw``, bytes, with those of a tensor in memory order from ``first`` on."""
        target = raw.numpy().data
        last = first + len(target)
        begin = 0  # where the part lies in the tensor
        for part in record.parts:
            file = self._files[rank][part.file]
            self._check_header(file)
            start, stop = max(first, begin), min(last, begin + part.nbytes)
            if start < stop:
                offset = file.record.data_start + part.offset + start - begin
                self._read(file, offset, target[start - first : stop - first])
            begin += part.nbytes

    def _read(self, file: ImageFile, start: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``start`` on, extent by extent."""
        stop = start + len(target)
        extents = file.overlapping(start, stop)
        scratch: memoryview | None = None
        held = self._held
        for extent in extents:
            if held is None or held[0] is not file or held[1] is not extent:
                self._held = held = None  # its memory goes before new memory comes
                size = max(one.length for one in extents)
                scratch = scratch or memoryview(fs.page_memory(size))
                with file.opened() as fd:
                    held = (file, extent, file.read_extent(fd, extent, scratch))
            first, last = max(start, extent.offset), min(stop, extent.offset + extent.length)
            # By memoryview: torch would share the copy out among threads, which wait for each other
            # on a busy machine. And without a name for it, which would outlive the next extent.
            target[first - start : last - start] = held[2][
                first - extent.offset : last - extent.offset
            ]
        self._held = held

    def _views(self, raw: torch.Tensor, base: dict[Path, int]) -> dict[str, torch.Tensor]:
        """Every name's tensor within ``raw``, which holds each file from its ``base`` on."""
        by_record: dict[tuple[int, str], torch.Tensor] = {}
        for name in self._where:
            rank, record = self._find(name)
            if (rank, record.name) not in by_record:
                parts = []
                for part in record.parts:
                    file = self._files[rank][part.file]
                    start = base[file.path] + file.record.data_start + part.offset
                    parts.append(raw[start : start + part.nbytes])
                whole = parts[0] if len(parts) == 1 else torch.cat(parts)
                by_record[rank, record.name] = _shaped(whole, record, record.shape)
        return {name: by_record[rank, record.name] for name, (rank, record) in self._where.items()}


class _Lazily(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors by name, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._checkpoint:
            raise KeyError(name)
        return self._checkpoint.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.names())

    def __len__(self) -> int:
        return len(self._checkpoint.names())


def open(path: Path | str, step: int | None = None, *, volumes: Sequence[Path] = ()) -> Checkpoint:
    """The newest valid checkpoint of a directory (of ``step``, if given), or one by its own path.

    Args:
        volumes: where parts may be that are no longer where they were written.

    Raises:
        NoCheckpointError: there is none; the message says what is wrong with those that are there.
        CorruptError: ``path`` is a checkpoint's own directory, and it is not valid.
    """
    path = Path(path)
    alone = examine(path, volumes)
    if alone.manifests or alone.committed:
        if alone.problem is not None:
            raise CorruptError(f"{path}: {alone.problem}; use another checkpoint", path=path)
        if step not in (None, alone.step):
            raise NoCheckpointError(f"{path} is of step {alone.step}, not {step}", path=path)
        return Checkpoint(alone)
    found = scan(path, volumes)
    for one in found:
        if one.problem is None and step in (None, one.step):
            return Checkpoint(one)
    raise NoCheckpointError(_nothing(path, step, found), path=path)


def load_newest(
    root: Path, step: int | None = None, *, tier: Path | None = None, threads: int | None = None
) -> tuple[Checkpoint, dict[str, torch.Tensor], list[str]]:
    """Load the newest checkpoint (of ``step``, if given) whose every byte is good.

    Args:
        tier: a second directory to look in.

    Returns:
        See :func:`load_first`.

    Raises:
        NoCheckpointError: none is good; the message says what is wrong with each.
    """
    return load_first(root, *candidates(root, tier), step=step, threads=threads)


def load_first(
    root: Path,
    found: list[Found],
    problems: list[str],
    *,
    step: int | None = None,
    threads: int | None = None,
) -> tuple[Checkpoint, dict[str, torch.Tensor], list[str]]:
    """Load the first of these checkpoints (of ``step``, if given) whose every byte is good.

    Args:
        root: where they were looked for (for messages).
        found: what :func:`candidates` found…
        problems: …and what it said.

    Returns:
        The checkpoint, its tensors, and the problems: a line for each that was not good is added.

    Raises:
        NoCheckpointError: none is good; the message says what is wrong with each.
    """
    for one in [one for one in found if step in (None, one.step)]:
        try:
            if one.problem is not None:
                raise CorruptError(f"{one.path}: {one.problem}", path=one.path)
            checkpoint = Checkpoint(one)
            return checkpoint, checkpoint.load(threads), problems
        except StorageError as error:
            problems.append(str(error))
    raise NoCheckpointError("; ".join(problems) or _nothing(root, step, found), path=root)


def candidates(root: Path, tier: Path | None = None) -> tuple[list[Found], list[str]]:
    """What looks like a checkpoint in ``root`` and its tier, highest sequence first.

    Of two copies of a checkpoint that in ``root`` comes first.

    Returns:
        Those, and what is wrong with the tier, if it cannot be listed (or not in time).

    Raises:
        StorageError: ``root`` cannot be listed.
    """
    found, problems = scan(root), []
    if tier is not None:
        try:
            found += _scan_in_time(tier)
        except StorageError as error:
            problems.append(f"the tier {tier}: {error}")
    return sorted(found, key=lambda one: one.sequence, reverse=True), problems


def _scan_in_time(root: Path) -> list[Found]:
    """A scan that a hung file system cannot hold up for ever."""
    found: list[Found] = []
    pool = Pool(1, name="gockpt-scan")
    try:
        pool.submit(lambda: found.extend(scan(root)))
        pool.wait(time.monotonic() + TIER_ANSWER)
    finally:
        pool.close(0)
    return found


def _nothing(path: Path, step: int | None, found: list[Found]) -> str:
    good = sorted({one.step for one in found if one.problem is None})
    if good:
        return f"{path} has no checkpoint of step {step}, only of {', '.join(map(str, good))}"
    if not found:
        return f"{path} has no checkpoints"
    problems = "; ".join(f"{one.path.name}: {one.problem}" for one in found)
    return f"{path} has no valid checkpoint: {problems}"


def _shaped(raw: torch.Tensor, record: TensorRecord, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that the bytes are, as a view with the recorded order of dimensions."""
    dense = raw.view(torch_dtype(record.dtype)).view([shape[dim] for dim in record.order])
    back = sorted(range(len(record.order)), key=record.order.__getitem__)
    return dense.permute(back)
