"""Reading a checkpoint without a model: its tensors, bit for bit, and all else it recorded.

Runs in whichever process restores, inspects or verifies. What always holds: no byte is given out
whose hash was not checked on the way from the disk, and the file's own header must agree with the
manifest. Nothing here executes anything from a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gockpt.errors import CorruptError, NoCheckpointError, StorageError
from gockpt.state import torch_dtype
from gockpt.storage import fs
from gockpt.storage.catalog import Found, examine, scan
from gockpt.storage.image import ImageFile, each_extent, image_files
from gockpt.storage.records import EXTENT, Extent, Json, Piece, TensorRecord


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


class Checkpoint:
    """A valid checkpoint; made by :func:`open`."""

    def __init__(self, found: Found) -> None:
        self.path = found.path
        self.manifests = found.manifests
        self._files = tuple(image_files(found.path, one) for one in found.manifests)
        self._sound_headers: set[Path] = set()
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
        """The optimizers' group options by name (tagged JSON)."""
        return self.manifests[0].groups

    @property
    def extras(self) -> Json:
        """The user's objects and the random generators (tagged JSON)."""
        return self.manifests[0].extras

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

    def record(self, name: str) -> TensorRecord:
        """What the manifest says of a tensor (aliases share a record).

        Raises:
            StorageError: there is no such tensor.
        """
        return self._find(name)[1]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it was, bit for bit, in memory of its own; only its extents are read.

        Raises:
            StorageError: there is no such tensor, or it cannot be read.
            CorruptError: its bytes, or the file's header, are damaged.
        """
        rank, record = self._find(name)
        raw = torch.empty(record.entry.nbytes, dtype=torch.uint8)
        filled = 0
        for part in record.parts:
            file = self._files[rank][part.file]
            self._check_header(file)
            _read_part(file, part, raw[filled : filled + part.nbytes])
            filled += part.nbytes
        return _shaped(raw, record)

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

    def verify(self, threads: int | None = None) -> list[str]:
        """Read and check everything; one line for each thing that is wrong, none when good."""
        problems = []
        for file in self._all_files():
            try:
                self._check_header(file)
            except StorageError as error:
                problems.append(str(error))

        def check(file: ImageFile, fd: int, extent: Extent) -> None:
            file.read_extent(fd, extent, memoryview(fs.page_memory(extent.length)))

        problems += map(str, each_extent(self._all_files(), check, threads, stop_early=False))
        return list(dict.fromkeys(problems))

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
                by_record[rank, record.name] = _shaped(whole, record)
        return {name: by_record[rank, record.name] for name, (rank, record) in self._where.items()}


def open(path: Path | str, step: int | None = None) -> Checkpoint:
    """The newest valid checkpoint of a directory (of ``step``, if given), or one by its own path.

    Raises:
        NoCheckpointError: there is none; the message says what is wrong with those that are there.
        CorruptError: ``path`` is a checkpoint's own directory, and it is not valid.
    """
    path = Path(path)
    alone = examine(path)
    if alone.manifests or alone.committed:
        if alone.problem is not None:
            raise CorruptError(f"{path}: {alone.problem}; use another checkpoint", path=path)
        if step not in (None, alone.step):
            raise NoCheckpointError(f"{path} is of step {alone.step}, not {step}", path=path)
        return Checkpoint(alone)
    found = scan(path)
    for one in found:
        if one.problem is None and step in (None, one.step):
            return Checkpoint(one)
    raise NoCheckpointError(_nothing(path, step, found), path=path)


def load_newest(
    root: Path, step: int | None = None, *, threads: int | None = None
) -> tuple[Checkpoint, dict[str, torch.Tensor], list[str]]:
    """Load the newest checkpoint (of ``step``, if given) whose every byte is good.

    Returns:
        The checkpoint, its tensors, and one line for each newer one that was not good.

    Raises:
        NoCheckpointError: none is good; the message says what is wrong with each.
    """
    found = [one for one in scan(root) if step in (None, one.step)]
    problems: list[str] = []
    for one in found:
        try:
            if one.problem is not None:
                raise CorruptError(f"{one.path}: {one.problem}", path=one.path)
            checkpoint = Checkpoint(one)
            return checkpoint, checkpoint.load(threads), problems
        except StorageError as error:
            problems.append(str(error))
    raise NoCheckpointError("; ".join(problems) or _nothing(root, step, scan(root)), path=root)


def _nothing(path: Path, step: int | None, found: list[Found]) -> str:
    good = sorted({one.step for one in found if one.problem is None})
    if good:
        return f"{path} has no checkpoint of step {step}, only of {', '.join(map(str, good))}"
    if not found:
        return f"{path} has no checkpoints"
    problems = "; ".join(f"{one.path.name}: {one.problem}" for one in found)
    return f"{path} has no valid checkpoint: {problems}"


def _read_part(file: ImageFile, part: Piece, target: torch.Tensor) -> None:
    """Fill ``target`` with a part's bytes, reading the extents that they lie in."""
    start = file.record.data_start + part.offset
    stop = start + part.nbytes
    scratch = memoryview(fs.page_memory(EXTENT))
    with file.opened() as fd:
        for extent in file.overlapping(start, stop):
            found = torch.frombuffer(file.read_extent(fd, extent, scratch), dtype=torch.uint8)
            first, last = max(start, extent.offset), min(stop, extent.offset + extent.length)
            target[first - start : last - start] = found[
                first - extent.offset : last - extent.offset
            ]


def _shaped(raw: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    """The tensor that the bytes are, as a view with the recorded order of dimensions."""
    dense = raw.view(torch_dtype(record.dtype)).view([record.shape[dim] for dim in record.order])
    back = sorted(range(len(record.order)), key=record.order.__getitem__)
    return dense.permute(back)
