"""Reading extents with their hashes checked, and saying exactly what is damaged.

Runs in whichever process restores or verifies. What always holds: bytes leave here only if their
hash is the recorded one; what fails names the file, the bytes and the tensors that lie there.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gockpt import faults
from gockpt.errors import CorruptError, StorageError
from gockpt.state import torch_dtype
from gockpt.storage import fs
from gockpt.storage.format import digest
from gockpt.storage.header import HeaderEntry, parse_header, stored_as
from gockpt.storage.places import locate
from gockpt.storage.pool import Pool
from gockpt.storage.records import Extent, FileRecord, Manifest, Piece, TensorRecord

_NAMED = 8
_TIMEOUT = 24 * 3600.0

THREADS = 8
"""Extents read at a time: more than processors, as some wait for the disk while others are hashed
and memory is made ready for yet others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """One file of a checkpoint, and how its bytes are checked."""

    path: Path
    index: int
    manifest: Manifest
    extents: tuple[Extent, ...]
    """In order of their offsets."""

    @property
    def record(self) -> FileRecord:
        return self.manifest.files[self.index]

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Its descriptor, direct where possible, for the body of a ``with`` statement."""
        fd = fs.open_read(self.path, direct=True)
        try:
            yield fd
        finally:
            fs.close(fd)

    def read_extent(self, fd: int, extent: Extent, memory: memoryview) -> memoryview:
        """Read an extent into page-aligned ``memory`` with room for whole pages; return its bytes.

        Raises:
            CorruptError: it is not what was written.
            StorageError: it cannot be read.
        """
        whole = -(-extent.length // fs.PAGE) * fs.PAGE
        try:
            count = fs.pread_into(fd, memory[:whole], extent.offset, path=self.path)
        except StorageError as error:
            what = f"cannot be read: {error}"
            raise self._damage(StorageError, extent, what, error.errno) from error
        found = memory[: extent.length]
        good = count == extent.length and digest(found) == extent.xxh3
        if not good and not faults.armed("image.ignore-checksum", self.path):
            raise self._damage(CorruptError, extent, "are not those that were written")
        return found

    def check_header(self, region: bytes) -> None:
        """Check that the file's own header says of its tensors what the manifest says.

        Raises:
            CorruptError: it does not.
        """
        try:
            if parse_header(region) != dict(self._expected()):
                raise CorruptError("header and manifest describe different tensors")
        except CorruptError as error:
            raise CorruptError(f"{self.path}: {error}", path=self.path) from error

    def read_header(self, fd: int) -> bytes:
        """The header region, its hashes checked."""
        region = bytearray()
        for extent in self.extents:
            if extent.offset >= self.record.data_start:
                break
            memory = memoryview(fs.page_memory(extent.length))
            region += self.read_extent(fd, extent, memory)
        return bytes(region[: self.record.data_start])

    def overlapping(self, start: int, stop: int) -> tuple[Extent, ...]:
        """The extents that hold any of the file's bytes from ``start`` to ``stop``."""
        by_offset = partial(bisect.bisect_right, self.extents, key=lambda extent: extent.offset)
        return self.extents[max(0, by_offset(start) - 1) : by_offset(max(start, stop - 1))]

    def _expected(self) -> Iterator[tuple[str, HeaderEntry]]:
        for record, part in self._parts():
            shape = [record.shape[dim] for dim in record.order]
            if record.pieces:
                shape = [part.nbytes // torch_dtype(record.dtype).itemsize]
            dtype, stored = stored_as(record.dtype, shape)
            offsets = (part.offset, part.offset + part.nbytes)
            yield part.entry, HeaderEntry(dtype=dtype, shape=stored, data_offsets=offsets)

    def _parts(self) -> Iterator[tuple[TensorRecord, Piece]]:
        for record in self.manifest.tensors:
            for part in record.parts:
                if part.file == self.index:
                    yield record, part

    def _damage(
        self, kind: type[StorageError], extent: Extent, what: str, errno: int | None = None
    ) -> StorageError:
        """The error to raise for an extent, naming all that it holds."""
        start, stop = extent.offset, extent.offset + extent.length
        base = self.record.data_start
        names = [
            record.name
            for record, part in self._parts()
            if start - part.nbytes < base + part.offset < stop and part.nbytes
        ]
        shown = ["the header", *names] if start < base else names
        more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
        held = ", ".join(shown[:_NAMED]) + more or "no tensor"
        return kind(
            f"{self.path}: bytes {start} to {stop} {what} (they hold {held}); "
            "use another checkpoint",
            path=self.path,
            errno=errno,
            extent=(start, stop),
            tensors=tuple(names),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFile(ImageFile):
    """The file that a slot in memory is, or would become: the same checks, and nothing is copied.

    Only its data is there; the header is made when it is written.
    """

    data: memoryview

    @contextmanager
    def opened(self) -> Iterator[int]:
        yield -1

    def read_extent(self, fd: int, extent: Extent, memory: memoryview) -> memoryview:
        start = extent.offset - self.record.data_start
        found = self.data[start : start + extent.length]
        if digest(found) != extent.xxh3:
            what = "in memory are not those that were written"
            raise self._damage(CorruptError, extent, what)
        return found


def image_files(
    directory: Path, manifest: Manifest, volumes: Sequence[Path] = ()
) -> tuple[ImageFile, ...]:
    """The files of a rank's part of a checkpoint, wherever they are.

    Raises:
        CorruptError: one is missing.
    """
    by_file: list[list[Extent]] = [[] for _ in manifest.files]
    for extent in sorted(manifest.extents, key=lambda extent: extent.offset):
        by_file[extent.file].append(extent)
    return tuple(
        ImageFile(
            path=locate(directory, manifest, record, volumes),
            index=index,
            manifest=manifest,
            extents=tuple(by_file[index]),
        )
        for index, record in enumerate(manifest.files)
    )


def each_extent(
    files: Sequence[ImageFile],
    use: Callable[[ImageFile, int, Extent], None],
    threads: int | None,
    *,
    stop_early: bool,
) -> list[StorageError]:
    """Call ``use(file, descriptor, extent)`` for every extent, on several threads.

    Args:
        threads: how many; None: 8.
        stop_early: leave out the rest after the first failure.

    Returns:
        The failures, in the order of files and offsets.
    """
    problems: dict[tuple[int, int], StorageError] = {}
    pool = Pool(threads or THREADS, name="gockpt-read")

    def attempt(number: int, file: ImageFile, fd: int, extent: Extent) -> None:
        if problems and stop_early:
            return
        try:
            use(file, fd, extent)
        except StorageError as error:
            problems[number, extent.offset] = error

    with ExitStack() as stack:
        stack.callback(pool.close, _TIMEOUT)
        for number, file in enumerate(files):
            try:
                fd = stack.enter_context(file.opened())
            except StorageError as error:
                problems[number, -1] = error
                continue
            for extent in file.extents:
                pool.submit(partial(attempt, number, file, fd, extent))
        pool.wait(time.monotonic() + _TIMEOUT)
    return [problems[key] for key in sorted(problems)]
