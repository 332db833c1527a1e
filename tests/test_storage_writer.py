"""The image writer: what it wrote is there, what failed is never hidden."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from storage_kit import Image, large_image, small_image, write_image

from gockpt import faults, storage
from gockpt.errors import SpaceError, StorageError
from gockpt.events import Recorder
from gockpt.faults import Fault
from gockpt.pace import Pacer
from gockpt.storage import fs
from gockpt.storage.format import digest
from gockpt.storage.tuning import Tuning
from gockpt.storage.writer import STAGE, ImageWriter

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture(scope="module")
def large() -> Image:
    return large_image()


def header_of(image: Image) -> bytes:
    return storage.build_header(image.entries, image.size, image.reserve)


def content_of(image: Image) -> bytes:
    return header_of(image) + bytes(image.view[: image.size])


def open_writer(path: Path, image: Image, *, depth: int = 3) -> ImageWriter:
    return ImageWriter(path, image.view, image.reserve, size=image.size, tuning=depth)


def write_whole(path: Path, image: Image) -> None:
    with open_writer(path, image) as writer:
        writer.write(0, image.size)
        writer.finish(header_of(image), timeout=200)


def can_write_direct(directory: Path) -> bool:
    """Whether a page really can be written past the page cache, found out independently."""
    path = directory / "probe"
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | getattr(os, "O_DIRECT", 1 << 30))
    except OSError:
        return False
    try:
        return os.pwrite(fd, fs.page_memory(4096), 0) == 4096
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink()


def test_default_configuration_writes_direct_where_the_file_system_can(
    tmp_path: Path, large: Image
) -> None:
    possible = can_write_direct(tmp_path)
    with open_writer(tmp_path / "x", large) as writer:
        writer.write(0, large.size)
        writer.finish(header_of(large))
        assert writer.direct == possible
        assert (writer.reason is None) == possible
    assert (tmp_path / "x").read_bytes() == content_of(large)


def test_ranges_in_any_order_and_hashes_of_what_is_on_disk(tmp_path: Path, large: Image) -> None:
    with open_writer(tmp_path / "x", large) as writer:
        writer.write(32 * MIB, large.size)
        writer.write(0, 16 * MIB)
        writer.write(16 * MIB, 32 * MIB)
        extents = writer.finish(header_of(large))
    raw = (tmp_path / "x").read_bytes()
    assert raw == content_of(large)
    end = 0
    for extent in extents:
        assert extent.offset == end
        end += extent.length
        assert digest(raw[extent.offset : end]) == extent.xxh3
    assert end == len(raw)


def test_file_has_its_exact_size_though_pages_are_written(tmp_path: Path) -> None:
    image = small_image()
    assert image.size % 4096
    write_image(tmp_path, image)
    assert (tmp_path / "rank-00000.safetensors").read_bytes() == content_of(image)


def test_image_without_data(tmp_path: Path) -> None:
    with ImageWriter(tmp_path / "x", memoryview(b""), 4096) as writer:
        extents = writer.finish(storage.build_header([], 0, 4096))
    assert [extent.length for extent in extents] == [4096]
    assert (tmp_path / "x").stat().st_size == 4096


def test_memory_that_is_not_aligned_goes_through_a_stage(tmp_path: Path) -> None:
    view = memoryview(fs.page_memory(3 * 4096))[8 : 8 + 2 * 4096]
    view[:] = os.urandom(len(view))
    with ImageWriter(tmp_path / "x", view, 4096, tuning=way(staged=False)) as writer:
        writer.write(0, len(view))
        writer.finish(storage.build_header([], len(view), 4096))
    assert (tmp_path / "x").read_bytes()[4096:] == bytes(view)


def way(*, staged: bool) -> Tuning:
    """Two writes in flight, the way given and kept."""
    tuning = Tuning(2, 2)
    tuning.staged = staged
    return tuning


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("size", [1, 4096, STAGE - 1, STAGE, STAGE + 1, 2 * STAGE + 4097])
def test_both_ways_write_and_hash_the_same(tmp_path: Path, size: int, staged: bool) -> None:
    memory = memoryview(fs.page_memory(size))
    memory[:size] = os.urandom(size)
    with ImageWriter(tmp_path / "x", memory, 4096, size=size, tuning=way(staged=staged)) as writer:
        writer.write(0, size)
        extents = writer.finish(storage.build_header([], size, 4096))
    raw = (tmp_path / "x").read_bytes()
    assert raw[4096:] == memory[:size]
    assert [extent.length for extent in extents] == [4096, size]
    assert extents[1].xxh3 == digest(memory[:size])


def test_what_changes_behind_a_stage_is_not_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash is that of the bytes which are written, though the slot were changed meanwhile."""
    memory = memoryview(fs.page_memory(2 * 4096))
    memory[:] = b"a" * len(memory)
    write = fs.pwrite_all

    def late(fd: int, data: memoryview, offset: int, *, path: Path) -> None:
        memory[:] = b"b" * len(memory)
        write(fd, data, offset, path=path)

    with ImageWriter(tmp_path / "x", memory, 4096, tuning=1) as writer:
        monkeypatch.setattr(fs, "pwrite_all", late)
        writer.write(0, len(memory))
        extents = writer.finish(storage.build_header([], len(memory), 4096))
    raw = (tmp_path / "x").read_bytes()
    assert raw[4096:] == b"a" * len(memory)
    assert digest(raw[4096:]) == extents[1].xxh3


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_file_system_that_refuses_direct_writes_is_written_all_the_same(
    tmp_path: Path, large: Image, passes: int
) -> None:
    """At the probe (0), or only later: a flag that was accepted proves nothing."""
    faults.arm([Fault(point="fs.pwrite", action="errno:EINVAL", after=passes)])
    with open_writer(tmp_path / "x", large) as writer:
        writer.write(0, large.size)
        writer.finish(header_of(large))
        assert not writer.direct
        assert "refuse" in str(writer.reason)
    assert (tmp_path / "x").read_bytes() == content_of(large)


def test_all_threads_may_be_refused_at_once(
    tmp_path: Path, large: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each falls back for itself, however far another one is with it."""
    both = threading.Barrier(2, timeout=200)
    refused: list[int] = []
    write = fs.pwrite_all

    def refuse_first(fd: int, data: memoryview, offset: int, *, path: Path) -> None:
        if len(data) == STAGE and len(refused) < 2:
            refused.append(offset)
            both.wait()
            raise StorageError("refused", path=path, errno=errno.EINVAL)
        write(fd, data, offset, path=path)

    with open_writer(tmp_path / "x", large, depth=2) as writer:
        if not writer.direct:
            pytest.skip("there is nothing to fall back from")
        monkeypatch.setattr(fs, "pwrite_all", refuse_first)
        writer.write(0, large.size)
        writer.finish(header_of(large))
    assert len(refused) == 2
    assert (tmp_path / "x").read_bytes() == content_of(large)


def test_file_system_without_the_flag(tmp_path: Path) -> None:
    faults.arm([Fault(point="fs.direct", action="errno:EINVAL")])
    with open_writer(tmp_path / "x", small_image()) as writer:
        assert "O_DIRECT" in str(writer.reason)


def test_short_writes_are_completed(tmp_path: Path, large: Image) -> None:
    faults.arm([Fault(point="fs.pwrite.short", action="mark", after=1, times=6)])
    write_whole(tmp_path / "x", large)
    assert (tmp_path / "x").read_bytes() == content_of(large)


@pytest.mark.parametrize("name", ["ENOSPC", "EIO", "EDQUOT"])
@pytest.mark.parametrize("passes", [0, 1, 2, 3, 4])
def test_every_failed_write_is_an_error(
    tmp_path: Path, large: Image, name: str, passes: int
) -> None:
    """The probe, each of three parallel data writes, the header: none can fail unnoticed."""
    faults.arm([Fault(point="fs.pwrite", action=f"errno:{name}", after=passes)])
    with pytest.raises(StorageError) as caught:
        write_whole(tmp_path / "x", large)
    assert isinstance(caught.value, SpaceError) == (name != "EIO")
    assert caught.value.path == tmp_path / "x"
    assert caught.value.errno is not None
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("point", ["fs.create", "fs.fallocate", "fs.truncate", "fs.fdatasync"])
def test_every_other_failed_call_is_an_error(tmp_path: Path, point: str) -> None:
    faults.arm([Fault(point=point, action="errno:ENOSPC")])
    with pytest.raises(SpaceError, match="room"):
        write_whole(tmp_path / "x", small_image())
    assert os.listdir(tmp_path) == []


def test_a_file_system_that_cannot_reserve_room_is_used_without(tmp_path: Path) -> None:
    faults.arm([Fault(point="fs.fallocate", action="errno:EOPNOTSUPP")])
    image = small_image()
    write_image(tmp_path, image)
    assert (tmp_path / "rank-00000.safetensors").read_bytes() == content_of(image)


def test_an_earlier_failure_is_raised_by_the_next_write(tmp_path: Path, large: Image) -> None:
    with open_writer(tmp_path / "x", large) as writer:
        faults.arm([Fault(point="fs.pwrite", action="errno:EIO")])
        writer.write(0, 16 * MIB)
        with pytest.raises(StorageError, match="Input/output"):
            writer._pool.wait(time.monotonic() + 60)
        with pytest.raises(StorageError, match="Input/output"):
            writer.write(16 * MIB, large.size)


def test_the_real_kernel_stopping_in_the_middle(tmp_path: Path, large: Image) -> None:
    """A size limit makes the kernel take part of a write and then refuse the rest."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    faults.arm([Fault(point="fs.fallocate", action="errno:EOPNOTSUPP")])
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * MIB, old[1]))
    try:
        with pytest.raises(StorageError, match="too large"):
            write_whole(tmp_path / "x", large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert os.listdir(tmp_path) == []


def test_data_never_handed_over_is_an_error(tmp_path: Path, large: Image) -> None:
    with open_writer(tmp_path / "x", large) as writer:
        writer.write(0, 16 * MIB)
        with pytest.raises(StorageError, match=f"{16 * MIB} was never handed over"):
            writer.finish(header_of(large))


def test_wrong_ranges_are_refused(tmp_path: Path, large: Image) -> None:
    with open_writer(tmp_path / "x", large) as writer:
        writer.write(0, 16 * MIB)
        for start, stop in [(0, 16), (1, 16 * MIB), (0, 0), (32 * MIB, 48 * MIB), (0, 16 * MIB)]:
            with pytest.raises(ValueError, match="extent"):
                writer.write(start, stop)


def test_wrong_sizes_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    view = memoryview(fs.page_memory(8192))
    with pytest.raises(ValueError, match="4096"):
        ImageWriter(tmp_path / "x", view[:5000], 4096)
    with pytest.raises(ValueError, match="4096"):
        ImageWriter(tmp_path / "x", view, 100)
    with pytest.raises(ValueError, match="more than"):
        ImageWriter(tmp_path / "x", view, 4096, size=8193)
    with ImageWriter(tmp_path / "x", view, 4096) as writer, pytest.raises(ValueError, match="4095"):
        writer.finish(b" " * 4095)
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"precious")
    with pytest.raises(StorageError, match="exists"):
        open_writer(tmp_path / "x", small_image())
    assert (tmp_path / "x").read_bytes() == b"precious"


def test_the_slot_is_let_go_of(tmp_path: Path) -> None:
    for finish in (True, False):
        image = small_image()
        with open_writer(tmp_path / str(finish), image) as writer:
            writer.write(0, image.size)
            if finish:
                writer.finish(header_of(image))
        image.memory.close()  # refuses while anything still looks at it


def test_abort_removes_the_file_and_ends_the_threads(tmp_path: Path, large: Image) -> None:
    writer = open_writer(tmp_path / "x", large)
    writer.write(0, large.size)
    writer.abort()
    writer.abort()
    assert os.listdir(tmp_path) == []
    assert not any(thread.name.startswith("gockpt-write") for thread in threading.enumerate())
    with pytest.raises(StorageError, match="aborted"):
        writer.finish(header_of(large))


def test_a_failing_clean_up_does_not_hide_the_failure(tmp_path: Path, large: Image) -> None:
    faults.arm(
        [
            Fault(point="fs.pwrite", action="errno:ENOSPC", after=2),
            Fault(point="fs.unlink", action="errno:EIO"),
        ]
    )
    with pytest.raises(SpaceError):
        write_whole(tmp_path / "x", large)


def test_a_hung_disk_ends_in_an_error(
    tmp_path: Path, large: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    with open_writer(tmp_path / "x", large) as writer:
        monkeypatch.setattr(fs, "pwrite_all", lambda *args, **named: hung.wait(30))
        writer.write(0, large.size)
        with pytest.raises(StorageError, match="hung"):
            writer.finish(header_of(large), timeout=0.05)
        hung.set()


def test_no_more_than_depth_writes_are_in_flight(
    tmp_path: Path, large: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, now, most = threading.Lock(), 0, 0
    whole = (large.reserve, large.reserve + 16 * MIB)
    both = threading.Barrier(2, timeout=200)
    write = fs.pwrite_all

    def counted(fd: int, data: memoryview, offset: int, *, path: Path) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if offset in whole:  # the two whole extents meet here: they run at once
            both.wait()
        write(fd, data, offset, path=path)
        with lock:
            now -= 1

    with open_writer(tmp_path / "x", large, depth=2) as writer:
        monkeypatch.setattr(fs, "pwrite_all", counted)
        writer.write(0, large.size)
        writer.finish(header_of(large))
    assert most == 2


def test_writers_at_once_share_one_modelled_rate(tmp_path: Path, large: Image) -> None:
    rate = 2e8
    pacer = Pacer(rate)
    started = time.monotonic()
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                ImageWriter(
                    tmp_path / name, large.view, large.reserve, size=large.size, pacer=pacer
                )
            )
            for name in "ab"
        ]
        for writer in writers:
            writer.write(0, large.size)
        for writer in writers:
            writer.finish(header_of(large))
    least = 2 * (large.reserve + large.size) / rate - Pacer.LATE
    assert time.monotonic() - started >= least


def test_what_was_written_when_is_recorded(tmp_path: Path, large: Image) -> None:
    spans = Recorder()
    with ImageWriter(
        tmp_path / "x", large.view, large.reserve, size=large.size, spans=spans, step=7
    ) as writer:
        writer.write(0, large.size)
        writer.finish(header_of(large))
    recorded = spans.drain()
    assert sorted(span.name for span in recorded) == ["extent"] * 4 + ["sync"]
    assert {(span.lane, span.step) for span in recorded} == {("write", 7)}


class Scripted(Tuning):
    """Says after each write what the list says next."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(numbers[0])
        self.numbers = list(numbers[1:])
        self.reports: list[tuple[int, bool]] = []

    def ended(self, nbytes: int, when: float, *, more: bool) -> int:
        self.reports.append((nbytes, more))
        return self.numbers.pop(0) if self.numbers else 1


def test_the_number_of_writes_in_flight_follows_what_was_found_out(
    tmp_path: Path, large: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at first, then two that meet each other, then one again."""
    lock, running, seen = threading.Lock(), 0, []
    pair, handed = threading.Barrier(2, timeout=200), threading.Event()
    write = fs.pwrite_all

    def watched(fd: int, data: memoryview, offset: int, *, path: Path) -> None:
        nonlocal running
        with lock:
            running += 1
            number = len(seen)
            seen.append(running)
        if number == 0:
            handed.wait(30)
        if number in (1, 2):
            pair.wait()
        write(fd, data, offset, path=path)
        with lock:
            running -= 1

    tuning = Scripted(1, 2, 1)
    writer = ImageWriter(
        tmp_path / "x", large.view, large.reserve, size=large.size, tuning=tuning, extent=STAGE
    )
    with writer:
        monkeypatch.setattr(fs, "pwrite_all", watched)
        writer.write(0, large.size)
        handed.set()
        writer.finish(header_of(large))
    assert sorted(seen[1:3]) == [1, 2]
    assert seen[0] == 1
    assert seen[3:] == [1] * len(seen[3:])
    assert (tmp_path / "x").read_bytes() == content_of(large)
    assert sum(nbytes for nbytes, _ in tuning.reports) == large.reserve + large.size
    assert tuning.reports[0][1] is True
    assert tuning.reports[-1][1] is False


def test_room_is_reserved_before_anything_is_written(tmp_path: Path, large: Image) -> None:
    with open_writer(tmp_path / "x", large):
        found = os.stat(tmp_path / "x")
        assert found.st_blocks * 512 >= large.size or found.st_size == 4096
