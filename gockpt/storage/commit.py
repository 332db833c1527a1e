"""Making a checkpoint exist: its directory, and the manifest that commits it.

Runs in the agent. What always holds: a manifest gets its name only after all files that it names
are durable, and only while the directory's lock is still ours; nothing committed is ever written
over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gockpt.errors import CorruptError, LockedError, StorageError
from gockpt.storage import fs
from gockpt.storage.format import encode_manifest
from gockpt.storage.names import CheckpointName
from gockpt.storage.records import Manifest, manifest_name


def make_directories(root: Path) -> None:
    """Create ``root`` and whatever is missing above it, durably."""
    if fs.is_dir(root):
        return
    make_directories(root.parent)
    fs.mkdir(root, exist_ok=True)
    fs.fsync_dir(root.parent)


def create_checkpoint(root: Path, *, step: int, sequence: int, launch: str) -> Path:
    """Create the directory of a new checkpoint; :func:`commit` makes its name durable.

    Args:
        launch: the launch id, of which the first 8 digits are used.

    Raises:
        StorageError: it exists already, or cannot be created.
    """
    directory = root / str(CheckpointName(step=step, sequence=sequence, launch=launch[:8]))
    fs.mkdir(directory)
    return directory


def commit(directory: Path, manifest: Manifest, *, still_ours: Callable[[], bool]) -> Path:
    """Make the rank's part of a checkpoint exist, its files being written and synced.

    Order: manifest under a temporary name → fsync → lock still ours? → rename → fsync of the
    directory and of the one above it.

    Returns:
        The manifest's path.

    Raises:
        LockedError: the lock was lost; nothing was committed.
        StorageError: a call failed, or there is a manifest already. The caller discards the
            directory.
    """
    _check_files(directory, manifest)
    raw = encode_manifest(manifest)
    path = directory / manifest_name(manifest.rank)
    if fs.file_size(path) is not None:
        raise StorageError(f"{path} exists already; a checkpoint is never written over", path=path)
    temporary = path.with_suffix(".json.tmp")
    _write_durably(temporary, raw)
    if not still_ours():
        fs.unlink(temporary, missing_ok=True)
        raise LockedError(f"another process took over {directory.parent}; nothing was committed")
    fs.rename(temporary, path)
    fs.fsync_dir(directory)
    fs.fsync_dir(directory.parent)
    return path


def _check_files(directory: Path, manifest: Manifest) -> None:
    for file in manifest.files:
        size = fs.file_size(directory / file.name)
        if size != file.size:
            raise CorruptError(
                f"{directory / file.name} has {size} bytes instead of {file.size}; not committed",
                path=directory / file.name,
            )


def _write_durably(path: Path, raw: bytes) -> None:
    fd = fs.create(path)
    try:
        fs.pwrite_all(fd, memoryview(raw), 0, path=path)
        fs.fdatasync(fd, path=path)
    finally:
        fs.close(fd)
