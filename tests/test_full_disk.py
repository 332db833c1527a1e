"""A disk that is full, fails or refuses: the old checkpoint stays, the room comes back, and the
training goes on as if nothing had been.

First on real file systems of a few megabytes, which this user must be allowed to mount; then by
fault points at every call of a save, which is any byte of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from identity_kit import Bag, Training, assert_same, checkpointer, one_pass, truth

import gockpt
from gockpt import faults
from gockpt.faults import Fault

DEADLINE = 15.0
SHAPES = ((256, 1024), (77,))
"""A checkpoint of 3 MiB, which is written as four extents at a time."""
EVERY = 2
DISK = 24 << 20


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


def passes(ckpt: gockpt.Checkpointer, training: Training, first: int, last: int) -> None:
    for step in range(first, last + 1):
        one_pass(ckpt, training, step)
        ckpt.step()


def undisturbed(steps: int) -> Bag:
    training = Bag(shapes=SHAPES)
    for step in range(1, steps + 1):
        training.compute(step)
        training.update(step)
    return training


def expect(root: Path, steps: list[int]) -> None:
    """Only these are there, soon (what is too much is deleted behind the commit), and whole."""
    deadline = time.monotonic() + DEADLINE
    while (names := found(root)) != [f"step-{step:09d}" for step in steps]:
        assert time.monotonic() < deadline, names
        time.sleep(0.005)
    for name in os.listdir(root):
        if name.startswith("step-"):
            assert gockpt.open(root / name).verify() == []


def found(root: Path) -> list[str]:
    """The beginnings of all names but the lock's; a directory in the trash is named whole."""
    names = [name for name in os.listdir(root) if name != ".gockpt"]
    return sorted(name[:14] if name.startswith("step-") else name for name in names)


# -- a real one ------------------------------------------------------------------------------------


def command(*words: str | Path) -> None:
    """Run a system tool; its last words if it fails."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"{words[0]}: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own, or a skipped test with the reason."""
    if os.geteuid():
        pytest.skip("only root may mount file systems")
    for tool in ("mount", "umount", *(["mkfs.ext4"] if kind == "ext4" else [])):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    disk = folder / "disk"
    disk.mkdir()
    if kind == "tmpfs":
        command("mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", disk)
    else:
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(DISK)
        command("mkfs.ext4", "-q", "-F", "-m", "0", image)
        command("mount", "-o", "loop", image, disk)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=200)


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path) as found:
        yield found


def room(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bfree * found.f_frsize


@contextlib.contextmanager
def filled(disk: Path, leave: int) -> Iterator[None]:
    """Somebody else's file, that leaves so many bytes."""
    path = disk / "filler"
    with path.open("wb") as file:
        # Room for everything is a little too large, as the list of the blocks needs some too.
        for spare in range(0, 1 << 20, 4096):
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, room(disk) - leave - spare)
                break
    os.sync()
    try:
        yield
    finally:
        path.unlink()
        os.sync()


PAGE = 4096


@pytest.mark.parametrize("reserving", [True, False], ids=["reserved", "written"])
def test_a_disk_that_fills_up(disk: Path, reserving: bool) -> None:
    """With no room, room for a part of the data, for most of it, and for all but the manifest."""
    training = Bag(shapes=SHAPES)
    root = disk / "checkpoints"
    with checkpointer(training, root, every=EVERY, windows=2, keep=1, on_error="warn") as ckpt:
        before = room(disk)
        passes(ckpt, training, 1, 3)
        ckpt.wait(DEADLINE)
        size = before - room(disk)
        assert (3 << 20) < size < (5 << 20)
        if not reserving:
            faults.arm([Fault(point="fs.fallocate", action="errno:EOPNOTSUPP", times=0)])
        step, expected = 3, 2
        for leave in (0, size // 3, size * 2 // 3, size - 3 * PAGE, size - 2 * PAGE, size - PAGE):
            with filled(disk, leave):
                before = room(disk)
                passes(ckpt, training, step + 1, step + 1)
                handle = ckpt.save()
                passes(ckpt, training, step + 2, step + 2)
                expect_refused(handle, root)
                assert room(disk) == before, f"with {leave} bytes left"
                expect(root, [expected])
            passes(ckpt, training, step + 3, step + 4)
            ckpt.wait(DEADLINE)
            step, expected = step + 4, step + 3
            expect(root, [expected])  # room has come back
        assert ckpt.engine is not None
        assert ckpt.engine.events["failed"] == 6
    assert_same(truth(training), truth(undisturbed(step)), "training was not disturbed")


def expect_refused(handle: gockpt.Handle, root: Path) -> None:
    with pytest.raises(gockpt.SpaceError, match="free some room") as raised:
        handle.wait(DEADLINE)
    error = raised.value
    assert (error.errno, error.step) == (errno.ENOSPC, handle.step)
    assert error.path is not None
    assert error.path.is_relative_to(root)


def test_a_directory_that_becomes_read_only(tmp_path: Path) -> None:
    """Nothing can be made, nothing can be deleted; when it can again, all goes on."""
    if shutil.which("chattr") is None:
        pytest.skip("chattr is not installed")
    with mounted("ext4", tmp_path) as disk:
        training = Bag(shapes=SHAPES)
        root = disk / "checkpoints"
        with checkpointer(training, root, every=EVERY, windows=2, keep=1, on_error="warn") as ckpt:
            passes(ckpt, training, 1, 3)
            ckpt.wait(DEADLINE)
            before = room(disk)
            command("chattr", "+i", root)
            try:
                passes(ckpt, training, 4, 4)
                handle = ckpt.save()
                passes(ckpt, training, 5, 5)
                with pytest.raises(gockpt.StorageError, match="cannot create") as raised:
                    handle.wait(DEADLINE)
                assert (raised.value.errno, raised.value.step) == (errno.EPERM, 4)
                expect(root, [2])
                assert room(disk) == before
            finally:
                command("chattr", "-i", root)
            passes(ckpt, training, 6, 7)
            ckpt.wait(DEADLINE)
            expect(root, [6])
        assert_same(truth(training), truth(undisturbed(7)), "training was not disturbed")


def test_a_file_system_that_is_mounted_read_only_from_now_on(tmp_path: Path) -> None:
    """As a kernel does after an error of the disk: every call is refused, even the lock's."""
    training = Bag(shapes=SHAPES)
    with checkpointer(training, tmp_path, every=EVERY, windows=2, on_error="warn") as ckpt:
        passes(ckpt, training, 1, 3)
        ckpt.wait(DEADLINE)
        writing = ("create", "pwrite", "truncate", "fallocate", "mkdir", "rename", "unlink")
        faults.arm(
            Fault(point=f"fs.{call}", action="errno:EROFS", times=0)
            for call in (*writing, "rmtree", "fdatasync", "fsync_dir")
        )
        passes(ckpt, training, 4, 4)
        handle = ckpt.save()
        passes(ckpt, training, 5, 5)
        with pytest.raises(gockpt.StorageError, match="Read-only") as raised:
            handle.wait(DEADLINE)
        assert (raised.value.errno, raised.value.step) == (errno.EROFS, 4)
        faults.disarm()
        expect(tmp_path, [2])
        passes(ckpt, training, 6, 7)
        ckpt.wait(DEADLINE)
        expect(tmp_path, [2, 6])


@contextlib.contextmanager
def forbidden(directory: Path) -> Iterator[None]:
    """This user may not write there. Root may anywhere, so it becomes somebody else meanwhile."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        directory.chmod(0o555)
        try:
            yield
        finally:
            directory.chmod(0o755)


def test_a_directory_that_this_user_may_not_write_to_any_more(tmp_path: Path) -> None:
    training = Bag(shapes=SHAPES)
    with checkpointer(training, tmp_path, every=EVERY, windows=2, on_error="warn") as ckpt:
        passes(ckpt, training, 1, 3)
        ckpt.wait(DEADLINE)
        with forbidden(tmp_path):
            passes(ckpt, training, 4, 4)
            handle = ckpt.save()
            passes(ckpt, training, 5, 5)
            with pytest.raises(gockpt.StorageError, match="cannot create") as raised:
                handle.wait(DEADLINE)
        assert (raised.value.errno, raised.value.step) == (errno.EACCES, 4)
        expect(tmp_path, [2])
        passes(ckpt, training, 6, 7)
        ckpt.wait(DEADLINE)
        expect(tmp_path, [2, 6])
    assert_same(truth(training), truth(undisturbed(7)), "training was not disturbed")


# -- any call --------------------------------------------------------------------------------------


def calls_of_a_save(ckpt: gockpt.Checkpointer, training: Training, step: int) -> list[str]:
    """Names of the points that a save passes, in order."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "point", lambda name, path=None: seen.append(name))
        passes(ckpt, training, step, step + EVERY - 1)
        ckpt.wait(DEADLINE)
    return seen


FAILURES = ("ENOSPC", "EIO", "EDQUOT")
HARMLESS = {"fs.direct", "fs.close", "fs.listdir", "fs.rmtree"}
"""Falls back; means nothing; belong to the clean-up behind the commit."""
HELPLESS = {"fs.create", "fs.pwrite", "fs.fdatasync", "fs.truncate"}
"""Once all data is written, a failure of these is the end (the clean-up makes none of them)."""


@pytest.mark.parametrize("failure", FAILURES)
def test_every_call_of_a_save_fails_once(failure: str, tmp_path: Path) -> None:
    """Header, each of several extents, manifest, names: one checkpoint is lost, nothing else is.

    And not even that one, where the failure came in time for another attempt.
    """
    training = Bag(shapes=SHAPES)
    with checkpointer(training, tmp_path, every=EVERY, windows=2, keep=1, on_error="warn") as ckpt:
        passes(ckpt, training, 1, 5)
        ckpt.wait(DEADLINE)
        calls = calls_of_a_save(ckpt, training, 6)
        assert calls.count("fs.pwrite") > 5
        assert {"fs.create", "fs.fallocate", "fs.fdatasync", "fs.rename", "fs.mkdir"} <= set(calls)
        written = calls.index("output.written")
        step, newest, lost = 7, 6, 0
        for number, point in enumerate(calls):
            if not point.startswith("fs."):
                continue
            faults.arm(
                [Fault(point=point, action=f"errno:{failure}", after=calls[:number].count(point))]
            )
            passes(ckpt, training, step + 1, step + 1)
            handle = ckpt.save()
            passes(ckpt, training, step + 2, step + 2)
            step += 2
            failed = expect_whole_or_lost(handle, failure, tmp_path)
            assert not (failed and point in HARMLESS)
            helped = number < written or point not in HELPLESS
            assert failed or helped, "there was nobody any more who could have taken it again"
            lost += failed
            newest = newest if failed else step - 1
            assert ckpt.latest == newest, (point, number)
        assert lost > 8
        passes(ckpt, training, step + 1, step + 2)
        ckpt.wait(DEADLINE)
        expect(tmp_path, [step + 1])
        assert ckpt.engine is not None
        assert ckpt.engine.events["failed"] == lost
    assert_same(truth(training), truth(undisturbed(step + 2)), "training was not disturbed")


def expect_whole_or_lost(handle: gockpt.Handle, failure: str, root: Path) -> bool:
    """Whether the checkpoint was lost, by an error that says all there is to say."""
    with contextlib.suppress(gockpt.StorageError):
        handle.wait(DEADLINE)
    faults.disarm()
    error = handle.error
    if error is None:
        assert gockpt.open(handle.wait(0)).verify() == []
        return False
    assert isinstance(error, gockpt.StorageError)
    assert isinstance(error, gockpt.SpaceError) == (failure != "EIO")
    assert (error.errno, error.step) == (getattr(errno, failure), handle.step)
    assert error.path is not None
    assert error.path.is_relative_to(root)
    return True


@pytest.mark.parametrize("times", [1, 3, 20])
def test_short_writes_of_parallel_writers_are_completed(times: int, tmp_path: Path) -> None:
    training = Bag(shapes=SHAPES)
    with checkpointer(training, tmp_path, every=EVERY, windows=2) as ckpt:
        faults.arm([Fault(point="fs.pwrite.short", action="mark", after=3, times=times)])
        passes(ckpt, training, 1, 2)
        expected = truth(training)
        passes(ckpt, training, 3, 3)
        ckpt.wait(DEADLINE)
    assert not faults.armed("fs.pwrite.short") or times == 20
    assert_same(gockpt.open(tmp_path, 2).load(), expected, "written in pieces")
