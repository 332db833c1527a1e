"""A main directory's shares of its volumes: claiming them, and removing parts from them.

Runs in the agent, which holds the main directory's lock. A share is named by an id of the main
directory, so several may use one volume. What always holds: nothing is ever touched outside of our
own shares; while there are parts of a checkpoint, the main directory durably has its directory, or
its trash; and parts are removed only once it is trash.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gockpt.errors import StorageError
from gockpt.storage import fs
from gockpt.storage.commit import make_directories, replace_durably
from gockpt.storage.places import Known, known, known_path


def claim(root: Path, volumes: Sequence[Path]) -> tuple[Path, ...]:
    """Make a share of each volume, and remember durably that there are such.

    Args:
        root: the main directory, which exists.
        volumes: absolute paths; made if they are not there.

    Returns:
        The share of each volume.

    Raises:
        StorageError: a volume cannot be used; the message names it.
    """
    if not volumes:
        return ()
    before = known(root) or Known(id=secrets.token_hex(8), inode=fs.inode(root), volumes=())
    names = tuple(dict.fromkeys([*before.volumes, *map(str, volumes)]))
    after = msgspec.structs.replace(before, volumes=names)
    if after != before:
        _remember(root, after)
    shares = tuple(volume / after.shares[0].name for volume in volumes)
    for volume, share in zip(volumes, shares, strict=True):
        try:
            make_directories(share)
        except StorageError as error:
            raise on_volume(volume, error) from error
    return shares


def on_volume(volume: Path, error: StorageError) -> StorageError:
    """The same error, saying which volume it happened on."""
    return type(error)(f"volume {volume}: {error}", path=error.path, errno=error.errno)


def _remember(root: Path, what: Known) -> None:
    replace_durably(known_path(root), msgspec.json.encode(what))


def remove_parts(root: Path, name: str) -> None:
    """Remove, durably, all parts of the checkpoint ``name``, which the main directory has no more.

    Parts on a volume that is not there just now are left.

    Raises:
        StorageError: a part could not be removed; all others were.
    """
    found = known(root)
    if found is None or name in fs.listdir(root):
        return
    error: StorageError | None = None
    for share in found.shares:
        try:
            if fs.is_own_dir(share / name):
                fs.rmtree(share / name)
                fs.fsync_dir(share)
        except StorageError as failed:
            error = error or failed
    if error is not None:
        raise error
