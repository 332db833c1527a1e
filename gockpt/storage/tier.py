"""The second tier: a slower directory that checkpoints are copied into behind the training.

Settings, and whose directory it is. What always holds: a tier is used by one directory of
checkpoints only. Both hold the same random identity, the tier's being durable last, so that a tier
of another run is refused even when nobody is using it; the tier's lock refuses two at a time. A
directory without checkpoints takes on the identity of its tier: that is what a directory is after
its disk was lost.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import msgspec

from gockpt.errors import ConfigError, CorruptError
from gockpt.storage import fs
from gockpt.storage.catalog import next_sequence
from gockpt.storage.commit import replace_durably
from gockpt.storage.names import PRIVATE

_LIMIT = 64 << 10


class Tier(msgspec.Struct, frozen=True):
    """A second directory that every checkpoint is copied to as soon as the one before it is.

    What is committed faster than it can be copied is left out, the newest never. The directory is a
    directory of checkpoints like any other; restoring falls back to it.
    """

    path: str
    """Where; made if it is not there. No other run may use it."""
    keep: int | None = None
    """How many checkpoints stay there; None: all."""
    keep_every: int | None = None
    """There, checkpoints whose step is a multiple of this stay for ever."""
    patience: float = 60.0
    """Seconds without any progress after which it counts as stuck: ``close`` no longer waits for
    it, and the checkpoint in copy is no longer spared by the first tier's retention."""

    def check(self, root: Path) -> Tier:
        """The same with an absolute path, usable beside the checkpoints in ``root``.

        Raises:
            ConfigError: it is not.
        """
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"the tier's {name} must be at least 1, not {value!r}")
        if not self.patience > 0:
            raise ConfigError(f"the tier's patience must be above 0 s, not {self.patience}")
        # Not resolved: that would ask a file system that may hang.
        path, main = Path(self.path).absolute(), root.absolute()
        if path == main or path in main.parents or main in path.parents:
            raise ConfigError(f"the tier {path} and {main} overlap; choose a directory elsewhere")
        return msgspec.structs.replace(self, path=str(path))


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Which directory of checkpoints this is, or is the tier of."""

    id: str
    directory: str
    """Where it was when it got its identity (for messages)…"""
    host: str
    """…and on which host."""


def check_owner(root: Path, tier: Path) -> bool:
    """Whether the tier is known to be that of ``root``; False: it may become it.

    Raises:
        ConfigError: it is that of another directory.
        StorageError: one of them cannot be read.
    """
    theirs = _read(tier)
    if theirs is None:
        return False
    ours = _read(root)
    lost = ours is None and next_sequence(root) == 1
    if not lost and (ours is None or ours.id != theirs.id):
        raise ConfigError(
            f"{tier} is the tier of {theirs.directory} on {theirs.host}; "
            "give each directory of checkpoints a tier of its own"
        )
    return not lost


def claim(root: Path, tier: Path) -> None:
    """Give both the same identity, durably; to be called with both locks held.

    Raises:
        ConfigError: the tier is that of another directory.
        StorageError: one of them cannot be read or written.
    """
    check_owner(root, tier)
    identity = (
        _read(tier)
        or _read(root)
        or Identity(
            id=secrets.token_hex(16), directory=str(root.absolute()), host=socket.gethostname()
        )
    )
    for directory in (root, tier):
        if _read(directory) is None:
            _write(directory, identity)


def _path(directory: Path) -> Path:
    return directory / PRIVATE / "identity"


def _read(directory: Path) -> Identity | None:
    path = _path(directory)
    if fs.file_size(path) is None:
        return None
    try:
        return msgspec.json.decode(fs.read_bytes(path, limit=_LIMIT), type=Identity)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is damaged ({error}); remove it", path=path) from error


def _write(directory: Path, identity: Identity) -> None:
    replace_durably(_path(directory), msgspec.json.encode(identity))
