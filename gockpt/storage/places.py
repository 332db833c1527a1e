"""Where the files of a checkpoint lie, beside its manifest or on volumes.

Read-only; for agents, restore and the commands. What always holds: a manifest never leads to a file
but ``…/gockpt-<16 digits>/<the checkpoint's name>/<a name of its own>``, below a directory that is
recorded in it or was given by the user, and nothing is believed of a file there that its hashes and
its header do not confirm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gockpt.errors import CorruptError, StorageError
from gockpt.storage import fs
from gockpt.storage.names import PRIVATE, SHARE, is_share
from gockpt.storage.records import FileRecord, Manifest

_LIMIT = 1 << 20


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """``.gockpt/volumes.json``: what a main directory knows of its volumes."""

    id: str
    """16 hexadecimal digits, its own name on every volume."""
    inode: int
    """Of the main directory: a copy has another one, and must not own the original's parts."""
    volumes: tuple[str, ...]
    """All that were ever used, absolute paths."""

    @property
    def shares(self) -> tuple[Path, ...]:
        """The directory's own sub-directory of each volume."""
        return tuple(Path(one) / f"{SHARE}{self.id}" for one in self.volumes)


def known_path(root: Path) -> Path:
    """Where a main directory keeps what it knows of its volumes."""
    return root / PRIVATE / "volumes.json"


def known(root: Path) -> Known | None:
    """What this directory knows of its volumes; None if nothing, or if that is a copy's."""
    path = known_path(root)
    if fs.file_size(path) is None:
        return None
    try:
        found = msgspec.json.decode(fs.read_bytes(path, limit=_LIMIT), type=Known)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    ours = is_share(f"{SHARE}{found.id}") and found.inode == fs.inode(root)
    return found if ours else None


def locate(
    directory: Path, manifest: Manifest, file: FileRecord, volumes: Sequence[Path] = ()
) -> Path:
    """Where a file of the checkpoint in ``directory`` is.

    In this order: beside the manifest, on the ``volumes`` that the user names, where it was
    written, on the volumes that the main directory knows.

    Raises:
        CorruptError: it is nowhere; the message names its volume.
        StorageError: a place could not be looked at.
    """
    beside = directory / file.name
    if not file.volume or fs.file_size(beside) is not None:
        return beside
    for path in _candidates(directory, manifest, file, volumes):
        if fs.file_size(path) is not None:
            return path
    share = Path(file.volume)
    advice = "" if fs.is_dir(share) else "; is it mounted, or elsewhere now (`volumes`)?"
    raise CorruptError(
        f"{file.name} is missing on volume {share.parent}{advice}",
        path=share / str(manifest.name) / file.name,
    )


def _candidates(
    directory: Path, manifest: Manifest, file: FileRecord, volumes: Sequence[Path]
) -> Iterator[Path]:
    share = Path(file.volume)
    inside = Path(share.name, str(manifest.name), file.name)
    for volume in (*volumes, share.parent):
        yield volume / inside
    try:
        found = known(directory.parent)
    except StorageError:  # not needed by what is whole without it
        return
    for path in () if found is None else found.volumes:
        yield Path(path) / inside
