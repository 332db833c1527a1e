"""Commit: whatever fails or dies at whatever call, a whole checkpoint is what is found after it."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kit import (
    LAUNCH,
    assert_holds,
    in_child,
    passes,
    save,
    small_image,
    write_image,
)

from gockpt import faults, storage
from gockpt.errors import CorruptError, LockedError, SpaceError, StorageError
from gockpt.faults import Fault
from gockpt.storage import fs


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


def save_and_prune(root: Path, step: int) -> None:
    save(root, step=step)
    storage.prune(root, 1)


def test_a_commit_is_the_last_thing_and_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [name for name, _ in passes(monkeypatch, lambda: save(tmp_path, step=1))]
    ordered = [name for name in calls if name not in {"fs.stat", "fs.listdir", "fs.close"}]
    assert ordered == [
        *("fs.mkdir", "fs.create", "fs.direct", "fs.pwrite", "fs.fallocate"),  # probe, room
        *("fs.pwrite", "fs.pwrite", "fs.truncate", "fs.fdatasync"),  # data, header
        *("fs.create", "fs.pwrite", "fs.fdatasync", "fs.rename"),  # manifest
        *("fs.fsync_dir", "fs.fsync_dir"),
    ]
    assert_holds(tmp_path, 1)


def test_names_of_new_directories_are_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(fs, "fsync_dir", synced.append)
    storage.make_directories(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    directory = save(tmp_path / "a" / "b", step=1)
    assert synced[2:] == [directory, directory.parent]


def test_no_commit_after_the_lock_was_lost(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    with pytest.raises(LockedError, match="nothing was committed"):
        save(tmp_path, step=2, still_ours=lambda: False)
    assert_holds(tmp_path, 1)


def test_the_lock_is_looked_at_after_the_manifest_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def record(name: str, path: Path | None = None) -> None:
        if name != "fs.close":  # means nothing
            calls.append(name)

    monkeypatch.setattr(faults, "point", record)

    def still_ours() -> bool:
        calls.append("lock")
        return True

    save(tmp_path, step=1, still_ours=still_ours)
    at = calls.index("lock")
    assert calls[at - 1] == "fs.fdatasync"
    assert calls[at + 1] == "fs.rename"


def test_a_committed_manifest_is_never_written_over(tmp_path: Path) -> None:
    directory = save(tmp_path, step=1)
    before = (directory / "rank-00000.json").read_bytes()
    other = tmp_path / "elsewhere"
    other.mkdir()
    manifest = write_image(other, small_image(2))
    (other / "rank-00000.safetensors").rename(directory / "rank-00000.safetensors")
    with pytest.raises(StorageError):
        storage.commit(directory, manifest, still_ours=lambda: True)
    assert (directory / "rank-00000.json").read_bytes() == before
    with pytest.raises(StorageError, match="exists"):
        storage.create_checkpoint(tmp_path, step=1, sequence=1, launch=LAUNCH)


def test_no_commit_of_files_that_are_not_all_there(tmp_path: Path) -> None:
    directory = storage.create_checkpoint(tmp_path, step=1, sequence=1, launch=LAUNCH)
    manifest = write_image(directory, small_image())
    os.truncate(directory / "rank-00000.safetensors", 5000)
    with pytest.raises(CorruptError, match="not committed"):
        storage.commit(directory, manifest, still_ours=lambda: True)
    (directory / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptError, match="not committed"):
        storage.commit(directory, manifest, still_ours=lambda: True)
    assert os.listdir(directory) == []


@pytest.mark.parametrize("name", ["ENOSPC", "EIO"])
def test_any_failing_call_of_a_save_leaves_the_old_one_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """ "Fail only the last small write", and every other one."""
    points = passes(monkeypatch, lambda: save(tmp_path, step=1))
    for point, before in points:
        if point in ("fs.direct", "fs.close"):  # falls back, tested with the writer; means nothing
            continue
        faults.arm([Fault(point=point, action=f"errno:{name}", after=before)])
        with pytest.raises(SpaceError if name == "ENOSPC" else StorageError) as caught:
            save(tmp_path, step=2)
        faults.disarm()
        assert caught.value.path is not None
        assert caught.value.errno is not None
        assert len(os.listdir(tmp_path)) == 1, (point, before)
        assert_holds(tmp_path, 1)
    save(tmp_path, step=2)
    assert_holds(tmp_path, 2)


def test_killed_at_any_call_the_old_or_the_new_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next launch cleans up, takes the same step again, and commits it."""
    template = tmp_path / "count"
    template.mkdir()
    save(template, step=1)
    points = passes(monkeypatch, lambda: save_and_prune(template, 2))
    renamed = points.index(("fs.rename", 0))
    assert {"fs.pwrite", "fs.rename", "fs.fsync_dir", "fs.rmtree"} <= {name for name, _ in points}
    for number, (point, before) in enumerate(points):
        root = tmp_path / str(number)
        root.mkdir()
        save(root, step=1)

        def die(root: Path = root, fault: str = point, after: int = before) -> None:
            faults.arm([Fault(point=fault, action="kill", after=after)])
            save_and_prune(root, 2)

        assert os.WTERMSIG(in_child(die)) == signal.SIGKILL
        committed = storage.newest(root, 2) is not None
        assert committed == (number > renamed)
        assert_holds(root, 2 if committed else 1)
        storage.collect_leftovers(root, "ffffffff")
        assert all(one.problem is None for one in storage.scan(root))
        save(root, step=2, launch="ffffffff")
        storage.prune(root, 1)
        assert_holds(root, 2)
        assert len(os.listdir(root)) == 1


def _mount_tmpfs(path: Path, size: int) -> None:
    """In a child: mount a file system of ``size`` bytes, in name spaces of the child's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x00020000):  # new user and mount name spaces
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, b"size=%d" % size):
        raise OSError(ctypes.get_errno(), "mount")


@pytest.mark.parametrize("reserving", [True, False])
def test_a_really_full_disk_keeps_the_old_one(tmp_path: Path, reserving: bool) -> None:
    """Sizes from room for one checkpoint (19 pages) to room for almost three."""

    def fill(size: int) -> None:
        _mount_tmpfs(tmp_path, size)
        save(tmp_path, step=1)
        if not reserving:
            faults.arm([Fault(point="fs.fallocate", action="errno:EOPNOTSUPP", times=0)])
        failed = False
        for step in (2, 3):
            try:
                save(tmp_path, step=step)
            except SpaceError:
                failed = True
                break
        assert failed
        assert len(os.listdir(tmp_path)) == step - 1
        assert_holds(tmp_path, step - 1)

    if in_child(lambda: _mount_tmpfs(tmp_path, 4096)):
        pytest.skip("this user may not mount in a name space of their own")
    for size in range(19 * 4096, 57 * 4096, 3 * 4096):
        assert in_child(lambda size=size: fill(size)) == 0, size


@pytest.mark.slow
def test_killed_at_random_moments_a_checkpoint_always_loads(tmp_path: Path) -> None:
    chance = random.Random(0)
    save(tmp_path, step=1)

    def train() -> None:
        step = storage.open(tmp_path).step
        while True:
            step += 1
            save_and_prune(tmp_path, step)

    last = 1
    for _ in range(200):
        child = in_child(train, wait=False)
        time.sleep(chance.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        step = storage.open(tmp_path).step
        assert step >= last
        last = step
        assert_holds(tmp_path, last)
        storage.collect_leftovers(tmp_path, "ffffffff")
    assert last > 1
