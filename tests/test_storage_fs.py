"""Every file system call can be made to fail, and fails as an error of ours that names the path."""

from __future__ import annotations

import ast
import contextlib
import errno
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gockpt import faults
from gockpt.errors import SpaceError, StorageError
from gockpt.faults import Fault
from gockpt.storage import fs

NO_CALLS = {"storage_error", "refuses_direct", "page_memory"}
"""These make no file system call."""

SWALLOWED = {"close", "drop", "set_buffered", "set_direct", "unlock"}
"""Their own errors mean nothing, or are told by what they return: the docstrings say why."""


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    found = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(found, b"x" * 5000)
    yield found
    with contextlib.suppress(OSError):  # the test may have closed it
        os.close(found)


def memory() -> memoryview:
    return memoryview(fs.page_memory(2 * fs.PAGE))


CALLS: dict[str, tuple[str, Callable[[Path, int], object]]] = {
    "create": ("create", lambda path, fd: fs.close(fs.create(path / "new"))),
    "create_direct": ("create", lambda path, fd: fs.close(fs.create_direct(path / "new")[0])),
    "open_read": ("open", lambda path, fd: fs.close(fs.open_read(path / "file"))),
    "open_lock": ("open", lambda path, fd: fs.close(fs.open_lock(path / "lock"))),
    "set_direct": ("direct", lambda path, fd: fs.set_direct(fd)),
    "set_buffered": ("buffered", lambda path, fd: fs.set_buffered(fd)),
    "close": ("close", lambda path, fd: fs.close(fd)),
    "drop": ("close", lambda path, fd: fs.drop(fd, path / "file")),
    "pwrite_all": ("pwrite", lambda path, fd: fs.pwrite_all(fd, memory(), 0, path=path / "file")),
    "pread_into": ("pread", lambda path, fd: fs.pread_into(fd, memory(), 0, path=path / "file")),
    "read_bytes": ("pread", lambda path, fd: fs.read_bytes(path / "file", limit=9000)),
    "truncate": ("truncate", lambda path, fd: fs.truncate(fd, 7, path=path / "file")),
    "fallocate": ("fallocate", lambda path, fd: fs.fallocate(fd, 9000, path=path / "file")),
    "fdatasync": ("fdatasync", lambda path, fd: fs.fdatasync(fd, path=path / "file")),
    "fsync_dir": ("fsync_dir", lambda path, fd: fs.fsync_dir(path)),
    "mkdir": ("mkdir", lambda path, fd: fs.mkdir(path / "directory")),
    "listdir": ("listdir", lambda path, fd: fs.listdir(path)),
    "rename": ("rename", lambda path, fd: fs.rename(path / "file", path / "other")),
    "unlink": ("unlink", lambda path, fd: fs.unlink(path / "file")),
    "rmtree": ("rmtree", lambda path, fd: fs.rmtree(path / "full")),
    "file_size": ("stat", lambda path, fd: fs.file_size(path / "file")),
    "is_dir": ("stat", lambda path, fd: fs.is_dir(path)),
    "inode": ("stat", lambda path, fd: fs.inode(path / "file")),
    "is_own_dir": ("stat", lambda path, fd: fs.is_own_dir(path)),
    "free_bytes": ("stat", lambda path, fd: fs.free_bytes(path)),
    "same_file": ("stat", lambda path, fd: fs.same_file(fd, path / "file")),
    "try_flock": ("flock", lambda path, fd: fs.try_flock(fd, path=path / "file")),
    "unlock": ("unlock", lambda path, fd: fs.unlock(fd)),
}
"""Function → the point that it must go through, and a call of it that can succeed."""


def functions() -> set[str]:
    return {
        name
        for name, _ in inspect.getmembers(fs, inspect.isfunction)
        if not name.startswith("_") and inspect.getmodule(getattr(fs, name)) is fs
    }


def test_the_table_of_calls_is_complete() -> None:
    assert functions() == CALLS.keys() | NO_CALLS


@pytest.mark.parametrize("name", CALLS)
def test_every_call_goes_through_its_point(name: str, tmp_path: Path, fd: int) -> None:
    point, call = CALLS[name]
    (tmp_path / "full").mkdir()
    faults.arm([Fault(point=f"fs.{point}", action="errno:EIO")])
    if name in SWALLOWED:
        call(tmp_path, fd)
    else:
        with pytest.raises(StorageError, match="Input/output") as caught:
            call(tmp_path, fd)
        assert caught.value.errno == errno.EIO
        assert tmp_path in (caught.value.path, *caught.value.path.parents)  # type: ignore[union-attr]
    assert not faults.armed(f"fs.{point}"), "the fault is still there: the point was not passed"


@pytest.mark.parametrize("name", sorted(CALLS.keys() - SWALLOWED))
def test_every_call_is_for_the_path_that_is_meant(name: str, tmp_path: Path, fd: int) -> None:
    point, call = CALLS[name]
    (tmp_path / "full").mkdir()
    for match, hit in (("/elsewhere/*", False), (f"{tmp_path}*", True)):
        faults.arm([Fault(point=f"fs.{point}", action="errno:ENOSPC", match=match)])
        if hit:
            with pytest.raises(SpaceError):
                call(tmp_path, fd)
        else:
            call(tmp_path, fd)
            undo(tmp_path)
        faults.disarm()


def undo(path: Path) -> None:
    """Put back what a call that was let through has changed."""
    for name in ("new", "lock"):
        (path / name).unlink(missing_ok=True)
    if (path / "directory").exists():
        (path / "directory").rmdir()
    (path / "full").mkdir(exist_ok=True)
    if (path / "other").exists():
        (path / "other").rename(path / "file")
    (path / "file").touch()


def test_the_documents_list_every_point() -> None:
    text = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    section = text[text.index("## Fault points") :]
    section = section[: section.index("\n## ")]
    missing = [point for point in sorted(points()) if f"`{point}`" not in section]
    assert not missing


def points() -> set[str]:
    """All names that are given to ``faults.point``, ``faults.armed`` or ``fs._call``."""
    found: set[str] = set()
    for path in (Path(__file__).parents[1] / "gockpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func)
            first = node.args[0]
            if called in {"faults.point", "faults.armed", "_call"} and isinstance(
                first, ast.Constant
            ):
                found.add(str(first.value))
    assert len(found) > 20
    return found


# -- a disk that lies ------------------------------------------------------------------------------


def test_one_bit_of_a_write_or_a_read_is_wrong(tmp_path: Path, fd: int) -> None:
    path = tmp_path / "file"
    data = memoryview(os.urandom(2 * fs.PAGE))
    faults.arm([Fault(point="fs.pwrite.flip", action="mark", match="*/file")])
    fs.pwrite_all(fd, data, 0, path=path)
    assert differing_bits(path.read_bytes(), bytes(data)) == 1
    fs.pwrite_all(fd, data, 0, path=path)
    faults.arm([Fault(point="fs.pread.flip", action="mark", match="*/file")])
    found = memory()
    assert fs.pread_into(fd, found, 0, path=path) == len(data)
    assert differing_bits(bytes(found), bytes(data)) == 1
    assert path.read_bytes() == bytes(data)


def differing_bits(one: bytes, two: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, two, strict=True))


def test_short_writes_and_reads_are_completed(tmp_path: Path, fd: int) -> None:
    path = tmp_path / "file"
    data = memoryview(os.urandom(7 * fs.PAGE + 100))
    faults.arm([Fault(point="fs.pwrite.short", action="mark", times=3)])
    fs.pwrite_all(fd, data, 0, path=path)
    assert path.read_bytes() == bytes(data)
    faults.arm([Fault(point="fs.pread.short", action="mark", times=3)])
    found = memoryview(fs.page_memory(8 * fs.PAGE))
    assert fs.pread_into(fd, found, 0, path=path) == len(data)
    assert found[: len(data)] == data


def test_a_delay_at_a_path_holds_up_that_path_alone(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        entered.set()
        assert go.wait(30)

    monkeypatch.setattr(faults.time, "sleep", sleep)
    faults.arm([Fault(point="fs.mkdir", action="delay:60", match="*/slow")])
    slow = threading.Thread(target=fs.mkdir, args=(tmp_path / "slow",))
    slow.start()
    assert entered.wait(30)
    fs.mkdir(tmp_path / "quick")
    assert fs.listdir(tmp_path) == ["file", "quick"]
    go.set()
    slow.join(30)
    assert fs.is_dir(tmp_path / "slow")
