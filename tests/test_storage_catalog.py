"""Discovery and deletion: by valid manifests alone, and never the last good one."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from storage_kit import LAUNCH, assert_holds, save, small_image, write_image

from gockpt import faults, storage
from gockpt.errors import StorageError
from gockpt.faults import Fault
from gockpt.storage import CheckpointName, parse_name

OTHER = "ffffffff"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


def steps(root: Path) -> list[int]:
    return [one.step for one in storage.scan(root) if one.problem is None]


def test_names() -> None:
    name = CheckpointName(step=100, sequence=42, launch="7f3ac01e")
    assert str(name) == "step-000000100-s000042-7f3ac01e"
    assert parse_name(str(name)) == name
    large = CheckpointName(step=10**12, sequence=10**7, launch="7f3ac01e")
    assert parse_name(str(large)) == large
    for wrong in ["step-1-s1-7f3ac01e", "step-000000100-s000042-7F3AC01E", str(name) + "/..", ""]:
        assert parse_name(wrong) is None


def test_nothing_there(tmp_path: Path) -> None:
    assert storage.scan(tmp_path / "missing") == []
    assert storage.newest(tmp_path) is None
    assert storage.next_sequence(tmp_path / "missing") == 1


def test_newest_is_by_sequence_as_a_run_may_restart_from_an_older_step(tmp_path: Path) -> None:
    save(tmp_path, step=300)
    save(tmp_path, step=200, launch=OTHER)
    assert [one.step for one in storage.scan(tmp_path)] == [200, 300]
    newest = storage.newest(tmp_path)
    assert newest is not None
    assert newest.step == 200
    assert storage.newest(tmp_path, 300) is not None
    assert storage.newest(tmp_path, 250) is None


def test_junk_with_higher_numbers_never_wins(tmp_path: Path) -> None:
    good = save(tmp_path, step=1)
    (tmp_path / "step-000099999-dead").mkdir()
    (tmp_path / "step-000099999-dead" / "junk").write_text("junk")
    bare = tmp_path / "step-000099999-s099999-deadbeef"
    bare.mkdir()
    (bare / "rank-00000.safetensors").write_bytes(bytes(10_000))
    junk = tmp_path / "step-000099999-s099998-deadbeef"
    junk.mkdir()
    (junk / "rank-00000.json").write_text("{}")
    copy = tmp_path / "step-000099999-s099997-deadbeef"
    copy.mkdir()
    for file in good.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (tmp_path / "step-000099999-s099996-deadbeef").symlink_to(good)
    (tmp_path / "step-000099999-s099995-deadbeef").write_text("a file")
    found = {one.path.name: one.problem for one in storage.scan(tmp_path)}
    assert len(found) == 5
    assert found.pop(good.name) is None
    assert "renamed" in str(found[copy.name])
    assert "never finished" in str(found[bare.name])
    assert all(found.values())
    assert_holds(tmp_path, 1)
    assert storage.next_sequence(tmp_path) == 100_000


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [Path.unlink, _zero, _cut, _empty, _grow, _flip, _directory, _pipe]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", ["rank-00000.json", "rank-00000.safetensors"])
def test_a_damaged_file_makes_the_older_checkpoint_count(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    save(tmp_path, step=1)
    newer = save(tmp_path, step=2)
    assert_holds(tmp_path, 2)
    damage(newer / file)
    checkpoint, _, problems = storage.load_newest(tmp_path)
    assert checkpoint.step == 1
    assert len(problems) == 1
    assert newer.name in problems[0]
    assert_holds(tmp_path, 1)


def save_world(root: Path, step: int, ranks: int, world_size: int) -> Path:
    directory = storage.create_checkpoint(
        root, step=step, sequence=storage.next_sequence(root), launch=LAUNCH
    )
    for rank in range(ranks):
        manifest = write_image(directory, small_image(step), rank=rank)
        manifest = msgspec.structs.replace(manifest, world_size=world_size)
        storage.commit(directory, manifest, still_ours=lambda: True)
    return directory


def test_a_checkpoint_needs_the_manifests_of_all_ranks(tmp_path: Path) -> None:
    save_world(tmp_path, 1, 3, 3)
    partial = save_world(tmp_path, 2, 2, 3)
    found = storage.scan(tmp_path)
    assert [one.committed for one in found] == [False, True]
    assert "2 of 3" in str(found[0].problem)
    assert len(found[1].manifests) == 3
    assert_holds(tmp_path, 1)
    (partial / "rank-00001.json").rename(partial / "rank-00002.json")
    assert "rank 1" in str(storage.scan(tmp_path)[0].problem)


def test_ranks_of_different_checkpoints_are_no_checkpoint(tmp_path: Path) -> None:
    one = save_world(tmp_path, 1, 2, 2)
    manifest = msgspec.structs.replace(
        storage.examine(one).manifests[1], run_id="other", checksum=""
    )
    (one / "rank-00001.json").write_bytes(storage.encode_manifest(manifest))
    assert "different" in str(storage.scan(tmp_path)[0].problem)


def test_sequences_grow_over_everything_that_has_a_name(tmp_path: Path) -> None:
    for made in [
        "step-000000001-s000007-7f3ac01e",
        ".trash-step-000000001-s000009-7f3ac01e",
        "step-000000001-s000008-7f3ac01e",
        "step-000000001-s000099-nothex00",
    ]:
        (tmp_path / made).mkdir()
    assert storage.next_sequence(tmp_path) == 10


def test_prune_keeps_the_newest_and_what_is_protected(tmp_path: Path) -> None:
    saved = [save(tmp_path, step=step) for step in (50, 40, 30, 20, 10)]
    assert set(storage.prune(tmp_path, 2, {saved[0]})) == {saved[1], saved[2]}
    assert steps(tmp_path) == [10, 20, 50]
    assert storage.prune(tmp_path, 2, {saved[0]}) == []
    with pytest.raises(ValueError, match="keep"):
        storage.prune(tmp_path, 0)


def test_only_valid_checkpoints_count(tmp_path: Path) -> None:
    old, damaged, kept, newest = [save(tmp_path, step=step) for step in (1, 2, 3, 4)]
    broken = save(tmp_path, step=5)
    _empty(damaged / "rank-00000.safetensors")
    _empty(broken / "rank-00000.safetensors")
    unfinished = storage.create_checkpoint(tmp_path, step=6, sequence=9, launch=LAUNCH)
    elsewhere = newest.rename(tmp_path / "my-favourite")
    assert storage.prune(tmp_path, 2) == []  # 3 and 1 are the only good ones left
    elsewhere.rename(newest)
    assert set(storage.prune(tmp_path, 2)) == {old, damaged}
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (kept, newest, broken, unfinished)
    }


def test_directories_that_users_named_are_never_deleted(tmp_path: Path) -> None:
    mine = save(tmp_path, step=1).rename(tmp_path / "step-1-of-mine")
    (tmp_path / ".trash-of-mine").mkdir()
    save(tmp_path, step=2)
    save(tmp_path, step=3)
    storage.prune(tmp_path, 1)
    storage.collect_leftovers(tmp_path, OTHER)
    assert mine.is_dir()
    assert (tmp_path / ".trash-of-mine").is_dir()
    assert storage.open(mine).step == 1


def test_leftovers_of_dead_launches_are_collected(tmp_path: Path) -> None:
    good = save(tmp_path, step=1)
    damaged = save(tmp_path, step=2)
    _empty(damaged / "rank-00000.json")
    dead = storage.create_checkpoint(tmp_path, step=3, sequence=8, launch=LAUNCH)
    write_image(dead, small_image())
    alive = storage.create_checkpoint(tmp_path, step=3, sequence=9, launch=OTHER)
    partial = save_world(tmp_path, 4, 1, 2)
    trash = tmp_path / f".trash-{CheckpointName(step=1, sequence=1, launch=OTHER)}"
    trash.mkdir()
    (trash / "rank-00000.safetensors").write_bytes(b"x")
    assert set(storage.collect_leftovers(tmp_path, OTHER + "0000")) == {dead, partial, trash}
    assert set(tmp_path.iterdir()) == {good, damaged, alive}


def test_what_cannot_be_read_just_now_is_no_leftover(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    for passes in (2, 3):  # listings: the root's two, that of the checkpoint
        faults.arm([Fault(point="fs.listdir", action="errno:EIO", after=passes)])
        storage.collect_leftovers(tmp_path, OTHER)
        faults.disarm()
    faults.arm([Fault(point="fs.pread", action="errno:EIO")])
    assert storage.collect_leftovers(tmp_path, OTHER) == []
    assert_holds(tmp_path, 1)


def test_what_cannot_be_looked_at_just_now_is_told_and_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    newest = save(tmp_path, step=2)
    faults.arm([Fault(point="fs.stat", action="errno:EIO", times=0, match=f"{newest}*")])
    found = storage.scan(tmp_path)
    assert [one.problem is None for one in found] == [False, True]
    assert "Input/output" in str(found[0].problem)
    checkpoint, _, problems = storage.load_newest(tmp_path)
    assert (checkpoint.step, len(problems)) == (1, 1)
    faults.disarm()
    assert storage.scan(tmp_path)[0].problem is None


def test_discard_is_harmless_twice_and_over_older_trash(tmp_path: Path) -> None:
    path = save(tmp_path, step=1)
    trash = tmp_path / f".trash-{path.name}"
    trash.mkdir()
    (trash / "old").write_text("")
    storage.discard(path)
    storage.discard(path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_deletion_is_told_and_the_others_done(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step=step)
    faults.arm([Fault(point="fs.rmtree", action="errno:EIO")])
    with pytest.raises(StorageError, match="cannot remove"):
        storage.prune(tmp_path, 2)
    assert steps(tmp_path) == [4, 3]
    assert len(storage.collect_leftovers(tmp_path, OTHER)) == 1
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("seed", range(8))
def test_random_saves_failures_pins_and_damage_never_lose_the_newest(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    good: list[Path] = []  # valid ones by age
    pinned: set[Path] = set()
    for _ in range(25):
        action = chance.choice(["save", "save", "fail", "pin", "damage", "prune", "leftovers"])
        step = chance.randrange(1000)
        if action == "save":
            good.append(save(tmp_path, step=step))
        elif action == "fail":
            point = chance.choice(["fs.pwrite", "fs.rename", "fs.fdatasync"])
            faults.arm([Fault(point=point, action="errno:ENOSPC", after=chance.randrange(2))])
            with contextlib.suppress(StorageError):
                good.append(save(tmp_path, step=step))
            faults.disarm()
        elif action == "pin" and good:
            pinned = {chance.choice(good)}
        elif action == "damage" and len(good) > 1:
            hurt = good.pop(chance.randrange(len(good)))
            pinned.discard(hurt)
            _cut(hurt / "rank-00000.safetensors")
        elif action == "prune":
            keep = chance.randrange(1, 4)
            storage.prune(tmp_path, keep, pinned)
            good = [one for one in good[:-keep] if one in pinned] + good[-keep:]
        elif action == "leftovers":
            storage.collect_leftovers(tmp_path, OTHER)
        valid = [one.path for one in storage.scan(tmp_path) if one.problem is None]
        assert valid == good[::-1]
