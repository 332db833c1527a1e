"""Copying one checkpoint into another directory, where it is a checkpoint like any other.

Runs on the agent's thread for the second tier. What always holds: every byte is checked against its
recorded hash on the way; the order is that of a commit, manifests last; an attempt that fails
leaves nothing behind. Files are found through the manifest, wherever they lie, and lie side by side
in the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from gockpt.errors import StorageError
from gockpt.storage import fs
from gockpt.storage.catalog import Found
from gockpt.storage.commit import commit
from gockpt.storage.image import ImageFile, image_files
from gockpt.storage.marks import mark
from gockpt.storage.names import KEPT, PINNED
from gockpt.storage.records import EXTENT, Manifest
from gockpt.storage.retention import discard

Progress = Callable[[int], None]


def replicate(
    source: Found,
    root: Path,
    *,
    still_ours: Callable[[], bool],
    progress: Progress = lambda nbytes: None,
    keep_every: int | None = None,
) -> Path:
    """Copy a valid checkpoint into ``root``, under its own name.

    Args:
        still_ours: whether the lock of ``root`` is still held, asked before the commit.
        progress: told the bytes of each extent that was written; what it raises ends the copy.
        keep_every: steps whose copies are marked to stay for ever. A pin goes along.

    Returns:
        The copy's directory.

    Raises:
        CorruptError: the source is damaged.
        StorageError: it cannot be read, or the copy not be written.
        LockedError: the lock was lost.
    """
    target = root / source.path.name
    discard(target)  # the remains of an attempt, or a copy that has been damaged
    fs.mkdir(target)
    try:
        for manifest in source.manifests:
            for file in image_files(source.path, manifest):
                _copy(file, target / file.record.name, progress)
        if PINNED in source.marks:
            mark(target, PINNED)
        if keep_every is not None and source.step % keep_every == 0:
            mark(target, KEPT)
        for manifest in source.manifests:
            commit(target, _side_by_side(manifest), still_ours=still_ours)
    except BaseException:
        with suppress(StorageError):
            discard(target)
        raise
    return target


def _side_by_side(manifest: Manifest) -> Manifest:
    """The manifest of a copy, whose files lie beside it wherever they were before."""
    files = tuple(msgspec.structs.replace(file, volume="") for file in manifest.files)
    return msgspec.structs.replace(manifest, files=files)


def _copy(file: ImageFile, path: Path, progress: Progress) -> None:
    fd, buffered = fs.create_direct(path)
    try:
        fs.fallocate(fd, file.record.size, path=path)
        memory = memoryview(fs.page_memory(EXTENT))
        for extent in file.extents:
            # Open for no longer than it is read: while a write hangs, the source may be deleted,
            # and its room must be free then.
            with file.opened() as source:
                data = file.read_extent(source, extent, memory)
            if buffered is None:
                buffered = _write_direct(fd, memory, len(data), extent.offset, path)
            else:
                fs.pwrite_all(fd, data, extent.offset, path=path)
            if buffered is not None:
                # So that dirty memory stays small, and progress is that of the disk.
                fs.fdatasync(fd, path=path)
            progress(extent.length)
        fs.truncate(fd, file.record.size, path=path)
        fs.fdatasync(fd, path=path)
    finally:
        fs.close(fd)


def _write_direct(fd: int, memory: memoryview, length: int, offset: int, path: Path) -> str | None:
    """Write whole pages past the cache; why the file is buffered from now on, or None."""
    whole = memory[: -(-length // fs.PAGE) * fs.PAGE]
    try:
        fs.pwrite_all(fd, whole, offset, path=path)
    except StorageError as error:
        # A file system may refuse direct writes late, e.g. behind a short one.
        if not fs.refuses_direct(error):
            raise
        fs.set_buffered(fd)
        fs.pwrite_all(fd, whole, offset, path=path)
        return f"the file system refused a direct write at {offset}"
    return None
