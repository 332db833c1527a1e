"""Deleting: old checkpoints, failed ones, and what dead launches left behind.

Runs in the agent, which holds the directory's lock, and after a commit only. What always holds: the
newest valid checkpoint and whatever is protected or marked stay, even if it is pinned at the very
moment; a directory loses its name, durably, before anything in it or of it on volumes is touched,
so no half-deleted checkpoint is ever found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from gockpt import faults
from gockpt.errors import StorageError
from gockpt.storage import fs
from gockpt.storage.catalog import Found, examine, scan
from gockpt.storage.names import PINNED, TRASH, parse_name
from gockpt.storage.volumes import remove_parts


def prune(root: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Delete all but the ``keep`` newest valid checkpoints, those marked, and those protected.

    Damaged ones do not count; they go when they are older than all that is kept. Unfinished ones
    may be in the making and stay (see :func:`collect_leftovers`).

    Args:
        keep: at least 1.
        protect: checkpoints to spare, such as the one restored from. Their names count: the same
            name in another directory is the same checkpoint.

    Returns:
        What was deleted.

    Raises:
        StorageError: something could not be deleted; all else was.
        ValueError: ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    found = scan(root)
    if faults.armed("retention.keep-nothing", root):
        return _delete([one.path for one in found if one.committed])
    kept = [one for one in found if one.problem is None][:keep]
    if len(kept) < keep:
        return []
    spared = {path.name for path in protect}
    oldest = kept[-1].sequence
    return _delete(
        [
            one.path
            for one in found
            if one.committed
            and one.name is not None
            and one.sequence < oldest
            and not one.marks
            and one.path.name not in spared
        ],
        _retire,
    )


def collect_leftovers(root: Path, alive_launch: str) -> list[Path]:
    """Delete trash, and the unfinished checkpoints of all launches but ``alive_launch``, with their
    parts on volumes.

    Only for the holder of the lock: no other launch can be writing then. Checkpoints that were
    committed and are damaged are evidence, and stay.

    Returns:
        What was deleted.

    Raises:
        StorageError: something could not be deleted; all else was.
    """
    alive = alive_launch[:8]

    def is_leftover(found: Found) -> bool:
        return not found.committed and found.name is not None and found.name.launch != alive

    return _delete(_trash(root) + [one.path for one in scan(root) if is_leftover(one)])


def empty_trash(root: Path) -> list[Path]:
    """Delete what has lost its name already and could not be deleted then.

    Returns:
        What was deleted.

    Raises:
        StorageError: something could not be deleted; all else was.
    """
    return _delete(_trash(root))


def _trash(root: Path) -> list[Path]:
    found = [
        root / name
        for name in fs.listdir(root)
        if name.startswith(TRASH) and parse_name(name.removeprefix(TRASH)) is not None
    ]
    return [one for one in found if not _reprieve(one)]


def discard(directory: Path) -> None:
    """Delete one checkpoint's directory, finished or not, and its parts on volumes; no error if it
    is not there.

    Raises:
        StorageError: it could not be deleted.
    """
    if fs.is_own_dir(directory):
        _remove(_to_trash(directory))


def _to_trash(directory: Path) -> Path:
    """Take the directory its name, durably; what it is called now."""
    if directory.name.startswith(TRASH):
        return directory
    trash = directory.with_name(TRASH + directory.name)
    if fs.is_own_dir(trash):
        fs.rmtree(trash)
    fs.rename(directory, trash)
    fs.fsync_dir(trash.parent)
    return trash


def _remove(trash: Path) -> None:
    # The trash last: by it, what a crash leaves on the volumes is found again.
    remove_parts(trash.parent, trash.name.removeprefix(TRASH))
    fs.rmtree(trash)


def _retire(directory: Path) -> None:
    """Delete a checkpoint that nobody has pinned until it lost its name."""
    trash = _to_trash(directory)
    if not _reprieve(trash):
        _remove(trash)


def _reprieve(trash: Path) -> bool:
    """Give a checkpoint that was pinned while it lost its name the name back."""
    found = examine(trash)
    if PINNED not in found.marks or found.problem is not None:
        return False
    fs.rename(trash, trash.with_name(trash.name.removeprefix(TRASH)))
    fs.fsync_dir(trash.parent)
    return True


def _delete(paths: list[Path], discard: Callable[[Path], None] = discard) -> list[Path]:
    """Discard all of them; the first error is raised at the end."""
    deleted: list[Path] = []
    error: StorageError | None = None
    for path in paths:
        try:
            discard(path)
            deleted.append(path)
        except StorageError as failed:
            error = error or failed
    if error is not None:
        raise error
    return deleted
