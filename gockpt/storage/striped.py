"""Writing one image to several files at a time, each on a volume of its own.

Runs in the agent, beside :class:`ImageWriter`, one for each part. What always holds: all parts are
written and synced in parallel, the first failure ends them all, and it names its volume.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from gockpt.errors import StorageError
from gockpt.storage.parts import Part
from gockpt.storage.pool import Pool
from gockpt.storage.records import Extent
from gockpt.storage.volumes import on_volume
from gockpt.storage.writer import ImageWriter

SLOW = 0.5
"""A volume is slow below this share of the rate of the others (their median)…"""

SLOW_S = 0.1
"""…if it was busy for so many seconds: less says nothing."""

_END = 60.0
"""Seconds that the threads get to end once nothing is left for them to wait for."""


class StripedWriter:
    """Writes the parts of an image.

    Attributes:
        parts: what goes where.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        volumes: Sequence[Path],
        create: Callable[[Part], ImageWriter],
    ) -> None:
        """Create all files.

        Args:
            volumes: where each part goes, as the user knows it; none where there is one file.
            create: makes the writer of a part.

        Raises:
            StorageError: a file cannot be created, or there is no room for it; none is left.
        """
        self.parts = tuple(parts)
        self._volumes = tuple(volumes)
        self._failure: StorageError | None = None
        self._writers: list[ImageWriter] = []
        try:
            for part in parts:
                with self._named(part):
                    self._writers.append(create(part))
        except BaseException:
            with suppress(StorageError):
                self.abort()
            raise

    def write(self, start: int, stop: int) -> None:
        """Take over bytes ``start`` to ``stop`` of the image, as :meth:`ImageWriter.write` does.

        Raises:
            StorageError: an earlier write failed.
        """
        for part, writer in zip(self.parts, self._writers, strict=True):
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                with self._named(part):
                    writer.write(first - part.start, last - part.start)

    def finish(self, headers: Sequence[bytes], *, timeout: float) -> list[Extent]:
        """Finish all files at the same time, each with its header.

        Returns:
            The extents of all files.

        Raises:
            StorageError: one failed; the others have given up.
        """
        found: dict[int, list[Extent]] = {}

        def finish(part: Part) -> None:
            with self._named(part):
                writer = self._writers[part.file]
                found[part.file] = writer.finish(headers[part.file], timeout=timeout)

        if len(self.parts) == 1:
            finish(self.parts[0])
        else:
            self._all_at_once(finish, timeout)
        return [extent for number in sorted(found) for extent in found[number]]

    def _all_at_once(self, finish: Callable[[Part], None], timeout: float) -> None:
        pool = Pool(len(self.parts), name="gockpt-finish")
        try:
            for part in self.parts:
                pool.submit(partial(finish, part))
            pool.wait(time.monotonic() + timeout)
        finally:
            pool.close(_END)

    def abort(self) -> None:
        """Drop what is not yet written and remove the files that were not finished.

        Raises:
            StorageError: one could not be removed; all else was.
        """
        failed: StorageError | None = None
        for writer in self._writers:
            try:
                writer.abort()
            except StorageError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    @property
    def seconds(self) -> list[float]:
        """For how long the disk of each part was busy."""
        return [writer.busy.seconds for writer in self._writers]

    def slow(self) -> str | None:
        """The volume that holds the others up, in words; None if there is none."""
        if not self._volumes:
            return None
        parts = zip(self.parts, self.seconds, strict=True)
        rates = [part.size / max(seconds, 1e-9) for part, seconds in parts]
        slowest = rates.index(min(rates))
        others = rates[:slowest] + rates[slowest + 1 :]
        if not others or self.seconds[slowest] < SLOW_S:
            return None
        usual = statistics.median(others)
        if rates[slowest] >= SLOW * usual:
            return None
        return (
            f"volume {self._volumes[slowest]} is slow: it took {rates[slowest] / 1e6:.0f} MB/s, "
            f"the others {usual / 1e6:.0f} MB/s"
        )

    @contextmanager
    def _named(self, part: Part) -> Iterator[None]:
        """Let the first failure end all parts, and say which volume it was."""
        try:
            yield
        except StorageError as error:
            if self._failure is None:
                self._failure = self._naming(part, error)
                for writer in self._writers:
                    writer.give_up(self._failure)
            if self._failure is error:
                raise
            raise self._failure from error

    def _naming(self, part: Part, error: StorageError) -> StorageError:
        if not self._volumes:
            return error
        return on_volume(self._volumes[part.file], error)
