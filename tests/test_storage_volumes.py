"""Checkpoints over several volumes: what lies where, found again, failing by name, removed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from storage_kit import (
    LAUNCH,
    Image,
    assert_holds,
    assert_same_bits,
    forge,
    in_child,
    large_image,
    make_image,
    passes,
    save,
    small_image,
)

from gockpt import faults, storage
from gockpt.errors import CorruptError, NoCheckpointError, SpaceError, StorageError
from gockpt.faults import Fault
from gockpt.state import bits
from gockpt.storage import fs
from gockpt.storage.parts import cut, place
from gockpt.storage.places import known, known_path
from gockpt.storage.volumes import claim

OTHER = "fedcba98"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "main"
    path.mkdir()
    return path


@pytest.fixture
def volumes(tmp_path: Path) -> list[Path]:
    return [tmp_path / "one", tmp_path / "two"]


def parts(volumes: list[Path]) -> list[str]:
    """Names of all checkpoints that have parts, once for each volume."""
    return sorted(one.name for volume in volumes for one in volume.glob("gockpt-*/*"))


def part(volumes: list[Path], number: int, checkpoint: Path) -> Path:
    """The file of a part."""
    (found,) = volumes[number].glob(f"gockpt-*/{checkpoint.name}/rank-00000-v{number}.safetensors")
    return found


# -- dividing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_parts_and_their_tensors_cover_the_image(seed: int) -> None:
    chance = random.Random(seed)
    extent = 4096 * chance.choice([1, 2, 16])
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.float64]
    shapes = [(), (0, 5), (1,), (33, 17), (3000,), (40, 1000), (2, 3, 4)]
    tensors = {
        f"t{number}": torch.zeros(chance.choice(shapes), dtype=chance.choice(dtypes))
        for number in range(chance.randrange(1, 30))
    }
    image = make_image(tensors, gap=chance.choice([0, 100]), tail=chance.choice([0, 9000]))
    count = chance.randrange(1, 9)
    made = cut(image.size, count, extent)
    assert [one.start for one in made[1:]] == [one.stop for one in made[:-1]]
    assert (made[0].start, made[-1].stop) == (0, image.size)
    assert all(one.start % extent == 0 for one in made)
    assert len(made) == min(count, max(1, -(-image.size // extent)))
    shares = [-(-one.size // extent) for one in made]
    assert max(shares) - min(shares) <= 1
    placed = place(image.entries, made)
    assert [record.name for record in placed.records] == [entry.name for entry in image.entries]
    for record, entry in zip(placed.records, image.entries, strict=True):
        where = entry.offset
        for one in record.parts:
            assert made[one.file].start + one.offset == where
            where += one.nbytes
        assert where == entry.offset + entry.nbytes
    assert sum(bool(record.pieces) for record in placed.records) < len(made)
    for entries, one in zip(placed.entries, made, strict=True):
        storage.build_header(entries, one.size, image.reserve)


# -- bit for bit -----------------------------------------------------------------------------------


def mixed_image() -> Image:
    """Tensors larger than several parts, and many that are small; 150 kB."""
    generator = torch.Generator().manual_seed(5)
    tensors = {f"model.small.{n}": torch.rand(n, generator=generator) for n in range(40)}
    tensors["model.large"] = torch.rand(100, 300, generator=generator).t()
    tensors["model.pairs"] = torch.complex(*torch.rand(2, 700, generator=generator))
    tensors["model.last"] = torch.tensor(7, dtype=torch.int64)
    return make_image(tensors, gap=50, tail=10, aliases={"model.large": ("model.tied",)})


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_every_bit_comes_back_from_any_number_of_volumes(
    root: Path, tmp_path: Path, count: int
) -> None:
    image = mixed_image()
    volumes = [tmp_path / f"v{number}" for number in range(count)]
    path = save(root, step=3, image=image, volumes=volumes)
    assert [one.name for one in path.iterdir()] == ["rank-00000.json"]
    found = storage.open(root)
    assert found.verify() == []
    loaded = found.load()
    assert set(loaded) == {*image.tensors, "model.tied"}
    for name, wanted in image.tensors.items():
        assert_same_bits(loaded[name], wanted)
        assert_same_bits(found.tensor(name), wanted)


@pytest.mark.parametrize("count", [2, 3])
def test_safetensors_reads_each_part_by_itself(root: Path, tmp_path: Path, count: int) -> None:
    """With nothing of ours, the bytes of every tensor are put together from the parts."""
    image = mixed_image()
    volumes = [tmp_path / f"v{number}" for number in range(count)]
    path = save(root, step=3, image=image, volumes=volumes)
    raw: dict[str, dict[int, bytes]] = {}
    for number in range(count):
        with safe_open(part(volumes, number, path), "pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no dictionary)
                name, _, piece = key.partition("#")
                tensor = file.get_tensor(key)
                raw.setdefault(name, {})[int(piece or 0)] = bits(tensor).numpy().tobytes()
    assert len(raw["model.large"]) > 1
    for name, wanted in image.tensors.items():
        pieces = raw[name]
        assert b"".join(pieces[n] for n in sorted(pieces)) == bits(wanted).numpy().tobytes()


def test_large_extents_are_written_straight_from_the_slot(root: Path, volumes: list[Path]) -> None:
    image = large_image(megabytes=12)
    path = save(root, step=1, image=image, volumes=volumes)
    sizes = [part(volumes, number, path).stat().st_size - image.reserve for number in (0, 1)]
    assert sum(sizes) == image.size
    assert abs(sizes[0] - sizes[1]) <= fs.PAGE
    for name, tensor in storage.open(root).load().items():
        assert_same_bits(tensor, image.tensors[name])


@pytest.mark.parametrize("nbytes", [0, 1, 64, 4096])
def test_what_is_smaller_than_its_volumes_takes_one_of_them(
    root: Path, tmp_path: Path, nbytes: int
) -> None:
    volumes = [tmp_path / f"v{number}" for number in range(3)]
    image = make_image({"model.a": torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)})
    save(root, step=1, image=image, volumes=volumes)
    assert len(storage.open(root).manifests[0].files) == 1
    assert_same_bits(storage.open(root).load()["model.a"], image.tensors["model.a"])


def test_all_volumes_are_synced_at_the_same_time(
    root: Path, volumes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    real = fs.fdatasync

    def fdatasync(fd: int, *, path: Path) -> None:
        if path.suffix == ".safetensors":
            both.wait(30)
        real(fd, path=path)

    monkeypatch.setattr(fs, "fdatasync", fdatasync)
    save(root, step=1, volumes=volumes)
    assert_holds(root, 1)


def test_a_slow_volume_is_named(
    root: Path, volumes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str | None] = []
    real = storage.striped.StripedWriter.finish

    def finish(self: storage.striped.StripedWriter, *args: object, **named: object) -> object:
        extents = real(self, *args, **named)  # type: ignore[arg-type]
        said.append(self.slow())
        return extents

    monkeypatch.setattr(storage.striped.StripedWriter, "finish", finish)
    save(root, step=1, volumes=volumes)
    faults.arm([Fault(point="fs.fdatasync", action="delay:1", match="*/two/*")])
    path = save(root, step=2, volumes=volumes)
    assert said[0] is None
    assert f"volume {volumes[1]} is slow" in str(said[1])
    fast, slow = (file.seconds for file in storage.examine(path).manifests[0].files)
    assert fast < 1 <= slow


# -- failing ---------------------------------------------------------------------------------------

CALLS = ("mkdir", "create", "fallocate", "pwrite", "truncate", "fdatasync", "fsync_dir")


@pytest.mark.parametrize(
    ("call", "number"),
    [*((call, "EIO") for call in CALLS), ("fallocate", "ENOSPC"), ("pwrite", "EDQUOT")],
)
def test_a_failure_of_one_volume_is_named_and_leaves_nothing(
    root: Path, volumes: list[Path], call: str, number: str
) -> None:
    old = save(root, step=1, volumes=volumes)
    faults.arm([Fault(point=f"fs.{call}", action=f"errno:{number}", match="*two/*", times=0)])
    with pytest.raises(StorageError, match=str(volumes[1])) as raised:
        save(root, step=2, volumes=volumes)
    assert isinstance(raised.value, SpaceError) == (number != "EIO")
    assert raised.value.errno == getattr(errno, number)
    assert raised.value.path is not None
    assert volumes[1] in raised.value.path.parents
    if call not in ("mkdir", "fsync_dir"):
        assert str(raised.value).startswith(f"volume {volumes[1]}: cannot")
    faults.disarm()
    storage.collect_leftovers(root, OTHER)  # where the failing call was needed for the clean-up too
    assert parts(volumes) == [old.name] * 2
    assert [one.name for one in root.glob("*step-*")] == [old.name]
    assert_holds(root, 1)
    save(root, step=3, volumes=volumes)
    assert_holds(root, 3)


@pytest.mark.parametrize("nth", range(4))
def test_a_disk_that_is_full_after_some_writes(root: Path, volumes: list[Path], nth: int) -> None:
    save(root, step=1, volumes=volumes)
    faults.arm([Fault(point="fs.pwrite", action="errno:ENOSPC", match="*/one/*", after=nth)])
    with pytest.raises(SpaceError, match=str(volumes[0])):
        save(root, step=2, image=mixed_image(), volumes=volumes)
    assert len(parts(volumes)) == 2
    assert_holds(root, 1)


def test_the_first_failure_ends_the_other_parts(
    root: Path, volumes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up, written = threading.Event(), []
    give_up, pwrite_all = storage.ImageWriter.give_up, fs.pwrite_all

    def noted(writer: storage.ImageWriter, error: Exception) -> None:
        give_up(writer, error)
        if volumes[1] in writer.path.parents:
            given_up.set()

    def slow(fd: int, data: memoryview, offset: int, *, path: Path) -> None:
        if volumes[1] in path.parents and offset:
            given_up.wait(5)
            written.append(offset)
        pwrite_all(fd, data, offset, path=path)

    monkeypatch.setattr(storage.ImageWriter, "give_up", noted)
    monkeypatch.setattr(fs, "pwrite_all", slow)
    faults.arm([Fault(point="fs.fdatasync", action="errno:EIO", match="*/one/*")])
    with pytest.raises(StorageError, match=f"volume {volumes[0]}"):
        save(root, step=1, image=mixed_image(), volumes=volumes)
    assert len(written) <= 2  # those that were in flight, of 19
    assert parts(volumes) == []


def test_a_short_write_of_one_part_is_made_whole(root: Path, volumes: list[Path]) -> None:
    faults.arm([Fault(point="fs.pwrite.short", action="mark", match="*/two/*", times=0)])
    save(root, step=1, volumes=volumes)
    assert storage.open(root).verify() == []
    assert_holds(root, 1)


@pytest.mark.parametrize("lie", ["fs.pwrite.lost", "fs.pwrite.flip"])
def test_a_disk_that_lies_is_found_out_by_name(root: Path, volumes: list[Path], lie: str) -> None:
    save(root, step=1, volumes=volumes)
    faults.arm([Fault(point=lie, action="mark", match="*/two/*", after=2)])
    save(root, step=2, image=mixed_image(), volumes=volumes)
    faults.disarm()
    (problem,) = storage.open(root, 2).verify()
    assert str(volumes[1]) in problem
    assert_holds(root, 1)


def test_killed_at_every_call(
    root: Path, volumes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start finds the newest, and no part of anything else."""

    def work() -> None:
        save(root, step=2, volumes=volumes)
        storage.prune(root, 1)

    save(root, step=1, volumes=volumes)
    points = passes(monkeypatch, work)
    assert len(points) > 60
    for name, after in points[::4]:
        for path in (root, *volumes):
            shutil.rmtree(path)
        root.mkdir()
        save(root, step=1, volumes=volumes)

        def killed(name: str = name, after: int = after) -> None:
            faults.arm([Fault(point=name, action="kill", after=after)])
            work()

        assert in_child(killed) == signal.SIGKILL
        storage.collect_leftovers(root, OTHER)
        there = sorted(one.name for one in root.iterdir() if one.name != ".gockpt")
        assert parts(volumes) == sorted(there * 2), (name, after)
        assert_holds(root, storage.load_newest(root)[0].step)


# -- missing, moved, damaged -----------------------------------------------------------------------


def test_a_missing_volume_is_named_and_the_older_one_used(root: Path, tmp_path: Path) -> None:
    old = [tmp_path / "a", tmp_path / "b"]
    new = [tmp_path / "c", tmp_path / "d"]
    save(root, step=1, volumes=old)
    save(root, step=2, volumes=new)
    new[1].rename(tmp_path / "unplugged")
    checkpoint, _, problems = storage.load_newest(root)
    assert checkpoint.step == 1
    assert len(problems) == 1
    assert f"missing on volume {new[1]}; is it mounted" in problems[0]
    assert_holds(root, 1)
    shutil.rmtree(old[0])
    with pytest.raises(NoCheckpointError, match=f"volume {old[0]}.*volume {new[1]}|{new[1]}"):
        storage.load_newest(root)


def test_a_missing_or_cut_part_is_named(root: Path, volumes: list[Path]) -> None:
    path = save(root, step=1, volumes=volumes)
    file = part(volumes, 1, path)
    os.truncate(file, 8192)
    assert f"{file.name} on volume {volumes[1]} has 8192 bytes" in str(
        storage.examine(path).problem
    )
    file.unlink()
    assert f"{file.name} is missing on volume {volumes[1]}" in str(storage.examine(path).problem)


def test_moved_volumes_are_found_where_the_user_says(root: Path, volumes: list[Path]) -> None:
    save(root, step=1, volumes=volumes)
    moved = [volume.rename(volume.with_name(f"{volume.name}-moved")) for volume in volumes]
    with pytest.raises(NoCheckpointError):
        storage.open(root)
    found = storage.open(root, volumes=moved[::-1])
    assert found.verify() == []
    claim(root, moved)  # what a new start with these volumes does
    assert_holds(root, 1)
    save(root, step=2, volumes=moved)
    storage.prune(root, 1)
    assert len(parts(moved)) == 2
    assert_holds(root, 2)


def test_parts_beside_the_manifest_are_found_before_all_others(
    root: Path, volumes: list[Path]
) -> None:
    path = save(root, step=1, volumes=volumes)
    for number in (0, 1):
        shutil.copy(part(volumes, number, path), path)
    for volume in volumes:
        shutil.rmtree(volume)
    assert_holds(root, 1)


def test_a_part_of_another_checkpoint_is_not_taken_for_it(root: Path, volumes: list[Path]) -> None:
    one, two = (save(root, step=step, volumes=volumes) for step in (1, 2))
    shutil.copy(part(volumes, 1, one), part(volumes, 1, two))
    assert storage.open(root, 2).verify() != []
    assert_holds(root, 1)


# -- whose parts they are --------------------------------------------------------------------------


def test_two_directories_on_the_same_volumes_do_not_mix(
    root: Path, volumes: list[Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    kept = save(other, step=1, volumes=volumes)
    dying = storage.create_checkpoint(other, step=5, sequence=5, launch=LAUNCH, durably=True)
    for share in claim(other, volumes):
        (share / dying.name).mkdir()  # a launch of the other one is writing this
    for step in (1, 2, 3):
        save(root, step=step, volumes=volumes)
    storage.prune(root, 1)
    storage.collect_leftovers(root, OTHER)
    assert len(list(volumes[0].iterdir())) == 2
    assert parts(volumes).count(kept.name) == 2
    assert parts(volumes).count(dying.name) == 2
    assert_holds(other, 1)
    assert_holds(root, 3)


def test_a_copy_does_not_own_the_parts_of_the_original(
    root: Path, volumes: list[Path], tmp_path: Path
) -> None:
    for step in (1, 2):
        save(root, step=step, volumes=volumes)
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    assert_holds(copy, 2)
    assert known(copy) is None
    save(copy, step=3, volumes=volumes)
    storage.prune(copy, 1)
    assert_holds(copy, 3)
    assert [one.verify() for step in (1, 2) for one in [storage.open(root, step)]] == [[], []]


def test_a_moved_directory_still_owns_its_parts(
    root: Path, volumes: list[Path], tmp_path: Path
) -> None:
    save(root, step=1, volumes=volumes)
    moved = root.rename(tmp_path / "moved")
    assert_holds(moved, 1)
    newest = save(moved, step=2, volumes=volumes)
    storage.prune(moved, 1)
    assert parts(volumes) == [newest.name] * 2


def test_volumes_that_are_no_longer_used_are_cleaned_too(root: Path, tmp_path: Path) -> None:
    old, new = [tmp_path / "a"], [tmp_path / "b", tmp_path / "c"]
    save(root, step=1, volumes=old)
    save(root, step=2, volumes=new)
    save(root, step=3)
    storage.prune(root, 2)
    assert parts(old) == []
    storage.prune(root, 1)
    assert parts(new) == []
    assert_holds(root, 3)


def test_a_directory_that_the_user_renamed_keeps_its_parts(root: Path, volumes: list[Path]) -> None:
    mine = save(root, step=1, volumes=volumes).rename(root / "my-best")
    save(root, step=2, volumes=volumes)
    save(root, step=3, volumes=volumes)
    storage.prune(root, 1)
    storage.collect_leftovers(root, OTHER)
    assert storage.open(mine).verify() == []


def test_trash_of_the_same_name_does_not_take_the_parts_along(
    root: Path, volumes: list[Path]
) -> None:
    path = save(root, step=1, volumes=volumes)
    (root / f".trash-{path.name}").mkdir()
    assert len(storage.collect_leftovers(root, OTHER)) == 1
    assert_holds(root, 1)


def test_parts_that_cannot_be_removed_are_removed_by_the_next_start(
    root: Path, volumes: list[Path]
) -> None:
    save(root, step=1, volumes=volumes)
    newest = save(root, step=2, volumes=volumes)
    faults.arm([Fault(point="fs.rmtree", action="errno:EIO", match="*/one/*")])
    with pytest.raises(StorageError, match=str(volumes[0])):
        storage.prune(root, 1)
    assert len(parts(volumes)) == 3
    assert len(storage.collect_leftovers(root, OTHER)) == 1
    assert parts(volumes) == [newest.name] * 2


# -- what a directory knows of its volumes ---------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"id": 3}', b"\xff", b"[" * 100_000])
def test_damaged_knowledge_of_volumes_hurts_no_checkpoint(
    root: Path, volumes: list[Path], text: bytes
) -> None:
    save(root, step=1, volumes=volumes)
    known_path(root).write_bytes(text)
    assert_holds(root, 1)
    save(root, step=2, volumes=volumes)
    storage.prune(root, 1)
    assert_holds(root, 2)


@pytest.mark.parametrize("name", ["../../etc", "", "0123", "0123456789abcdeF", "x" * 16])
def test_knowledge_with_another_name_than_ours_is_not_believed(root: Path, name: str) -> None:
    claim(root, [root.parent / "v"])
    found = known(root)
    assert found is not None
    hostile = msgspec.structs.replace(found, id=name)
    known_path(root).write_bytes(msgspec.json.encode(hostile))
    assert known(root) is None


# -- hostile manifests -----------------------------------------------------------------------------

GOOD = "/gockpt-0123456789abcdef"

HOSTILE = {
    "no share": "/etc",
    "relative": "gockpt-0123456789abcdef",
    "relative deeper": "a/gockpt-0123456789abcdef",
    "above": f"/mnt/..{GOOD}",
    "here": f"/mnt/.{GOOD}",
    "double": f"//mnt{GOOD}",
    "trailing": f"/mnt{GOOD}/",
    "null": f"/mnt\0{GOOD}",
    "misnamed": "/mnt/gockpt-0123456789abcdeg",
    "longer": f"/mnt{GOOD}0",
    "endless": f"/{'x' * 5000}{GOOD}",
    "newline": f"/mnt{GOOD}\n",
    "not a string": 7,
}


@pytest.mark.parametrize("volume", HOSTILE.values(), ids=HOSTILE)
def test_a_manifest_cannot_lead_anywhere_else(
    root: Path, volumes: list[Path], volume: object
) -> None:
    path = save(root, step=1, image=small_image(1), volumes=volumes)
    manifest = storage.examine(path).manifests[0]

    def change(fields: dict[str, object]) -> None:
        files = fields["files"]
        assert isinstance(files, list)
        files[1]["volume"] = volume

    (path / "rank-00000.json").write_bytes(forge(manifest, change))
    assert storage.examine(path).problem is not None
    with pytest.raises(CorruptError):
        storage.open(path)


@pytest.mark.parametrize("seconds", [-1, 1e300, "1", None])
def test_impossible_seconds_are_refused(root: Path, volumes: list[Path], seconds: object) -> None:
    path = save(root, step=1, volumes=volumes)
    manifest = storage.examine(path).manifests[0]

    def change(fields: dict[str, object]) -> None:
        files = fields["files"]
        assert isinstance(files, list)
        files[0]["seconds"] = seconds

    with pytest.raises(CorruptError):
        storage.decode_manifest(forge(manifest, change))


def test_only_our_own_names_are_looked_at_on_a_volume(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever volume is recorded: nothing but that one name in that one place."""
    path = save(root, step=1, volumes=[tmp_path / "one", tmp_path / "two"])
    manifest = storage.examine(path).manifests[0]
    hostile = [msgspec.structs.replace(file, volume=f"/proc/self{GOOD}") for file in manifest.files]
    raw = storage.encode_manifest(msgspec.structs.replace(manifest, files=tuple(hostile)))
    (path / "rank-00000.json").write_bytes(raw)
    asked: list[Path] = []
    real = fs.file_size
    monkeypatch.setattr(fs, "file_size", lambda path: asked.append(path) or real(path))
    assert "missing on volume /proc/self" in str(storage.examine(path).problem)
    name = "rank-00000-v0.safetensors"
    outside = [one for one in asked if root not in one.parents]
    assert outside[0] == Path(f"/proc/self{GOOD}", path.name, name)
    assert {one.relative_to(one.parents[2]) for one in outside} == {Path(GOOD[1:], path.name, name)}
