"""Output that is there whole or not at all: written beside its place, then renamed.

What always holds: whatever ends the writing (an error, Ctrl-C, SIGTERM) leaves the place as it was
and nothing beside it; after SIGKILL the next writer of the same place removes what was left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from gockpt.cli import output
from gockpt.errors import ConfigError, StorageError
from gockpt.storage import fs

_MARK = ".gockpt-export-"


def check_place(out: Path, *, force: bool, ours: tuple[str, ...]) -> None:
    """Make sure, ahead of long work, that ``out`` can be written.

    Args:
        force: whether something may be there, to be replaced.
        ours: patterns of names; a directory with any other file in it is not replaced.

    Raises:
        ConfigError: it cannot; the message says what to do.
    """
    parent = out.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{out}: there is no directory {parent}; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{out}: {parent} cannot be written; name another place")
    if not os.path.lexists(out):
        return
    if not force:
        raise ConfigError(f"{out} is already there; name another place, or replace it by --force")
    if out.is_symlink() or (not out.is_dir() and not out.is_file()):
        raise ConfigError(f"{out} is no plain file or directory; name another place")
    if out.is_dir():
        others = [one.name for one in out.iterdir() if not any(one.match(name) for name in ours)]
        if others:
            raise ConfigError(
                f"{out} is a directory with {sorted(others)[0]!r} in it, which is not of an export "
                "like this; name another place"
            )


def check_room(out: Path, nbytes: int) -> None:
    """Make sure that ``nbytes`` fit where ``out`` is to be.

    Raises:
        ConfigError: with the bytes needed and those there are.
    """
    free = fs.free_bytes(out.absolute().parent)
    if nbytes > free:
        raise ConfigError(
            f"{out}: {output.size(nbytes)} are needed and {output.size(free)} are free; "
            "name a place on a larger disk"
        )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A name to write to, file or directory; it becomes ``out`` when the body has ended well.

    The body makes its files durable (:func:`gockpt.storage.fs.fdatasync`).

    Raises:
        StorageError: it cannot be renamed.
    """
    out = out.absolute()
    _sweep(out)
    temporary = out.with_name(f"{_MARK}{os.getpid()}-{out.name}")
    try:
        yield temporary
        _exchange(temporary, out)
    finally:
        with contextlib.suppress(StorageError):
            _remove(temporary)
    fs.fsync_dir(out.parent)


def _exchange(temporary: Path, out: Path) -> None:
    """Give the new one its name. A directory cannot be replaced in one call: the old one steps
    aside first, and back if that failed."""
    if not out.is_dir():
        fs.rename(temporary, out)
        return
    old = out.with_name(f"{_MARK}{os.getpid()}-old-{out.name}")
    fs.rename(out, old)
    try:
        fs.rename(temporary, out)
    except BaseException:
        fs.rename(old, out)
        raise
    with contextlib.suppress(StorageError):
        _remove(old)


def _sweep(out: Path) -> None:
    """Remove what processes left that were killed while they wrote to the same place."""
    for path in out.parent.glob(f"{_MARK}*-{out.name}"):
        pid = path.name.removeprefix(_MARK).removesuffix(f"-{out.name}")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(StorageError):
                _remove(path)


def _remove(path: Path) -> None:
    if fs.is_own_dir(path):
        fs.rmtree(path)
    else:
        fs.unlink(path, missing_ok=True)
