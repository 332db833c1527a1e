"""A recorder of everything that :mod:`gockpt.storage.fs` does to a disk.

Runs in a process whose agent is a thread, on whichever thread makes a call. What always holds: the
log is in the order in which the calls were done, and a sync that was only claimed is not in it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gockpt import faults
from gockpt.storage import fs


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One thing that was done. Paths are below the recorded directory."""

    call: str
    path: Path
    by: str
    """The function that did it."""
    inode: int = 0
    target: Path = Path()
    data: bytes = b""
    offset: int = 0


class Patch(Protocol):
    """What replaces functions, such as pytest's ``MonkeyPatch``."""

    def setattr(self, target: Any, name: str, value: Any, /) -> None: ...


class Recorder:
    """Writes down what :mod:`gockpt.storage.fs` does below ``root``, in order."""

    def __init__(
        self, root: Path, patch: Patch, keep: Callable[[Op], object] = lambda op: None
    ) -> None:
        """Begin.

        Args:
            keep: told every operation, besides :attr:`log`.
        """
        self.root = root
        self._keep = keep
        self.log: list[Op] = []
        self._inodes: dict[int, tuple[int, Path]] = {}
        self._one_at_a_time = threading.RLock()
        self._real_point = faults.point
        patch.setattr(faults, "point", self._point)
        for call in ("create", "open_lock", "_pwrite", "truncate", "fallocate", "fdatasync"):
            self._wrap(call, patch)
        for call in ("mkdir", "rename", "unlink", "rmtree", "fsync_dir"):
            self._wrap(call, patch)

    def _wrap(self, call: str, patch: Patch) -> None:
        real = getattr(fs, call)

        @functools.wraps(real)
        def wrapped(*args: Any, **named: Any) -> Any:
            by = sys._getframe(1).f_code.co_name
            with self._one_at_a_time:
                if call == "open_lock" and args[0].exists():
                    return real(*args, **named)
                result = real(*args, **named)
                getattr(self, f"_{call.lstrip('_')}")(by, result, *args)
            return result

        patch.setattr(fs, call, wrapped)

    def _add(self, call: str, path: Path, by: str, **more: Any) -> None:
        self.log.append(Op(call=call, path=path.relative_to(self.root), by=by, **more))
        self._keep(self.log[-1])

    def _point(self, name: str, path: Path | None = None) -> None:
        self._real_point(name, path)
        if name == "output.committed" and path is not None:
            with self._one_at_a_time:
                self._add("committed", path, "")

    def _create(self, by: str, fd: int, path: Path) -> None:
        number = 1 + sum(op.call == "create" for op in self.log)
        self._inodes[fd] = (number, path)
        self._add("create", path, by, inode=number)

    _open_lock = _create

    def _of_file(self, call: str, by: str, fd: int, **more: Any) -> None:
        if fd in self._inodes:
            inode, path = self._inodes[fd]
            self._add(call, path, by, inode=inode, **more)

    def _pwrite(self, by: str, count: int, fd: int, data: memoryview, offset: int, _: Path) -> None:
        self._of_file("write", by, fd, data=bytes(data[:count]), offset=offset)

    def _truncate(self, by: str, _: None, fd: int, size: int) -> None:
        self._of_file("truncate", by, fd, offset=size)

    def _fallocate(self, by: str, done: bool, fd: int, size: int) -> None:
        if done:
            self._of_file("fallocate", by, fd, offset=size)

    def _fdatasync(self, by: str, done: bool, fd: int) -> None:
        if done:
            self._of_file("fdatasync", by, fd)

    def _mkdir(self, by: str, _: None, path: Path) -> None:
        self._add("mkdir", path, by)

    def _rename(self, by: str, _: None, source: Path, target: Path) -> None:
        self._add("rename", source, by, target=target.relative_to(self.root))

    def _unlink(self, by: str, _: None, path: Path) -> None:
        self._add("unlink", path, by)

    def _rmtree(self, by: str, _: None, path: Path) -> None:
        self._add("rmtree", path, by)

    def _fsync_dir(self, by: str, done: bool, path: Path) -> None:
        if done:
            self._add("fsync_dir", path, by)


# -- keeping it in a file --------------------------------------------------------------------------


class _ForGood:
    """Replaces functions until the process ends."""

    def setattr(self, target: Any, name: str, value: Any, /) -> None:
        setattr(target, name, value)


def record(root: Path, file: Path) -> None:
    """Write down, from now on, all that this process does below ``root``."""
    out = file.open("wb", buffering=0)

    def keep(op: Op) -> None:
        data = msgspec.msgpack.encode(op, enc_hook=str)
        out.write(len(data).to_bytes(8, "little") + data)

    Recorder(root, _ForGood(), keep)


def read(file: Path) -> list[Op]:
    """What was written down."""
    data, at, found = file.read_bytes(), 0, []
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        part = data[at + 8 : at + 8 + size]
        at += 8 + size
        found.append(msgspec.msgpack.decode(part, type=Op, dec_hook=lambda kind, text: kind(text)))
    return found
