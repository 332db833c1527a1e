"""From a slot to a committed checkpoint on disk.

Runs in the agent: ranges are handed over from its loop as they become final, one thread of its own
finishes the file and commits. Checkpoints are written one after the other, so that the older one is
durable first. What always holds: nothing is committed unless every write succeeded, and a
checkpoint that fails leaves no file behind.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gockpt import faults
from gockpt.agent import proof
from gockpt.agent.job import Job, extent_bytes
from gockpt.agent.protocol import Hello
from gockpt.errors import GockptError, StorageError
from gockpt.events import Recorder
from gockpt.pace import Pacer
from gockpt.storage.commit import commit, create_checkpoint
from gockpt.storage.header import build_header
from gockpt.storage.lock import Lock
from gockpt.storage.records import FileRecord, Manifest, file_name, tensor_records
from gockpt.storage.retention import discard, prune
from gockpt.storage.writer import ImageWriter

WRITE_TIMEOUT = 3600.0
"""Seconds after which a disk that does not finish a checkpoint is given up."""


@dataclass(slots=True)
class Directory:
    """What all checkpoints of one agent share."""

    hello: Hello
    lock: Lock
    recorder: Recorder
    pacer: Pacer | None
    protect: set[Path]

    @property
    def root(self) -> Path:
        return Path(self.hello.directory)


class Output:
    """The file of one checkpoint."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._job: Job | None = None
        self._waiting: list[tuple[int, int]] = []
        self._writer: ImageWriter | None = None
        self._path: Path | None = None
        self._thread: threading.Thread | None = None

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
        """Create the file and write what is ready.

        Raises:
            StorageError: it cannot be created, or there is no room for it.
        """
        job = self._of_job()
        opened = job.opened
        root = self._directory.root
        self._path = create_checkpoint(
            root, step=opened.step, sequence=opened.sequence, launch=opened.launch_id
        )
        self._writer = ImageWriter(
            self._path / file_name(self._directory.hello.rank),
            memoryview(job.slot.memory)[: job.layout.size],
            opened.header_reserve,
            extent=extent_bytes(job.layout.size),
            pacer=self._directory.pacer,
            spans=self._directory.recorder,
            step=opened.step,
        )
        waiting, self._waiting = self._waiting, []
        for start, stop in waiting:
            self._writer.write(start, stop)

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
            self.discard()
            done(StorageError(f"writing the checkpoint failed: {error!r}", path=self._path))
        else:
            done(path)
            self._prune()
        finally:
            # Job and output know each other: let go, so that their memory does not wait for a
            # collection of garbage.
            self._job = self._writer = None

    def _commit(self) -> Path:
        job, writer, path = self._of_job(), self._writer, self._path
        if writer is None or path is None or job.seal_message is None or job.outcome is None:
            raise StorageError("a checkpoint was finished before it was complete")
        opened, hello = job.opened, self._directory.hello
        entries = job.present_entries()
        header = build_header(entries, job.layout.size, opened.header_reserve)
        extents = writer.finish(header, timeout=WRITE_TIMEOUT)
        faults.point("output.written")
        manifest = Manifest(
            step=opened.step,
            sequence=opened.sequence,
            run_id=hello.run_id,
            launch_id=opened.launch_id,
            rank=hello.rank,
            world_size=hello.world_size,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            strategy=opened.strategy,
            windows=opened.step - opened.base + 1,
            base=opened.base,
            fallback=opened.fallback,
            files=(
                FileRecord(
                    name=file_name(hello.rank),
                    size=opened.header_reserve + job.layout.size,
                    data_start=opened.header_reserve,
                ),
            ),
            tensors=tensor_records(entries),
            groups=job.seal_message.groups,
            extras=job.seal_message.extras,
            recipe={"updates": opened.step - opened.base, "replayed": job.replayed},
            proof=proof.as_json(job.outcome),
            extents=tuple(extents),
        )
        with self._directory.recorder.span("commit", "commit", opened.step):
            commit(path, manifest, still_ours=self._directory.lock.still_ours)
        faults.point("output.committed")
        return path

    def _prune(self) -> None:
        keep = self._directory.hello.keep
        if keep is not None:
            # What could not be deleted is tried again after the next commit.
            with contextlib.suppress(StorageError):
                prune(self._directory.root, keep, self._directory.protect)

    def _of_job(self) -> Job:
        if self._job is None:
            raise StorageError("an output without a checkpoint")
        return self._job
