"""From a slot to a committed checkpoint on disk.

Runs in the agent: ranges are handed over from its loop as they become final, one thread of its own
finishes the file and commits. Checkpoints are written one after the other, so that the older one is
durable first. What always holds: nothing is committed unless every write succeeded, and a
checkpoint that fails leaves no file behind, on no volume.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gockpt import faults
from gockpt.agent.copier import Copier
from gockpt.agent.job import Job, extent_bytes
from gockpt.agent.kept import Kept
from gockpt.agent.protocol import Hello
from gockpt.errors import GockptError, StorageError
from gockpt.events import Recorder
from gockpt.pace import Pacer
from gockpt.storage import fs
from gockpt.storage.commit import commit, create_checkpoint
from gockpt.storage.header import build_header
from gockpt.storage.lock import Lock
from gockpt.storage.marks import mark
from gockpt.storage.names import KEPT
from gockpt.storage.parts import Part, Placed, cut, place
from gockpt.storage.records import FileRecord, Manifest, file_name, part_name
from gockpt.storage.retention import discard, empty_trash, prune
from gockpt.storage.striped import StripedWriter
from gockpt.storage.tuning import Tuning
from gockpt.storage.writer import ImageWriter

WRITE_TIMEOUT = 3600.0
"""Seconds after which a disk that does not finish a checkpoint is given up."""


@dataclass(slots=True)
class Directory:
    """What all checkpoints of one agent share."""

    hello: Hello
    lock: Lock
    recorder: Recorder
    protect: set[Path]
    """The checkpoint that training went on from last, if any."""
    tier: Copier | None = None
    shares: tuple[Path, ...] = ()
    """Our own sub-directory of each volume; none where all is written to :attr:`root`."""
    pacers: tuple[Pacer, ...] = ()
    """Of each volume, or of the root; none where no rate is modelled."""
    tunings: dict[Path, Tuning] = field(default_factory=dict)
    """What was found out about each directory that files are written to."""

    @property
    def root(self) -> Path:
        return Path(self.hello.directory)

    @property
    def volumes(self) -> tuple[Path, ...]:
        """The volumes, as the user named them."""
        return tuple(share.parent for share in self.shares)

    def spare(self, path: Path) -> None:
        """Training went on from this checkpoint: it stays, and what it went on from before may go.

        The set is looked at by other threads, and must never be without both.
        """
        self.protect.add(path)
        self.protect.intersection_update({path})

    def tuning(self, place: Path) -> Tuning:
        """How a directory is written; what one checkpoint taught serves the next one."""
        return self.tunings.setdefault(place, Tuning())


class Output:
    """The files of one checkpoint."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._job: Job | None = None
        self._waiting: list[tuple[int, int]] = []
        self._writer: StripedWriter | None = None
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        self.nbytes = 0
        """Size of all files, once they are committed."""
        self.slow: str | None = None
        """The volume that held the others up, in words."""
        self.manifest: Manifest | None = None
        """Once it is committed."""

    def bind(self, job: Job) -> None:
        """The checkpoint that is written (it needs :meth:`ready` to be made, hence not before)."""
        self._job = job

    def ready(self, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` of the image are final."""
        if self._writer is not None:
            self._writer.write(start, stop)
        else:
            self._waiting.append((start, stop))

    @property
    def wants_to_start(self) -> bool:
        """Whether there is something to write and no file yet."""
        return bool(self._waiting) and self._writer is None

    def start(self) -> None:
        """Create the files and write what is ready.

        Raises:
            StorageError: it cannot be created, or there is no room for it.
        """
        job = self._of_job()
        opened = job.opened
        root, volumes = self._directory.root, self._directory.volumes
        self._path = create_checkpoint(
            root,
            step=opened.step,
            sequence=opened.sequence,
            launch=opened.launch_id,
            durably=bool(volumes),
        )
        size = job.layout.size
        parts = cut(size, len(volumes) or 1, extent_bytes(size))
        self._writer = StripedWriter(parts, volumes, self._create)
        waiting, self._waiting = self._waiting, []
        for start, stop in waiting:
            self._writer.write(start, stop)

    def _create(self, part: Part) -> ImageWriter:
        """Create the file of a part."""
        job, path, directory = self._of_job(), self._path, self._directory
        if path is None:
            raise StorageError("a part without a checkpoint")
        home = directory.root
        if directory.shares:
            home = directory.shares[part.file]
            path = home / path.name
            fs.mkdir(path)
        return ImageWriter(
            path / self._name(part),
            memoryview(job.slot.memory)[part.start : part.stop],
            job.opened.header_reserve,
            tuning=directory.tuning(home),
            extent=extent_bytes(job.layout.size),
            file=part.file,
            pacer=directory.pacers[part.file] if directory.pacers else None,
            spans=directory.recorder,
            step=job.opened.step,
        )

    def _name(self, part: Part) -> str:
        rank = self._directory.hello.rank
        return part_name(rank, part.file) if self._directory.shares else file_name(rank)

    def finish(self, done: Callable[[Path | GockptError], None]) -> None:
        """Finish and commit on a thread; ``done`` is called there with the path or what failed."""
        self._thread = threading.Thread(
            target=self._finish, args=(done,), name="gockpt-commit", daemon=True
        )
        self._thread.start()

    def discard(self) -> None:
        """Remove what was written; errors are of no interest any more."""
        self._waiting.clear()
        if self._writer is not None:
            with contextlib.suppress(StorageError):
                self._writer.abort()
            self._writer = None
        if self._path is not None:
            with contextlib.suppress(StorageError):
                discard(self._path)
            self._path = None

    def join(self, timeout: float) -> bool:
        """Wait for the thread; whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _finish(self, done: Callable[[Path | GockptError], None]) -> None:
        try:
            path = self._commit()
        except GockptError as error:
            self.discard()
            done(error)
        except Exception as error:  # noqa: BLE001 - a defect must be told, not end the thread
            where = self._path
            self.discard()
            done(StorageError(f"writing {where} failed: {error!r}", path=where))
        else:
            if self._directory.tier is not None:
                self._directory.tier.offer(path)
            done(path)
            self._prune()
        finally:
            # Job and output know each other: let go, so that their memory does not wait for a
            # collection of garbage.
            self._job = self._writer = None

    def _commit(self) -> Path:
        kept, writer, path = Kept.of(self._of_job()), self._writer, self._path
        if writer is None or path is None:
            raise StorageError("a checkpoint was finished before it was begun")
        hello = self._directory.hello
        placed = place(kept.entries, writer.parts)
        extents = writer.finish(self._headers(placed, writer.parts), timeout=WRITE_TIMEOUT)
        files = tuple(map(self._record, writer.parts, writer.seconds))
        self.nbytes = sum(file.size for file in files)
        self.slow = writer.slow()
        faults.point("output.written", path)
        manifest = msgspec.structs.replace(
            kept.describe(hello, extents), files=files, tensors=placed.records
        )
        with self._directory.recorder.span("commit", "commit", manifest.step):
            if hello.keep_every is not None and manifest.step % hello.keep_every == 0:
                mark(path, KEPT)  # durable before the commit is
            commit(path, manifest, still_ours=self._directory.lock.still_ours)
        self.manifest = manifest
        faults.point("output.committed", path)
        return path

    def _headers(self, placed: Placed, parts: tuple[Part, ...]) -> list[bytes]:
        reserve = self._of_job().opened.header_reserve
        return [
            build_header(entries, part.size, reserve)
            for entries, part in zip(placed.entries, parts, strict=True)
        ]

    def _record(self, part: Part, seconds: float) -> FileRecord:
        reserve, shares = self._of_job().opened.header_reserve, self._directory.shares
        return FileRecord(
            name=self._name(part),
            size=reserve + part.size,
            data_start=reserve,
            volume=str(shares[part.file]) if shares else "",
            seconds=round(seconds, 6),
        )

    def _prune(self) -> None:
        keep, tier = self._directory.hello.keep, self._directory.tier
        spared = set(self._directory.protect) | (tier.spared() if tier is not None else set())
        # What could not be deleted is tried again after the next commit.
        with contextlib.suppress(StorageError):
            empty_trash(self._directory.root)
        if keep is not None:
            with contextlib.suppress(StorageError):
                prune(self._directory.root, keep, spared)

    def _of_job(self) -> Job:
        if self._job is None:
            raise StorageError("an output without a checkpoint")
        return self._job
