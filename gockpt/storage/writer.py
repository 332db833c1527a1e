"""Writing one image file from slot memory, in parallel, while the slot still fills.

Runs in the agent; the threads are the writer's own. What always holds: the file is created anew,
every byte of it is hashed as it is written, and :meth:`ImageWriter.finish` returns only after
every write succeeded and the data is durable. A file is part of a checkpoint only once a manifest
that names it was committed (:mod:`gockpt.storage.commit`).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from gockpt.errors import StorageError
from gockpt.events import Recorder
from gockpt.pace import Pacer
from gockpt.storage import fs
from gockpt.storage.busy import Busy
from gockpt.storage.format import digest, new_digest
from gockpt.storage.pool import Pool
from gockpt.storage.records import EXTENT, Extent
from gockpt.storage.tuning import Tuning

STAGE = 2 << 20
"""Bytes that are copied, hashed and written at a time by writes that go through a stage."""

_ABORT_WAIT = 30.0
"""Seconds that an abort gives to writes which have already begun."""


class ImageWriter:
    """Writes ``reserve`` bytes of header and then ``data`` to a new file.

    Attributes:
        direct: whether writes pass the page cache.
        reason: why they do not, or None.
        busy: for how long the disk had something of this file to do.
    """

    def __init__(
        self,
        path: Path,
        data: memoryview,
        reserve: int,
        *,
        size: int | None = None,
        tuning: Tuning | int = 4,
        extent: int = EXTENT,
        file: int = 0,
        pacer: Pacer | None = None,
        spans: Recorder | None = None,
        step: int = 0,
    ) -> None:
        """Create the file, reserve its room on the device and start the threads.

        Args:
            path: a file that must not exist yet.
            data: the slot's bytes, a multiple of 4096 long.
            reserve: length of the header region, from :func:`header_reserve`.
            size: bytes of ``data`` that belong to the file (default: all).
            tuning: what finds out how to write while that is done; or the writes in flight.
            extent: bytes that are written and hashed at a time, at most 16 MiB.
            file: index of this file in the manifest's ``files``.
            pacer: holds the writes to a modelled rate, all writers that share it together.
            spans: where to record what was written when, under ``step``.

        Raises:
            StorageError: the file exists or cannot be written.
            SpaceError: there is no room for it.
            ValueError: sizes that are no multiples of 4096.
        """
        data = data.cast("B")
        if len(data) % fs.PAGE or reserve % fs.PAGE or reserve < fs.PAGE:
            raise ValueError("the slot and the header's room must be multiples of 4096 bytes")
        self.path = path
        self.size = len(data) if size is None else size
        if not 0 <= self.size <= len(data):
            raise ValueError(f"{self.size} bytes are more than the slot's {len(data)}")
        if extent % fs.PAGE or not fs.PAGE <= extent <= EXTENT:
            raise ValueError(f"an extent of {extent} bytes is no multiple of a page up to {EXTENT}")
        self._data, self._reserve, self._file = data, reserve, file
        self._extent = extent
        self._tuning = Tuning(tuning, tuning) if isinstance(tuning, int) else tuning
        self._pacer = pacer
        self._spans, self._step = spans, step
        self._extents: dict[int, Extent] = {}
        self._given: set[int] = set()
        self._ended = False
        self._fd, self.reason = fs.create_direct(path)
        self._stages: list[NDArray[np.uint8]] = []  # those that no thread uses now
        try:
            fs.fallocate(self._fd, reserve + self.size, path=path)
        except BaseException:
            fs.drop(self._fd, path)
            raise
        self.busy = Busy()
        self._pool = Pool(self._tuning.depth, name="gockpt-write")

    @property
    def direct(self) -> bool:
        return self.reason is None

    def write(self, start: int, stop: int) -> None:
        """Take over bytes ``start`` to ``stop`` of the data, which will not change any more.

        Each byte is handed over once, in any order of ranges. Both ends are multiples of the
        extent, except that ``stop`` may be the end of the data. Never blocks.

        Raises:
            StorageError: an earlier write failed.
            ValueError: the range is not as described.
        """
        if (
            start % self._extent
            or (stop % self._extent and stop != self.size)
            or not start < stop <= self.size
        ):
            raise ValueError(f"{start} to {stop} is no range of whole extents of {self.size} bytes")
        for begin in range(start, stop, self._extent):
            if begin in self._given:
                raise ValueError(f"the extent at {begin} was handed over twice")
            self._given.add(begin)
            end = min(begin + self._extent, stop)
            self._pool.submit(partial(self._write_data, begin, end))

    def finish(self, header: bytes, *, timeout: float = 3600.0) -> list[Extent]:
        """Wait for all data, write the header, cut the file to its size and make it durable.

        Returns:
            The extents of the whole file, in order of their offsets.

        Raises:
            StorageError: a write failed, data was never handed over, or ``timeout`` seconds passed.
        """
        if len(header) != self._reserve:
            raise ValueError(f"the header has {len(header)} bytes, not {self._reserve}")
        missing = [begin for begin in range(0, self.size, self._extent) if begin not in self._given]
        if missing:
            raise StorageError(
                f"{self.path}: the data at {missing[0]} was never handed over", path=self.path
            )
        deadline = time.monotonic() + timeout
        self._pool.submit(partial(self._write_header, header))
        self._pool.wait(deadline)
        self._pool.submit(self._seal)
        self._pool.wait(deadline)
        self._end()
        return [self._extents[offset] for offset in sorted(self._extents)]

    def give_up(self, error: Exception) -> None:
        """Write nothing more; ``error`` is raised by whoever waits. :meth:`abort` is still due."""
        self._pool.fail(error)

    def abort(self) -> None:
        """Drop what is not yet written and remove the file. Harmless after :meth:`finish`."""
        if self._ended:
            return
        self._pool.fail(StorageError(f"writing {self.path} was aborted", path=self.path))
        self._end()
        fs.unlink(self.path, missing_ok=True)

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.abort()
        except StorageError:
            if error is None:  # else it would hide what went wrong
                raise

    def _end(self) -> None:
        self._ended = True
        # A thread stuck in a write keeps the descriptor: its number must not be given to another.
        if self._pool.close(_ABORT_WAIT):
            fs.close(self._fd)
        self._data = memoryview(b"")  # lets go of the slot

    def _write_data(self, start: int, stop: int) -> None:
        # Past the data's end, the rest of the last page is written too, and cut off in the end.
        whole = -(-stop // fs.PAGE) * fs.PAGE
        memory = self._data[start:whole]
        self._put(memory, stop - start, self._reserve + start)

    def _write_header(self, header: bytes) -> None:
        memory = memoryview(fs.page_memory(len(header)))
        memory[:] = header
        for offset in range(0, len(header), EXTENT):
            part = memory[offset : offset + EXTENT]
            self._put(part, len(part), offset)

    def _put(self, memory: memoryview, length: int, offset: int) -> None:
        """Write ``memory``, whose first ``length`` bytes count, as one extent of the file."""
        if self._pacer is not None:
            self._pacer.take(length)
        with self._span("extent"):
            if self._tuning.staged or _address(memory) % fs.PAGE:
                xxh3 = self._put_staged(memory, length, offset)
            else:
                xxh3 = digest(memory[:length])
                with self.busy:
                    self._pwrite(memory, offset)
        self._extents[offset] = Extent(file=self._file, offset=offset, length=length, xxh3=xxh3)
        more = self._pool.waiting
        self._pool.resize(self._tuning.ended(length, time.monotonic(), more=more))

    def _put_staged(self, memory: memoryview, length: int, offset: int) -> str:
        """Write ``memory`` through a stage, by pieces; return the hash of what counts of it."""
        try:
            stage = self._stages.pop()
        except IndexError:
            stage = _new_stage()
        hasher = new_digest()
        for start in range(0, len(memory), STAGE):
            piece = np.frombuffer(memory[start : start + STAGE], np.uint8)
            np.copyto(stage[: len(piece)], piece)
            copy = stage.data[: len(piece)]
            hasher.update(copy[: length - start])
            with self.busy:
                self._pwrite(copy, offset + start)
        self._stages.append(stage)
        return hasher.hexdigest()

    def _pwrite(self, memory: memoryview, offset: int) -> None:
        direct = self.direct  # before the call: another thread may be falling back meanwhile
        try:
            fs.pwrite_all(self._fd, memory, offset, path=self.path)
        except StorageError as error:
            # A file system may refuse direct writes late, e.g. behind a short one.
            if not direct or not fs.refuses_direct(error):
                raise
            self.reason = f"the file system refused a direct write at {offset}"
            fs.set_buffered(self._fd)
            fs.pwrite_all(self._fd, memory, offset, path=self.path)

    def _seal(self) -> None:
        with self._span("sync"), self.busy:
            fs.truncate(self._fd, self._reserve + self.size, path=self.path)
            fs.fdatasync(self._fd, path=self.path)

    def _span(self, name: str) -> AbstractContextManager[None]:
        return self._spans.span("write", name, self._step) if self._spans else nullcontext()


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def _new_stage() -> NDArray[np.uint8]:
    """One huge page, where the system has them: it begins at a multiple of its size."""
    memory = np.frombuffer(fs.page_memory(2 * STAGE), np.uint8)
    skipped = -memory.ctypes.data % STAGE
    return memory[skipped : skipped + STAGE]
