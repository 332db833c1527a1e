"""The lock: one owner, however its predecessor died."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from storage_kit import in_child

from gockpt.errors import LockedError, StorageError
from gockpt.storage import Lock
from gockpt.storage.lock import holder

WHO = {"pid": 4711, "host": "node7"}


def test_second_owner_is_refused_by_name(tmp_path: Path) -> None:
    root = tmp_path / "new" / "checkpoints"
    lock = Lock.acquire(root, 0, WHO)
    with pytest.raises(LockedError, match=r"4711 on node7.*stop it"):
        Lock.acquire(root, 0, {})
    assert holder(lock.path) == WHO
    Lock.acquire(root, 1, {}).release()
    lock.release()
    Lock.acquire(root, 0, {}).release()


def test_payload_of_a_longer_predecessor_is_gone(tmp_path: Path) -> None:
    Lock.acquire(tmp_path, 0, {"host": "x" * 1000}).release()
    lock = Lock.acquire(tmp_path, 0, WHO)
    assert holder(lock.path) == WHO
    lock.release()


def test_unreadable_payload_still_refuses(tmp_path: Path) -> None:
    lock = Lock.acquire(tmp_path, 0, WHO)
    lock.path.write_bytes(b"\xff{")
    with pytest.raises(LockedError, match="unknown host"):
        Lock.acquire(tmp_path, 0, {})
    lock.release()


def test_ownership_ends_when_the_file_is_removed_or_replaced(tmp_path: Path) -> None:
    lock = Lock.acquire(tmp_path, 0, WHO)
    assert lock.still_ours()
    lock.path.unlink()
    assert not lock.still_ours()
    other = Lock.acquire(tmp_path, 0, {})
    assert not lock.still_ours()
    assert other.still_ours()
    lock.release()
    assert other.still_ours()
    other.release()
    assert not other.still_ours()


def test_death_releases_it_and_a_fork_neither_owns_nor_keeps_it(tmp_path: Path) -> None:
    """A data worker that outlives its killed parent must not lock out the next trainer."""
    read, write = os.pipe()

    def trainer() -> None:
        lock = Lock.acquire(tmp_path, 0, WHO)
        worker = os.fork()
        if worker == 0:
            os.write(write, b"lost" if not lock.still_ours() else b"kept")
            signal.pause()
        os.write(write, b"%8d" % worker)
        signal.pause()

    child = in_child(trainer, wait=False)
    said = b""
    while len(said) < 12:
        said += os.read(read, 100)
    with pytest.raises(LockedError, match="4711"):
        Lock.acquire(tmp_path, 0, {})
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    worker = int(said.replace(b"lost", b""))
    try:
        Lock.acquire(tmp_path, 0, {}).release()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_a_directory_that_cannot_be_made_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create"):
        Lock.acquire(tmp_path / "file" / "root", 0, {})
