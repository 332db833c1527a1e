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
from gockpt.storage.places import locate
from gockpt.storage.records import Manifest, manifest_name


def make_directories(root: Path) -> None:
    """Create ``root`` and whatever is missing above it, durably."""
    if fs.is_dir(root):
        return
    make_directories(root.parent)
    fs.mkdir(root, exist_ok=True)
    fs.fsync_dir(root.parent)


def create_checkpoint(
    root: Path, *, step: int, sequence: int, launch: str, durably: bool = False
) -> Path:
    """Create the directory of a new checkpoint; :func:`commit` makes its name durable.

    Args:
        launch: the launch id, of which the first 8 digits are used.
        durably: make its name durable at once, so that its parts on volumes are never without it.

    Raises:
        StorageError: it exists already, or cannot be created.
    """
    directory = root / str(CheckpointName(step=step, sequence=sequence, launch=launch[:8]))
    fs.mkdir(directory)
    if durably:
        fs.fsync_dir(root)
    return directory


def commit(directory: Path, manifest: Manifest, *, still_ours: Callable[[], bool]) -> Path:
    """Make the rank's part of a checkpoint exist, its files being written and synced.

    Order: names of parts on volumes → manifest under a temporary name → fsync → lock still ours? →
    rename → fsync of the directory and of the one above it.

    Returns:
        The manifest's path.

    Raises:
        LockedError: the lock was lost; nothing was committed.
        StorageError: a call failed, or there is a manifest already. The caller discards the
            directory.
    """
    if directory.name != str(manifest.name):
        raise StorageError(f"{directory} is not the directory of {manifest.name}", path=directory)
    _sync_volumes(_check_files(directory, manifest), directory)
    raw = encode_manifest(manifest)
    path = directory / manifest_name(manifest.rank)
    if fs.file_size(path) is not None:
        raise StorageError(f"{path} exists already; a checkpoint is never written over", path=path)
    temporary = path.with_suffix(".json.tmp")
    write_durably(temporary, raw)
    if not still_ours():
        fs.unlink(temporary, missing_ok=True)
        raise LockedError(f"another process took over {directory.parent}; nothing was committed")
    fs.rename(temporary, path)
    fs.fsync_dir(directory)
    fs.fsync_dir(directory.parent)
    return path


def _check_files(directory: Path, manifest: Manifest) -> list[Path]:
    """The manifest's files, which are there at their full size."""
    paths = [locate(directory, manifest, file) for file in manifest.files]
    for file, path in zip(manifest.files, paths, strict=True):
        size = fs.file_size(path)
        if size != file.size:
            raise CorruptError(
                f"{path} has {size} bytes instead of {file.size}; not committed", path=path
            )
    return paths


def _sync_volumes(files: list[Path], directory: Path) -> None:
    """Make the names of files durable that are not in the checkpoint's own directory."""
    for place in dict.fromkeys(path.parent for path in files if path.parent != directory):
        fs.fsync_dir(place)
        fs.fsync_dir(place.parent)


def write_durably(path: Path, raw: bytes) -> None:
    """Create a small file, and return only when its content is durable (its name is not yet)."""
    fd = fs.create(path)
    try:
        fs.pwrite_all(fd, memoryview(raw), 0, path=path)
        fs.fdatasync(fd, path=path)
    finally:
        fs.close(fd)


def replace_durably(path: Path, raw: bytes) -> None:
    """Give a small file this content, durably; after a crash it has the old one or the new one."""
    make_directories(path.parent)
    temporary = path.with_name(f"{path.name}.tmp")
    fs.unlink(temporary, missing_ok=True)
    write_durably(temporary, raw)
    fs.rename(temporary, path)
    fs.fsync_dir(path.parent)
