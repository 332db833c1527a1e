"""Reading: the exact bits, and damage that is always found and named."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from storage_kit import (
    Image,
    assert_same_bits,
    large_image,
    make_image,
    save,
    small_image,
    write_image,
)

from gockpt import faults, storage
from gockpt.errors import ConfigError, CorruptError, NoCheckpointError, StorageError
from gockpt.faults import Fault
from gockpt.storage import fs
from gockpt.storage.format import digest

MIB = 1 << 20
FILE = "rank-00000.safetensors"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture(scope="module")
def large() -> Image:
    return large_image(seed=1)


@pytest.fixture(scope="module")
def large_root(tmp_path_factory: pytest.TempPathFactory, large: Image) -> Path:
    root = tmp_path_factory.mktemp("large")
    save(root, step=5, image=large)
    return root


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def strange_tensors() -> dict[str, torch.Tensor]:
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    return {
        "every bfloat16": bits.view(torch.bfloat16),
        "every half, cut": bits.view(torch.float16).view(256, 256).t(),
        "nan payload": torch.tensor([0x7FF8000000000123], dtype=torch.int64).view(torch.float64),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0),
        "empty 2": torch.empty(3, 0, 5, dtype=torch.int8),
        "one": torch.ones(1, dtype=torch.bool),
        "complex": torch.tensor([[complex(-0.0, float("inf"))], [complex(1, 2)]]),
        "double": torch.complex(torch.ones(3).double(), torch.zeros(3).double()),
        "half complex": torch.ones(6, dtype=torch.float16).view(torch.complex32),
        "volume": torch.rand(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "unsigned": torch.tensor([1 << 63], dtype=torch.uint64),
        "float8": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn),
        "float8 u": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fnuz),
        "name/with ../odd \0 chars\n": torch.ones(2),
    }


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = strange_tensors()
    save(tmp_path, step=1, image=make_image(tensors, gap=70, tail=1))
    checkpoint = storage.open(tmp_path)
    loaded = checkpoint.load()
    assert list(loaded) == checkpoint.names() == list(tensors)
    for name, wanted in tensors.items():
        assert_same_bits(checkpoint.tensor(name), wanted)
        assert_same_bits(loaded[name], wanted)
    assert checkpoint.verify() == []


def test_tied_names_are_one_tensor(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    checkpoint = storage.open(tmp_path)
    assert "model.tied" in checkpoint.names()
    loaded = checkpoint.load()
    assert loaded["model.tied"] is loaded["model.b.weight"]
    assert_same_bits(checkpoint.tensor("model.tied"), loaded["model.tied"])


def test_what_is_recorded_is_told(tmp_path: Path) -> None:
    directory = save(tmp_path, step=7)
    checkpoint = storage.open(tmp_path)
    assert checkpoint.step == 7
    assert checkpoint.extras == {"scheduler": {"last_epoch": 3}}
    assert checkpoint.groups == {"decay": {"lr": 0.1}}
    info = checkpoint.info
    assert (info.path, info.strategy, info.windows) == (directory, "gockpt", 3)
    assert (info.fallback, info.proof) == (None, {"outcome": "exact"})
    assert info.nbytes == (directory / FILE).stat().st_size


def test_a_tensor_is_its_own_memory(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    checkpoint = storage.open(tmp_path)
    checkpoint.tensor("model.a.weight").fill_(3)
    assert_same_bits(checkpoint.tensor("model.a.weight"), small_image(1).tensors["model.a.weight"])


def test_parallel_load_of_several_extents_into_one_block(large_root: Path, large: Image) -> None:
    loaded = storage.open(large_root).load(threads=3)
    for name, wanted in large.tensors.items():
        assert_same_bits(loaded[name], wanted)
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 1


def test_one_tensor_reads_only_its_extents(
    large_root: Path, large: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = storage.open(large_root)
    checkpoint.tensor("model.0")  # has the header checked
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: (read.append(at), preadv(fd, to, at))[1])
    assert_same_bits(checkpoint.tensor("model.2"), large.tensors["model.2"])
    assert read == [large.reserve + 16 * MIB]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets of all reads from now on."""
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: (read.append(at), preadv(fd, to, at))[1])
    return read


def test_opening_reads_no_tensor(large_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest alone, from its start; then the header's extent and the tensor's own."""
    read = counted(monkeypatch)
    checkpoint = storage.open(large_root)
    assert checkpoint.names() == [f"model.{i}" for i in range(4)]
    assert checkpoint.places("model.2")[0].stop - checkpoint.places("model.2")[0].start == 10 * MIB
    assert read == [0]
    checkpoint.tensor("model.3")
    assert len(read) == 4
    assert max(read) >= 32 * MIB


def test_small_tensors_of_one_extent_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, step=1)
    checkpoint = storage.open(tmp_path)
    first, *others = checkpoint.in_file_order(checkpoint.names())
    checkpoint.tensor(first)
    read = counted(monkeypatch)
    for name in others:
        checkpoint.tensor(name)
    assert len(read) <= 1


def test_memory_is_the_tensor_and_one_extent(
    large_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read before is let go before memory for the next extent is taken."""
    live: dict[int, int] = {}
    peaks: list[int] = []

    def page_memory(nbytes: int) -> mmap.mmap:
        made = original(nbytes)
        live[id(made)] = len(made)
        weakref.finalize(made, live.pop, id(made))
        peaks.append(sum(live.values()))
        return made

    original = fs.page_memory
    monkeypatch.setattr(fs, "page_memory", page_memory)
    checkpoint = storage.open(large_root)
    for name in (*checkpoint.names(), "model.0", "model.3"):
        checkpoint.tensor(name)
    assert 16 * MIB <= max(peaks) < 17 * MIB


def test_rows_are_read_alone(
    large_root: Path, large: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "model.rows": torch.arange(24, dtype=torch.float64).view(6, 4),
        "model.turned": torch.arange(24.0).view(4, 6).t(),
        "model.none": torch.zeros(0, 3),
    }
    root = large_root.parent / f"{large_root.name}-rows"
    root.mkdir()
    save(root, step=1, image=make_image(tensors))
    small = storage.open(root)
    for name, wanted in tensors.items():
        for start, stop in ((0, 0), (0, len(wanted)), (len(wanted) // 3, len(wanted) // 2)):
            found = small.rows(name, start, stop)
            assert torch.equal(found, wanted[start:stop])
            assert found.untyped_storage().nbytes() == found.nbytes
    for name, start, stop in (("model.rows", 2, 7), ("model.rows", -1, 2), ("model.rows", 3, 2)):
        with pytest.raises(ConfigError, match="has no rows"):
            small.rows(name, start, stop)
    checkpoint = storage.open(large_root)
    checkpoint.rows("model.0", 0, 1)
    read = counted(monkeypatch)
    last = len(large.tensors["model.3"])
    assert_same_bits(checkpoint.rows("model.3", last - 9, last), large.tensors["model.3"][-9:])
    assert len(read) == 1


def test_reading_into_memory_that_is_there(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    checkpoint = storage.open(tmp_path)
    for name, wanted in small_image(1).tensors.items():
        same = torch.empty_like(wanted)
        checkpoint.read_into(name, same)
        assert_same_bits(same, wanted)
        other = torch.empty(wanted.shape, dtype=wanted.dtype)
        checkpoint.read_into(name, other)
        assert torch.equal(other, wanted)
    with pytest.raises(ConfigError, match="is bfloat16"):
        checkpoint.read_into("model.a.bias", torch.empty(7))
    with pytest.raises(ConfigError, match=r"of shape \(7,\)"):
        checkpoint.read_into("model.a.bias", torch.empty(8, dtype=torch.bfloat16))


def test_a_damage_carries_file_bytes_and_tensors(large_root: Path, large: Image) -> None:
    (file,) = large_root.glob("*/*.safetensors")
    checkpoint = storage.open(large_root)
    start = large.reserve + 16 * MIB
    faults.arm([Fault(point="fs.pread", action="errno:EIO", after=2, times=1)])
    (unread,) = checkpoint.damages(threads=1)
    assert (unread.path, unread.errno) == (file, errno.EIO)
    flip(file, start)
    try:
        (damage,) = checkpoint.damages()
        assert damage.path == file
        assert damage.extent == (start, start + 16 * MIB)
        assert damage.tensors == ("model.1", "model.2", "model.3")
        assert str(damage) == checkpoint.verify()[0]
    finally:
        flip(file, start)
    assert unread.extent is not None
    assert unread.tensors


def test_reading_goes_past_the_page_cache_or_through_it(large_root: Path, large: Image) -> None:
    """A file system may accept the flag and refuse the read."""
    faults.arm([Fault(point="fs.pread", action="errno:EINVAL", after=2)])
    assert_same_bits(storage.open(large_root).load()["model.3"], large.tensors["model.3"])
    faults.arm([Fault(point="fs.direct", action="errno:EINVAL", times=0)])
    assert_same_bits(storage.open(large_root).load()["model.3"], large.tensors["model.3"])


@pytest.mark.parametrize(
    ("offset", "held"),
    [
        (0, "the header"),
        (65535, "the header"),
        (65536, "model.0, model.1"),
        (65536 + 16 * MIB, "model.1, model.2, model.3"),
        (65536 + 40 * MIB - 1, "model.3"),
    ],
)
def test_one_flipped_bit_is_found_and_named(
    large_root: Path, large: Image, offset: int, held: str
) -> None:
    """In the header, its padding, and the first and last byte of the data."""
    file = large_root / next(iter(os.listdir(large_root))) / FILE
    assert large.reserve == 65536
    flip(file, offset)
    try:
        checkpoint = storage.open(large_root)
        problems = checkpoint.verify()
        assert len(problems) == 1
        assert str(file) in problems[0]
        assert f"they hold {held})" in problems[0]
        with pytest.raises(CorruptError, match=r"bytes \d+ to \d+"):
            checkpoint.load()
        name = "model.0" if offset < 65536 else held.split(", ")[-1]
        with pytest.raises(CorruptError):
            checkpoint.tensor(name)
        if "model.0" not in held and offset >= 65536:
            assert_same_bits(checkpoint.tensor("model.0"), large.tensors["model.0"])
    finally:
        flip(file, offset)
    assert storage.open(large_root).verify() == []


def test_every_byte_counts_padding_and_gaps_too(tmp_path: Path) -> None:
    directory = save(tmp_path, step=1)
    size = (directory / FILE).stat().st_size
    for offset in [*range(0, size, 509), *range(65536, size, 29)]:
        flip(directory / FILE, offset)
        assert len(storage.open(tmp_path).verify()) == 1, offset
        flip(directory / FILE, offset)


@pytest.mark.parametrize("point", ["fs.pwrite.flip", "fs.pwrite.lost"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_disk_that_lies_is_found_out(tmp_path: Path, point: str, passes: int) -> None:
    save(tmp_path, step=1)
    faults.arm([Fault(point=point, action="mark", after=passes)])
    save(tmp_path, step=2)
    faults.disarm()
    assert len(storage.open(tmp_path).verify()) == 1
    checkpoint, _, problems = storage.load_newest(tmp_path)
    assert (checkpoint.step, len(problems)) == (1, 1)


def test_a_file_that_shrinks_or_goes_while_open(tmp_path: Path) -> None:
    directory = save(tmp_path, step=1)
    checkpoint = storage.open(tmp_path)
    os.truncate(directory / FILE, 66_000)
    assert len(checkpoint.verify()) == 1
    (directory / FILE).unlink()
    problems = checkpoint.verify()
    assert len(problems) == 1
    assert "cannot open" in problems[0]
    with pytest.raises(StorageError, match="cannot open"):
        checkpoint.load()


def test_an_unreadable_sector_lets_the_older_one_load(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    save(tmp_path, step=2)
    newest = storage.newest(tmp_path)
    assert newest is not None
    checkpoint = storage.Checkpoint(newest)
    faults.arm([Fault(point="fs.pread", action="errno:EIO")])
    with pytest.raises(StorageError, match="Input/output"):
        checkpoint.load()
    # Past both manifests and the first extent of the newest.
    faults.arm([Fault(point="fs.pread", action="errno:EIO", after=3)])
    checkpoint, _, problems = storage.load_newest(tmp_path)
    assert checkpoint.step == 1
    assert "Input/output" in problems[0]


def test_header_and_manifest_must_agree(tmp_path: Path) -> None:
    """Both whole by their hashes, and still of different opinions: nothing is read by either."""
    directory = save(tmp_path, step=1)
    found = storage.examine(directory).manifests[0]
    image = small_image(1)
    other = [
        msgspec.structs.replace(entry, name="model.c.bias")
        if entry.name == "model.a.bias"
        else entry
        for entry in image.entries
    ]
    header = storage.build_header(other, image.size, image.reserve)
    with (directory / FILE).open("r+b") as file:
        file.write(header)
    extents = tuple(
        msgspec.structs.replace(extent, xxh3=digest(header)) if extent.offset == 0 else extent
        for extent in found.extents
    )
    forged = msgspec.structs.replace(found, extents=extents)
    (directory / "rank-00000.json").write_bytes(storage.encode_manifest(forged))
    checkpoint = storage.open(tmp_path)
    with pytest.raises(CorruptError, match="different tensors"):
        checkpoint.load()
    with pytest.raises(CorruptError, match="different tensors"):
        checkpoint.tensor("model.b.weight")
    assert any("different tensors" in problem for problem in checkpoint.verify())


def test_tensors_cut_into_pieces_are_joined(tmp_path: Path) -> None:
    """The format allows for volumes: pieces ``name#i`` anywhere, in any file of the rank."""
    whole = torch.arange(3000, dtype=torch.float32).view(50, 60)
    flat = whole.t().contiguous().view(-1)  # memory order (1, 0)
    image = make_image({"w#1": flat[2048:], "other": torch.ones(9), "w#0": flat[:2048]})
    directory = storage.create_checkpoint(tmp_path, step=1, sequence=1, launch="0123abcd")
    manifest = write_image(directory, image)
    offset = {entry.name: entry.offset for entry in image.entries}
    pieces = tuple(
        storage.Piece(entry=f"w#{i}", file=0, offset=offset[f"w#{i}"], nbytes=nbytes)
        for i, nbytes in enumerate((2048 * 4, 952 * 4))
    )
    record = storage.TensorRecord(
        name="w",
        file=0,
        offset=0,
        dtype="float32",
        shape=(50, 60),
        order=(1, 0),
        global_shape=(50, 60),
        global_offset=(0, 0),
        pieces=pieces,
    )
    kept = tuple(tensor for tensor in manifest.tensors if tensor.name == "other")
    manifest = msgspec.structs.replace(manifest, tensors=(record, *kept))
    storage.commit(directory, manifest, still_ours=lambda: True)
    checkpoint = storage.open(tmp_path)
    assert checkpoint.verify() == []
    assert_same_bits(checkpoint.tensor("w"), whole.t().contiguous().t())
    assert_same_bits(checkpoint.load()["w"], whole.t().contiguous().t())


def test_a_part_of_a_tensor_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    directory = storage.create_checkpoint(tmp_path, step=1, sequence=1, launch="0123abcd")
    manifest = write_image(directory, make_image({"w": torch.ones(4)}))
    cut = msgspec.structs.replace(manifest.tensors[0], global_shape=(8,))
    storage.commit(
        directory, msgspec.structs.replace(manifest, tensors=(cut,)), still_ours=lambda: True
    )
    with pytest.raises(StorageError, match="cut over ranks"):
        storage.open(tmp_path).tensor("w")
    with pytest.raises(StorageError, match="cut over ranks"):
        storage.open(tmp_path).load()


def test_open_by_root_by_step_and_by_directory(tmp_path: Path) -> None:
    first, second = save(tmp_path, step=10), save(tmp_path, step=20)
    assert storage.open(tmp_path).path == second
    assert storage.open(str(tmp_path), step=10).path == first
    assert storage.open(first).step == 10
    with pytest.raises(NoCheckpointError, match="step 15, only of 10, 20"):
        storage.open(tmp_path, step=15)
    with pytest.raises(NoCheckpointError, match="is of step 10, not 20"):
        storage.open(first, step=20)


def test_nothing_to_open_says_what_is_wrong_with_each(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="has no checkpoints"):
        storage.open(tmp_path)
    with pytest.raises(NoCheckpointError, match="has no checkpoints"):
        storage.load_newest(tmp_path / "missing")
    damaged = save(tmp_path, step=1)
    os.truncate(damaged / FILE, 10)
    (tmp_path / "step-junk").mkdir()
    for call in (storage.open, storage.load_newest):
        with pytest.raises(NoCheckpointError, match="has 10 bytes instead of") as caught:
            call(tmp_path)
        assert "step-junk" in str(caught.value)
    with pytest.raises(CorruptError, match="has 10 bytes"):
        storage.open(damaged)


def test_a_missing_tensor_is_a_plain_error(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    with pytest.raises(StorageError, match=r"no tensor 'model\.c'"):
        storage.open(tmp_path).tensor("model.c")


def test_loaded_memory_is_page_aligned_and_writable(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    loaded = storage.open(tmp_path).load()
    first = loaded["model.a.weight"]
    assert first.untyped_storage().data_ptr() % mmap.PAGESIZE == 0
    assert first.data_ptr() % 64 == 0
    first.zero_()
