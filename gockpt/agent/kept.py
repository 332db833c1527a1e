"""The agent's side of the shared memory, and what a slot holds once its checkpoint is complete and
proved: enough to write it, to restore it from memory, or to hand it to another trainer.

Belongs to the agent's loop; the thread that commits says only what has become durable.
What always holds: an image is offered for restoring with a hash of each of its bytes, and these are
the hashes that were taken when it was written, wherever it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gockpt.agent import proof
from gockpt.agent.channel import Channel
from gockpt.agent.job import Job
from gockpt.agent.protocol import (
    Adopt,
    Attach,
    Held,
    Hello,
    Image,
    Open,
    Seal,
    Structure,
)
from gockpt.arena import Segment
from gockpt.errors import StorageError
from gockpt.state import Entry
from gockpt.storage import fs
from gockpt.storage.format import digest, encode_manifest
from gockpt.storage.header import build_header
from gockpt.storage.names import CheckpointName
from gockpt.storage.records import (
    EXTENT,
    Extent,
    FileRecord,
    Manifest,
    file_name,
    tensor_records,
)


@dataclass(slots=True, kw_only=True)
class Kept:
    """A checkpoint that is complete in its slot."""

    opened: Open
    structure: Structure
    seal: Seal
    outcome: proof.Outcome
    replayed: int
    memory: Segment
    manifest: Manifest | None = None
    """As it was committed; None: it is not durable yet."""

    @classmethod
    def of(cls, job: Job) -> Kept:
        """What a job has come to.

        Raises:
            StorageError: it is not complete.
        """
        if job.seal_message is None or job.outcome is None:
            raise StorageError("a checkpoint was finished before it was complete")
        return cls(
            opened=job.opened,
            structure=job.structure,
            seal=job.seal_message,
            outcome=job.outcome,
            replayed=job.replayed,
            memory=job.slot,
        )

    @property
    def entries(self) -> list[Entry]:
        """What the file holds."""
        present = (self.structure.layout.entries[index] for index in self.seal.present)
        return [*present, *self.seal.extra_entries]

    @property
    def header(self) -> bytes:
        """The header of the file."""
        size = self.structure.layout.size
        return build_header(self.entries, size, self.opened.header_reserve)

    def path(self, root: Path) -> Path:
        """The checkpoint's directory."""
        return directory_of(root, self.opened)

    def describe(self, hello: Hello, extents: list[Extent]) -> Manifest:
        """The manifest, for an image in one file with these extents."""
        opened, size = self.opened, self.structure.layout.size
        reserve = opened.header_reserve
        return Manifest(
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
                FileRecord(name=file_name(hello.rank), size=reserve + size, data_start=reserve),
            ),
            tensors=tensor_records(self.entries),
            groups=self.seal.groups,
            extras=self.seal.extras,
            recipe={"updates": opened.step - opened.base, "replayed": self.replayed},
            proof=proof.as_json(self.outcome),
            extents=tuple(extents),
        )

    def image(self, hello: Hello) -> Image:
        """For restoring it from memory, as one file however it was, or will be, divided."""
        header = _hashed(memoryview(self.header), 0)
        data = self._unwritten() if self.manifest is None else self._written(self.manifest)
        manifest = self.describe(hello, [*header, *data])
        return Image(slot=self.opened.slot, manifest=encode_manifest(manifest))

    def _unwritten(self) -> Iterator[Extent]:
        """Of what has no hash yet."""
        memory = memoryview(self.memory.memory)[: self.structure.layout.size]
        return _hashed(memory, self.opened.header_reserve)

    def _written(self, manifest: Manifest) -> Iterator[Extent]:
        """As they were hashed when they were written; files hold parts of the slot in order."""
        shift = self.opened.header_reserve
        for number, file in enumerate(manifest.files):
            for extent in manifest.extents:
                if extent.file == number and extent.offset >= file.data_start:
                    offset = shift + extent.offset - file.data_start
                    yield msgspec.structs.replace(extent, file=0, offset=offset)
            shift += file.size - file.data_start

    def pending(self) -> Adopt | None:
        """What another agent would need to finish it; None: it is durable."""
        if self.manifest is not None:
            return None
        return Adopt(
            opened=self.opened,
            structure=self.structure,
            seal=self.seal,
            outcome=self.outcome.verdict,
        )

    def stands(self, root: Path) -> bool:
        """Whether it may be restored: whoever deletes its directory means it to be gone."""
        return self.manifest is None or fs.is_dir(self.path(root))


def _hashed(memory: memoryview, start: int) -> Iterator[Extent]:
    """Extents of memory that lies from ``start`` on in a file."""
    for offset in range(0, len(memory), EXTENT):
        piece = memory[offset : offset + EXTENT]
        yield Extent(file=0, offset=start + offset, length=len(piece), xxh3=digest(piece))


class Slots:
    """All memory that is shared with the trainer, and what is complete in it."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}
        self._kept: dict[int, Kept] = {}
        self.changing = threading.Lock()
        """Held while a commit is told, and while all is handed over: each is told once."""

    def attach(self, name: str, segment: Segment) -> None:
        """New memory; where there was other memory of this name, all of that is given back.

        There may be fewer slots now: what was kept in one beyond them must not be offered.
        """
        old = self._segments.get(name)
        if old is not None and old is not segment:
            for one in self._segments.values():
                one.close()
            self._segments.clear()
            self._kept.clear()
        self._segments[name] = segment

    def segment(self, name: str) -> Segment:
        """The memory of this name."""
        return self._segments[name]

    @property
    def nbytes(self) -> int:
        """Of all memory."""
        return sum(segment.size for segment in self._segments.values())

    @property
    def steps(self) -> list[int]:
        """Of what is kept."""
        return sorted(kept.opened.step for kept in self._kept.values())

    def keep(self, job: Job) -> Kept:
        """The checkpoint is complete: from here on it can be restored from its slot."""
        kept = Kept.of(job)
        self._kept[job.opened.slot] = kept
        return kept

    def forget(self, slot: int) -> None:
        """What is in this slot counts no longer."""
        self._kept.pop(slot, None)

    def written(self, job: Job, manifest: Manifest | None) -> None:
        """A checkpoint has become durable, or (None) could not be written."""
        slot, sequence = job.opened.slot, job.opened.sequence
        kept = self._kept.get(slot)
        if kept is None or kept.opened.sequence != sequence:
            return  # the slot is another checkpoint's by now
        kept.manifest = manifest
        if manifest is None:
            self.forget(slot)

    def images(self, hello: Hello) -> list[Image]:
        """What can be restored from memory, the newest first."""
        root = Path(hello.directory)
        standing = [kept for kept in self._kept.values() if kept.stands(root)]
        standing.sort(key=lambda kept: kept.opened.sequence, reverse=True)
        return [kept.image(hello) for kept in standing]

    def send(self, channel: Channel) -> list[Held]:
        """Send all memory to another trainer; return what is in it."""
        for name, segment in self._segments.items():
            channel.send(Attach(name=name, size=segment.size), segment)
        return [
            Held(slot=slot, sequence=kept.opened.sequence, pending=kept.pending())
            for slot, kept in self._kept.items()
        ]


def directory_of(root: Path, opened: Open) -> Path:
    """The directory that a checkpoint is written to."""
    launch = opened.launch_id[:8]
    return root / str(CheckpointName(step=opened.step, sequence=opened.sequence, launch=launch))
