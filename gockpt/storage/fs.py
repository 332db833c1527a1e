"""File system calls, each with a named fault point: the only place in gockpt that makes them.

Runs in the agent (writing, deleting) and in whichever process restores. What always holds: an
``OSError`` never leaves this module, it becomes a :class:`StorageError` that carries path and errno
(:class:`SpaceError` when the device or a quota is full), and a partial write is never taken for a
whole one.

Fault points are called ``fs.<call>`` and are told the path. Seven more make the disk lie, when
armed with ``mark``: ``fs.pwrite.short`` and ``fs.pread.short`` (a part is done), ``fs.pwrite.lost``
(claimed, but not stored), ``fs.pwrite.late`` (claimed at once, stored :data:`LATE` seconds later),
``fs.pwrite.flip`` and ``fs.pread.flip`` (one bit is wrong), ``fs.sync.lost`` (claimed, not done).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gockpt import faults
from gockpt.errors import SpaceError, StorageError
from gockpt.storage.underway import noted

PAGE = 4096
"""Unit of direct I/O: memory, file offset and length are multiples of it."""

DIRECT = getattr(os, "O_DIRECT", 0)
"""The flag for I/O past the page cache; 0 where the system has none (macOS)."""

LATE = 2.0
"""Seconds by which ``fs.pwrite.late`` is late."""

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def storage_error(error: OSError, verb: str, path: Path) -> StorageError:
    """The error to raise for a failed call, saying what could not be done to which path."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FULL:
        advice = "free some room or lower `keep`"
        return SpaceError(f"cannot {verb} {path}: {reason}; {advice}", path=path, errno=error.errno)
    return StorageError(f"cannot {verb} {path}: {reason}", path=path, errno=error.errno)


@contextmanager
def _call(point: str, verb: str, path: Path) -> Iterator[None]:
    """One system call: noted while it is under way, with its fault point, its errors made ours."""
    try:
        with noted(path):
            faults.point(point, path)
            yield
    except OSError as error:
        raise storage_error(error, verb, path) from error


def page_memory(nbytes: int) -> mmap.mmap:
    """Page-aligned anonymous memory of at least ``nbytes``, zeroed, freed with its last user.

    Raises:
        StorageError: there is not so much memory.
    """
    try:
        memory = mmap.mmap(-1, max(PAGE, -(-nbytes // PAGE) * PAGE), flags=_PRIVATE)
    except (OSError, OverflowError) as error:
        raise StorageError(f"cannot get {nbytes} bytes of memory: {error}") from error
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages; only speed is lost
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


# --- opening ------------------------------------------------------------------------------------


def create(path: Path) -> int:
    """Create a file that must not exist yet and open it for writing, through the page cache."""
    with _call("fs.create", "create", path):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def create_direct(path: Path) -> tuple[int, str | None]:
    """Create a file that must not exist yet, for writing past the page cache if at all possible.

    Some file systems accept the flag and then refuse every write, so one page is really written
    (at offset 0, where the header goes later).

    Returns:
        The descriptor, and why it is *not* direct (None: it is).
    """
    fd = create(path)
    try:
        reason = set_direct(fd)
        if reason is None:
            try:
                pwrite_all(fd, memoryview(page_memory(PAGE)), 0, path=path)
            except StorageError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                set_buffered(fd)
                reason = f"the file system refuses direct writes ({error.__cause__})"
    except BaseException:
        drop(fd, path)
        raise
    return fd, reason


def open_read(path: Path, *, direct: bool = False) -> int:
    """Open a file for reading; ``direct`` reads past the page cache where the system lets us."""
    with _call("fs.open", "open", path):
        # Without O_NONBLOCK, a pipe put in a file's place would be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if direct:
        set_direct(fd)
    return fd


def open_lock(path: Path) -> int:
    """Open a lock file for reading and writing, created if it is not there."""
    with _call("fs.open", "open", path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def set_direct(fd: int) -> str | None:
    """Switch an open file to direct I/O; return why that is impossible, or None."""
    if not DIRECT:
        return "the system has no O_DIRECT"
    try:
        faults.point("fs.direct")
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | DIRECT)
    except OSError as error:
        return f"the file system has no O_DIRECT ({error.strerror})"
    return None


def set_buffered(fd: int) -> None:
    """Switch an open file back to the page cache, which takes any memory, offset and length."""
    with suppress(OSError):  # then the next write is refused again, and that is told
        faults.point("fs.buffered")
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~DIRECT)


def refuses_direct(error: StorageError) -> bool:
    """Whether an error is the answer of a file that cannot do direct I/O."""
    return error.errno in _NOT_DIRECT


def close(fd: int) -> None:
    """Close a descriptor. Errors mean nothing here: :func:`fdatasync` made the data durable."""
    with suppress(OSError):
        try:
            faults.point("fs.close")
        finally:
            os.close(fd)


def drop(fd: int, path: Path) -> None:
    """Close and remove a file that could not be written, behind an error that is already raised."""
    close(fd)
    with suppress(StorageError):
        unlink(path, missing_ok=True)


# --- data ---------------------------------------------------------------------------------------


def pwrite_all(fd: int, data: memoryview, offset: int, *, path: Path) -> None:
    """Write all of ``data`` at ``offset``, however many calls that takes."""
    done = 0
    while done < len(data):
        with _call("fs.pwrite", "write to", path):
            count = _pwrite(fd, data[done:], offset + done, path)
            if count == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += count


def _pwrite(fd: int, data: memoryview, offset: int, path: Path) -> int:
    if faults.armed("fs.pwrite.lost", path):
        return len(data)
    if faults.armed("fs.pwrite.late", path):
        return _store_late(os.dup(fd), _copy(data), offset)
    if faults.armed("fs.pwrite.short", path):
        data = _half(data)
    if faults.armed("fs.pwrite.flip", path):
        data = _copy(data)
        data[len(data) // 2] ^= 1
    return os.pwrite(fd, data, offset)


def _copy(data: memoryview) -> memoryview:
    """The same bytes in memory that direct I/O takes."""
    memory = page_memory(len(data))
    memory[: len(data)] = data
    return memoryview(memory)[: len(data)]


def _store_late(fd: int, data: memoryview, offset: int) -> int:
    def store() -> None:
        os.pwrite(fd, data, offset)
        os.close(fd)

    threading.Timer(LATE, store).start()
    return len(data)


def _half(data: memoryview) -> memoryview:
    """The part of a buffer that a short call takes: whole pages, as direct I/O must go on."""
    return data[: max(PAGE, len(data) // 2 // PAGE * PAGE)]


def pread_into(fd: int, buffer: memoryview, offset: int, *, path: Path) -> int:
    """Read into ``buffer`` until it is full or the file ends; return the bytes read.

    A file opened for direct I/O that refuses it is read through the page cache instead.
    """
    done = 0
    direct = _is_direct(fd)
    while done < len(buffer):
        try:
            with _call("fs.pread", "read", path):
                count = _pread(fd, buffer[done:], offset + done, path)
        except StorageError as error:
            if not direct or not refuses_direct(error):
                raise
            direct = False
            set_buffered(fd)
            continue
        done += count
        # After a short direct read the rest is unaligned: it is the end of the file.
        if count == 0 or (direct and done % PAGE):
            break
    return done


def _pread(fd: int, buffer: memoryview, offset: int, path: Path) -> int:
    if faults.armed("fs.pread.short", path):
        buffer = _half(buffer)
    count = os.preadv(fd, [buffer], offset)
    if count and faults.armed("fs.pread.flip", path):
        buffer[count // 2] ^= 1
    return count


def _is_direct(fd: int) -> bool:
    return bool(DIRECT and fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT)


def read_bytes(path: Path, *, limit: int) -> bytes:
    """The whole of a small file.

    Raises:
        StorageError: it is larger than ``limit`` bytes, not a regular file, or cannot be read.
    """
    fd = open_read(path)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise StorageError(f"{path} is not a file of at most {limit} bytes", path=path)
        data = bytearray(found.st_size)
        count = pread_into(fd, memoryview(data), 0, path=path)
    finally:
        close(fd)
    return bytes(data[:count])


def truncate(fd: int, size: int, *, path: Path) -> None:
    """Set the file's size."""
    with _call("fs.truncate", "set the size of", path):
        os.ftruncate(fd, size)


def fallocate(fd: int, size: int, *, path: Path) -> bool:
    """Reserve room for ``size`` bytes; False where the file system cannot reserve.

    The raw system call, as C libraries imitate it elsewhere by writing into every block.

    Raises:
        SpaceError: there is not enough room.
    """
    call = _fallocate()
    if call is None:
        return False
    try:
        with _call("fs.fallocate", "reserve room for", path):
            if call(fd, 0, 0, size):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
    except StorageError as error:
        if error.errno in _NO_FALLOCATE:
            return False
        raise
    return True


@functools.cache
def _fallocate() -> ctypes._NamedFuncPointer | None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call


def fdatasync(fd: int, *, path: Path) -> bool:
    """Make the file's data, and the size needed to read it back, durable; False if it lied."""
    with _call("fs.fdatasync", "sync", path):
        if faults.armed("fs.sync.lost", path):
            return False
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # there, fsync stops at the drive's cache
        else:
            os.fdatasync(fd)
    return True


def fsync_dir(path: Path) -> bool:
    """Make the names in a directory durable; False if it lied."""
    with _call("fs.fsync_dir", "sync the directory", path):
        if faults.armed("fs.sync.lost", path):
            return False
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return True


# --- names --------------------------------------------------------------------------------------


def mkdir(path: Path, *, exist_ok: bool = False) -> None:
    """Create one directory."""
    with _call("fs.mkdir", "create the directory", path):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not exist_ok or not path.is_dir():
                raise


def listdir(path: Path) -> list[str]:
    """The names in a directory, sorted; none if there is no such directory."""
    with _call("fs.listdir", "list", path):
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []


def rename(source: Path, target: Path) -> None:
    """Give a file or directory another name on the same file system, atomically."""
    with _call("fs.rename", "rename", source):
        os.rename(source, target)


def unlink(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file."""
    with _call("fs.unlink", "remove", path):
        path.unlink(missing_ok=missing_ok)


def rmtree(path: Path) -> None:
    """Remove a directory and all that is in it; links are removed, not followed."""
    with _call("fs.rmtree", "remove", path):
        shutil.rmtree(path)


def file_size(path: Path) -> int | None:
    """Size in bytes of a regular file; None if there is no such file."""
    found = _look(path)
    return None if found is None or not stat.S_ISREG(found.st_mode) else found.st_size


def is_dir(path: Path) -> bool:
    """Whether this is a directory, or a link to one."""
    found = _look(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_own_dir(path: Path) -> bool:
    """Whether this is a directory itself, and not a link to one."""
    found = _look(path, follow_symlinks=False)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _look(path: Path, *, follow_symlinks: bool = True) -> os.stat_result | None:
    with _call("fs.stat", "look at", path):
        try:
            return os.stat(path, follow_symlinks=follow_symlinks)
        except (FileNotFoundError, NotADirectoryError):
            return None


def inode(path: Path) -> int:
    """Number of the file or directory on its file system: kept when it is renamed, not copied."""
    with _call("fs.stat", "look at", path):
        return os.stat(path).st_ino


def free_bytes(path: Path) -> int:
    """Room left for an ordinary user on the file system of ``path``."""
    with _call("fs.stat", "look at", path):
        return shutil.disk_usage(path).free


def same_file(fd: int, path: Path) -> bool:
    """Whether ``path`` still names the very file that ``fd`` has open."""
    with _call("fs.stat", "look at", path):
        try:
            return os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            return False


def try_flock(fd: int, *, path: Path) -> bool:
    """Take the exclusive lock of an open file at once; False if another process has it."""
    with _call("fs.flock", "lock", path):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def unlock(fd: int) -> None:
    """Give a lock back, for all processes that share the descriptor."""
    with suppress(OSError):
        faults.point("fs.unlock")
        fcntl.flock(fd, fcntl.LOCK_UN)
