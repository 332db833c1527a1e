"""What checkpoints a directory holds: decided by their manifests alone, never by names or pointers.

Read-only; for agents, restore and the commands. What always holds: a checkpoint is valid only if
the manifests of all its ranks are there, valid and of one mind, and every file they name is there
at its full size. (Contents are checked when they are read.) The newest is the valid one with the
highest *sequence*; its step may be lower than that of an older one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gockpt.errors import CorruptError, StorageError
from gockpt.storage import fs
from gockpt.storage.format import MAX_MANIFEST, decode_manifest
from gockpt.storage.names import CHECKPOINT, MARKS, TRASH, CheckpointName, parse_name
from gockpt.storage.places import locate
from gockpt.storage.records import Manifest

_MANIFEST = re.compile(r"rank-(\d{5}|[1-9]\d{5,7})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A directory that is, or looks like, a checkpoint."""

    path: Path
    name: CheckpointName | None
    """What its name says; None if it is no checkpoint's name."""
    manifests: tuple[Manifest, ...]
    """By rank; all of them if the checkpoint is valid, else those that could be read."""
    problem: str | None
    """Why it cannot be restored, in one line; None: it is valid."""
    committed: bool
    """Whether every rank's manifest is there, good or not. Else it was never finished."""
    marks: tuple[str, ...] = ()
    """Why it stays for ever: ``pinned``, ``kept``."""
    volumes: tuple[Path, ...] = ()
    """Where the user says that parts may be, besides where they were written."""

    @property
    def sequence(self) -> int:
        if self.name is not None:
            return self.name.sequence
        return self.manifests[0].sequence if self.manifests else -1

    @property
    def step(self) -> int:
        if self.name is not None:
            return self.name.step
        return self.manifests[0].step if self.manifests else -1


def scan(root: Path, volumes: Sequence[Path] = ()) -> list[Found]:
    """All directories that look like checkpoints, highest sequence first; none without ``root``.

    Args:
        volumes: where parts may be that are no longer where they were written.

    Raises:
        StorageError: ``root`` cannot be listed.
    """
    found = [
        _as_named(examine(root / name, volumes))
        for name in fs.listdir(root)
        if name.startswith(CHECKPOINT) and _may_be_one(root / name)
    ]
    return sorted(found, key=lambda one: (one.sequence, one.path.name), reverse=True)


def _may_be_one(path: Path) -> bool:
    try:
        return fs.is_own_dir(path)
    except StorageError:
        return True  # passing it over would hide a checkpoint; examine says what is wrong


def newest(root: Path, step: int | None = None) -> Found | None:
    """The valid checkpoint with the highest sequence (of ``step``, if given), or None."""
    for found in scan(root):
        if found.problem is None and step in (None, found.step):
            return found
    return None


def next_sequence(root: Path) -> int:
    """A sequence number above all that any directory here, whatever its state, has in its name."""
    names = (parse_name(name.removeprefix(TRASH)) for name in fs.listdir(root))
    return 1 + max((name.sequence for name in names if name is not None), default=0)


def examine(path: Path, volumes: Sequence[Path] = ()) -> Found:
    """Judge one directory by what is in it, whatever its name; problems are told, not raised."""
    manifests: list[Manifest] = []
    problem, committed = None, True  # until it is known better: what is unreadable is not rubbish
    marks: tuple[str, ...] = ()
    try:
        names = fs.listdir(path)
        marks = tuple(mark for mark in MARKS if mark in names)
        ranks = _ranks(names)
        committed = bool(ranks)
        for rank, file in ranks.items():
            manifests.append(_read(path / file, rank))
        if manifests:
            committed = len(manifests) >= manifests[0].world_size
        _check(path, manifests, volumes)
    except StorageError as error:
        problem = str(error)
    return Found(
        path=path,
        name=parse_name(path.name),
        manifests=tuple(manifests),
        problem=problem,
        committed=committed,
        marks=marks,
        volumes=tuple(volumes),
    )


def _as_named(found: Found) -> Found:
    """Among other checkpoints, one whose name contradicts its manifests must not count."""
    if found.problem is not None:
        return found
    stated = found.manifests[0].name
    if found.name == stated:
        return found
    return replace(found, problem=f"its manifest says {stated}; was the directory renamed?")


def _ranks(names: list[str]) -> dict[int, str]:
    matches = [_MANIFEST.fullmatch(file) for file in names]
    return {int(match[1]): match[0] for match in matches if match is not None}


def _read(path: Path, rank: int) -> Manifest:
    try:
        manifest = decode_manifest(fs.read_bytes(path, limit=MAX_MANIFEST))
    except CorruptError as error:
        raise CorruptError(f"{path.name}: {error}", path=path) from error
    if manifest.rank != rank:
        raise CorruptError(f"{path.name} is the manifest of rank {manifest.rank}", path=path)
    return manifest


def _check(path: Path, manifests: list[Manifest], volumes: Sequence[Path]) -> None:
    """Raise CorruptError if the manifests are not those of one whole checkpoint."""
    if not manifests:
        raise CorruptError("it was never finished: it has no manifest", path=path)
    first = manifests[0]
    if [one.rank for one in manifests] != list(range(first.world_size)):
        raise CorruptError(
            f"it was never finished: {len(manifests)} of {first.world_size} manifests", path=path
        )
    for one in manifests:
        if _identity(one) != _identity(first):
            raise CorruptError(f"ranks 0 and {one.rank} are of different checkpoints", path=path)
    for one in manifests:
        _check_sizes(path, one, volumes)


def _identity(manifest: Manifest) -> tuple[object, ...]:
    return (
        manifest.step,
        manifest.sequence,
        manifest.run_id,
        manifest.launch_id,
        manifest.world_size,
    )


def _check_sizes(path: Path, manifest: Manifest, volumes: Sequence[Path]) -> None:
    for file in manifest.files:
        place = locate(path, manifest, file, volumes)
        size = fs.file_size(place)
        name = f"{file.name} on volume {Path(file.volume).parent}" if file.volume else file.name
        if size is None:
            raise CorruptError(f"{name} is missing", path=place)
        if size != file.size:
            raise CorruptError(f"{name} has {size} bytes instead of {file.size}", path=place)
