"""The lock of a checkpoint directory: one owner for each rank, held by ``flock``.

Held by the agent, and by whoever deletes. The lock *is* the flock: it ends with its process,
however that dies. What the file says (pid, host) is for messages only.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gockpt.errors import LockedError, StorageError
from gockpt.storage import fs
from gockpt.storage.commit import make_directories
from gockpt.storage.names import PRIVATE

_PAYLOAD = 64 << 10
_PADDED = 1024
_ATTEMPTS = 100


class Lock:
    """A lock that is held. Made by :meth:`acquire`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd
        _held.add(self)

    @classmethod
    def acquire(cls, root: Path, rank: int, payload: Mapping[str, object]) -> Lock:
        """Take the lock of a rank in a checkpoint directory, which is created if need be.

        Args:
            payload: plain values; ``pid`` and ``host`` are named to whoever is refused.

        Raises:
            LockedError: another process has it; the message names it.
            StorageError: the lock file cannot be used.
        """
        path = root / PRIVATE / f"rank-{rank:05d}.lock"
        make_directories(path.parent)
        for _ in range(_ATTEMPTS):
            fd = fs.open_lock(path)
            try:
                if not fs.try_flock(fd, path=path):
                    raise LockedError(_refusal(root, path))
                # The file may have been replaced between open and lock: then try the new one.
                if fs.same_file(fd, path):
                    _write(fd, path, payload)
                    return cls(path, fd)
            except BaseException:
                fs.close(fd)
                raise
            fs.close(fd)
        raise StorageError(f"{path} is replaced all the time; remove what does so", path=path)

    def describe(self, payload: Mapping[str, object]) -> None:
        """Say anew who has it.

        Raises:
            StorageError: the file cannot be written.
        """
        if self._fd is not None:
            _write(self._fd, self.path, payload)

    def still_ours(self) -> bool:
        """Whether the directory still holds the very lock file that we have locked."""
        return self._fd is not None and fs.same_file(self._fd, self.path)

    def release(self) -> None:
        """Give the lock back. The file stays: removing it would race with the next owner."""
        if self._fd is not None:
            fs.unlock(self._fd)
            self.forget()

    def forget(self) -> None:
        """Close the descriptor without unlocking: for a fork, whose parent keeps the lock."""
        if self._fd is not None:
            fs.close(self._fd)
            self._fd = None


def holder(path: Path) -> dict[str, object]:
    """What the owner of a lock file wrote into it; empty if that cannot be read."""
    try:
        return msgspec.json.decode(fs.read_bytes(path, limit=_PAYLOAD), type=dict[str, object])
    except (StorageError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _write(fd: int, path: Path, payload: Mapping[str, object]) -> None:
    # Padded, and cut only then: whoever reads at this moment sees the old owner or the new one.
    raw = msgspec.json.encode(payload).ljust(_PADDED)
    fs.pwrite_all(fd, memoryview(raw), 0, path=path)
    fs.truncate(fd, len(raw), path=path)


def _refusal(root: Path, path: Path) -> str:
    owner = holder(path)
    who = f"process {owner.get('pid', '?')}"
    if "trainer" in owner:  # ending the agent alone would not help: it would be replaced
        who = f"trainer {owner['trainer']} (its agent is {owner.get('pid', '?')})"
    who += f" on {owner.get('host', 'an unknown host')}"
    return f"{root} is in use by {who}; stop it or use another directory"


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    # A forked data worker that outlives its killed parent must not keep the lock.
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
