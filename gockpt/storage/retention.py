"""Deleting: old checkpoints, failed ones, and what dead launches left behind.

Runs in the agent, which holds the directory's lock, and after a commit only. What always holds: the
newest valid checkpoint and whatever is protected stay; a directory loses its name, durably, before
anything in it is touched, so no half-deleted checkpoint is ever found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from gockpt.errors import StorageError
from gockpt.storage import fs
from gockpt.storage.catalog import Found, scan
from gockpt.storage.names import TRASH, parse_name


def prune(root: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Delete all but the ``keep`` newest valid checkpoints, and those protected.

    Damaged ones do not count; they go when they are older than all that is kept. Unfinished ones
    may be in the making and stay (see :func:`collect_leftovers`).

    Args:
        keep: at least 1.
        protect: directories to spare, such as the one restored from.

    Returns:
        What was deleted.

    Raises:
        StorageError: something could not be deleted; all else was.
        ValueError: ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    found = scan(root)
    kept = [one for one in found if one.problem is None][:keep]
    if len(kept) < keep:
        return []
    spared = {path.resolve() for path in protect}
    oldest = kept[-1].sequence
    return _delete(
        [
            one.path
            for one in found
            if one.committed
            and one.name is not None
            and one.sequence < oldest
            and one.path.resolve() not in spared
        ]
    )


def collect_leftovers(root: Path, alive_launch: str) -> list[Path]:
    """Delete trash, and the unfinished checkpoints of all launches but ``alive_launch``.

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

    trash = [
        root / name
        for name in fs.listdir(root)
        if name.startswith(TRASH) and parse_name(name.removeprefix(TRASH)) is not None
    ]
    return _delete(trash + [one.path for one in scan(root) if is_leftover(one)])


def discard(directory: Path) -> None:
    """Delete one checkpoint's directory, finished or not; no error if it is not there.

    Raises:
        StorageError: it could not be deleted.
    """
    if not fs.is_own_dir(directory):
        return
    trash = directory
    if not directory.name.startswith(TRASH):
        trash = directory.with_name(TRASH + directory.name)
        if fs.is_own_dir(trash):
            fs.rmtree(trash)
        fs.rename(directory, trash)
        fs.fsync_dir(trash.parent)
    fs.rmtree(trash)


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
