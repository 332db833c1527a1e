"""A new file as the writers of torch want one, over our own file calls."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gockpt.storage import fs


class Sink(io.RawIOBase):
    """A file written from its start to its end, or anywhere by :meth:`write_at`."""

    def __init__(self, fd: int, path: Path, tick: Callable[[int], object]) -> None:
        self._fd = fd
        self._path = path
        self._tick = tick
        self._end = 0

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """Write all of ``data``.

        Raises:
            StorageError: it cannot be written.
        """
        count = self.write_at(memoryview(data).cast("B"), self._end)
        self._end += count
        return count

    def write_at(self, data: memoryview, offset: int) -> int:
        """Write all of ``data``, bytes, at an offset of the file; :meth:`tell` does not move.

        Raises:
            StorageError: it cannot be written.
        """
        fs.pwrite_all(self._fd, data, offset, path=self._path)
        self._tick(len(data))
        return len(data)

    def tell(self) -> int:
        return self._end

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd


@contextmanager
def new_file(path: Path, tick: Callable[[int], object]) -> Iterator[Sink]:
    """Create a file for the body to write; durable after it, and gone if the body failed.

    Raises:
        StorageError: it cannot be created, written or made durable.
    """
    fd = fs.create(path)
    try:
        yield Sink(fd, path, tick)
        fs.fdatasync(fd, path=path)
    except BaseException:
        fs.drop(fd, path)
        raise
    fs.close(fd)
