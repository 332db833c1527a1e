"""Marks of checkpoints that stay for ever: ``pinned`` by their user, ``kept`` by ``keep_every``.

Set by the agent, the trainer and the commands. A mark is an empty file in the checkpoint's own
directory: it shares the checkpoint's fate, and as it has no content, a durable name is all of it.
What always holds: retention looks for a pin once more after a checkpoint has lost its name, so one
that could be pinned stays, whenever that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gockpt.errors import NoCheckpointError
from gockpt.storage import fs
from gockpt.storage.catalog import Found, scan
from gockpt.storage.names import MARKS, PINNED


def mark(directory: Path, name: str) -> None:
    """Mark a checkpoint, durably.

    Raises:
        StorageError: it is not there (any more), or cannot be written to.
    """
    if fs.file_size(directory / name) is None:
        fs.close(fs.create(directory / name))
    fs.fsync_dir(directory)


def pin(root: Path, step: int, *, volumes: Sequence[Path] = ()) -> Path:
    """Keep the newest valid checkpoint of ``step`` until it is unpinned; its directory.

    Args:
        volumes: where parts of it may be that are no longer on the volumes they were written to.

    Raises:
        NoCheckpointError: there is none.
        StorageError: it cannot be written to.
    """
    valid = [one for one in _of_step(root, step, volumes) if one.problem is None]
    if not valid:
        raise NoCheckpointError(f"{root} has no valid checkpoint of step {step}", path=root)
    mark(valid[0].path, PINNED)
    return valid[0].path


def unpin(root: Path, step: int) -> list[Path]:
    """Leave the checkpoints of ``step`` to retention, whatever they were marked by.

    Returns:
        Those that had a mark.

    Raises:
        NoCheckpointError: there is no checkpoint of this step.
        StorageError: one cannot be written to.
    """
    marked = [one.path for one in _of_step(root, step) if one.marks]
    for directory in marked:
        for name in MARKS:
            fs.unlink(directory / name, missing_ok=True)
        fs.fsync_dir(directory)
    return marked


def _of_step(root: Path, step: int, volumes: Sequence[Path] = ()) -> list[Found]:
    found = scan(root, volumes)
    if not any(one.step == step for one in found):
        steps = ", ".join(str(one) for one in sorted({one.step for one in found})) or "none at all"
        raise NoCheckpointError(f"{root} has no checkpoint of step {step}, only {steps}", path=root)
    return [one for one in found if one.step == step]
