"""A Checkpointer with volumes: training, restoring, failing disks, dying agents, the commands."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import Bag, assert_same, check, checkpointer, one_pass, run, truth

import gockpt
from gockpt import faults
from gockpt.agent.protocol import Pace
from gockpt.cli.main import call
from gockpt.faults import Fault
from gockpt.storage import examine, fs

DEADLINE = 200.0

SHAPES = ((700, 500), (130,), (), (0, 4), (513,), (300, 500))
"""6 MB with Adam's state: six extents, and tensors larger than one."""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def volumes(tmp_path: Path) -> list[Path]:
    return [tmp_path / "one", tmp_path / "two"]


def large(seed: int = 0) -> Bag:
    return Bag(seed, shapes=SHAPES)


def parts(volumes: list[Path]) -> list[str]:
    return sorted(one.name for volume in volumes for one in volume.glob("gockpt-*/*"))


def passes(ckpt: gockpt.Checkpointer, training: Bag, first: int, last: int) -> None:
    for step in range(first, last + 1):
        one_pass(ckpt, training, step)
        ckpt.step()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("windows", [1, 3])
def test_every_bit_of_every_step_comes_back(count: int, windows: int, tmp_path: Path) -> None:
    volumes = [tmp_path / f"v{number}" for number in range(count)]
    ran = run(large(), tmp_path / "main", steps=8, every=4, windows=windows, volumes=volumes)
    check(ran, [4, 8], lambda: large(99))
    found = gockpt.open(tmp_path / "main")
    names = [Path(file.volume).parent for file in found.manifests[0].files]
    assert names == [volume.resolve() for volume in volumes]
    assert any(tensor.pieces for tensor in found.manifests[0].tensors)
    nbytes = [file.stat().st_size for v in volumes for file in v.glob("gockpt-*/*08-*/*")]
    assert sum(nbytes) == found.info.nbytes
    assert max(nbytes) - min(nbytes) <= 1 << 20


def test_a_state_that_is_smaller_than_an_extent(tmp_path: Path, volumes: list[Path]) -> None:
    ran = run(Bag(), tmp_path / "main", steps=2, every=2, windows=2, volumes=volumes)
    check(ran, [2], lambda: Bag(99))
    assert len(parts(volumes)) == 1


def test_retention_goes_over_volumes(tmp_path: Path, volumes: list[Path]) -> None:
    path = tmp_path / "main"
    ran = run(large(), path, steps=6, every=1, windows=1, keep=2, volumes=volumes)
    there = sorted(one.name for one in path.glob("step-*"))
    assert len(there) == 2
    assert parts(volumes) == sorted(there * 2)
    check(ran, [5, 6], None)
    run(large(), path, steps=2, every=1, windows=1, keep=1)  # without volumes now
    assert parts(volumes) == []


def test_volumes_that_moved_are_found_by_the_next_start(
    tmp_path: Path, volumes: list[Path]
) -> None:
    path = tmp_path / "main"
    ran = run(large(), path, steps=4, every=2, windows=2, volumes=volumes)
    moved = [volume.rename(volume.with_name(f"{volume.name}-moved")) for volume in volumes]
    with (
        checkpointer(large(9), path) as ckpt,
        pytest.raises(gockpt.NoCheckpointError, match="missing on volume"),
    ):
        ckpt.restore()
    assert gockpt.open(path, volumes=moved).verify() == []
    training = large(9)
    with checkpointer(training, path, volumes=moved) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert restored.step == 4
        assert_same(truth(training), ran.moments[4].tensors, "restored from moved volumes")


def test_a_missing_volume_is_told_and_an_older_one_used(
    tmp_path: Path, volumes: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "main"
    old = run(large(), path, steps=2, every=2, windows=2)
    run(large(), path, steps=2, every=2, windows=2, volumes=volumes)
    volumes[1].rename(tmp_path / "unplugged")
    training = large(9)
    with checkpointer(training, path) as ckpt:
        restored = ckpt.restore()
    assert restored is not None
    assert len(restored.problems) == 1
    assert f"missing on volume {volumes[1].resolve()}" in restored.problems[0]
    assert str(volumes[1]) in caplog.text
    assert_same(truth(training), old.moments[2].tensors, "the older one")


# -- disks that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "number"),
    [("mkdir", "EROFS"), ("fallocate", "ENOSPC"), ("pwrite", "EDQUOT"), ("fdatasync", "EIO")],
)
def test_one_volume_that_fails_costs_one_checkpoint(
    call: str, number: str, tmp_path: Path, volumes: list[Path]
) -> None:
    training = large()
    path = tmp_path / "main"
    with checkpointer(training, path, every=2, windows=2, volumes=volumes) as ckpt:
        passes(ckpt, training, 1, 2)
        ckpt.wait(DEADLINE)
        fault = Fault(point=f"fs.{call}", action=f"errno:{number}", match="*/two/*", times=0)
        faults.arm([fault])
        passes(ckpt, training, 3, 4)
        handle = ckpt.save()
        with pytest.raises(gockpt.StorageError, match=f"volume {volumes[1].resolve()}") as raised:
            handle.wait(DEADLINE)
        assert raised.value.errno == getattr(errno, number)
        assert isinstance(raised.value, gockpt.SpaceError) == (number in ("ENOSPC", "EDQUOT"))
        faults.disarm()
        one_pass(ckpt, training, 5)
        with pytest.raises(gockpt.StorageError, match=f"volume {volumes[1].resolve()}"):
            ckpt.step()
        passes(ckpt, training, 6, 6)
    there = sorted(one.name for one in path.glob("*step-*"))
    assert [int(name[5:14]) for name in there] == [2, 6]
    assert parts(volumes) == sorted(there * 2)
    plain = large()
    for step in range(1, 7):
        plain.compute(step)
        plain.update(step)
    assert_same(truth(training), truth(plain), "training was not disturbed")


def test_a_volume_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad = tmp_path / "file" / "volume"
    with pytest.raises(gockpt.StorageError, match=f"volume {bad}: cannot"):
        checkpointer(large(), tmp_path / "main", volumes=[tmp_path / "good", bad])
    with checkpointer(large(), tmp_path / "main"):
        pass  # the lock is free again


def test_a_slow_volume_is_named_in_the_log(
    tmp_path: Path, volumes: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    training = large()
    faults.arm([Fault(point="fs.fdatasync", action="delay:1.5", match="*/two/*")])
    with checkpointer(training, tmp_path / "main", every=1, windows=1, volumes=volumes) as ckpt:
        passes(ckpt, training, 1, 1)
        ckpt.wait(DEADLINE)
    assert f"step 1: volume {volumes[1].resolve()} is slow" in caplog.text


def test_a_volume_without_room_is_named_before_the_first_step(
    tmp_path: Path,
    volumes: list[Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = {volumes[0].resolve(): 1 << 40, volumes[1].resolve(): 1 << 20}
    monkeypatch.setattr(fs, "free_bytes", room.__getitem__)
    with checkpointer(large(), tmp_path / "main", volumes=volumes):
        said = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert [f"{volumes[1].resolve()} has 0.0 GB free" in one for one in said] == [True]


def test_each_volume_has_the_modelled_rate_of_a_disk(tmp_path: Path, volumes: list[Path]) -> None:
    training = large()
    path = tmp_path / "main"
    pace = Pace(write=3e6)
    with checkpointer(training, path, every=1, windows=1, volumes=volumes, pace=pace) as ckpt:
        passes(ckpt, training, 1, 1)
        ckpt.wait(DEADLINE)
        assert ckpt.client is not None
        times = {stage: when for _, stage, when in ckpt.client.totals.latencies}
        nbytes = ckpt.client.totals.persisted_bytes
    assert nbytes == gockpt.open(path).info.nbytes
    took = times["durable"] - times["target"]
    assert took > 0.8 * nbytes / 2 / pace.write


# -- agents that die -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kill",
    [
        Fault(point="fs.pwrite", action="kill", match="*/two/*", after=12),
        Fault(point="fs.fsync_dir", action="kill", match="*/two/gockpt*", after=3),
    ],
    ids=lambda fault: fault.point,
)
def test_an_agent_that_is_killed_leaves_nothing_behind(
    kill: Fault, tmp_path: Path, volumes: list[Path]
) -> None:
    def after(ckpt: gockpt.Checkpointer, training: Any, step: int) -> None:
        if step % 4 == 0:
            ckpt.wait(DEADLINE)

    path = tmp_path / "main"
    ran = run(
        large(), path, steps=8, every=4, windows=1, after=after, agent="process",
        faults=[kill], volumes=volumes,
    )  # fmt: skip
    check(ran, [4, 8], lambda: large(99))
    there = sorted(one.name for one in path.glob("*step-*"))
    assert [int(name[5:14]) for name in there] == [4, 8]
    assert parts(volumes) == sorted(there * 2)


# -- commands --------------------------------------------------------------------------------------


def test_train_and_ls_and_verify(
    tmp_path: Path, volumes: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = map(str, volumes)
    base = ["train", "--model", "gpt-tiny", "--device", "cpu", "--tokens", "16", "--interval", "2"]
    where = ["--dir", str(tmp_path / "main"), "--volume", one, "--volume", two]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        assert call([*base, *where, "--steps", "4"]) == 0
    torch.set_num_threads(before)
    capsys.readouterr()
    assert call(["ls", str(tmp_path / "main"), "--json", "-"]) == 0
    (new, _) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["volume"] for one in new["volumes"]] == [str(v.resolve()) for v in volumes]
    assert sum(one["bytes"] for one in new["volumes"]) == new["bytes"]
    assert all(one["seconds"] > 0 for one in new["volumes"])
    assert call(["verify", str(tmp_path / "main")]) == 0
    moved = volumes[1].rename(tmp_path / "moved")
    assert call(["verify", str(tmp_path / "main")]) == 1
    assert f"missing on volume {volumes[1].resolve()}" in capsys.readouterr().err
    assert call(["verify", str(tmp_path / "main"), "--volume", str(moved)]) == 0
    assert examine(Path(new["path"])).problem is not None
    commands = [["inspect"], ["pin"], ["export"]]
    rest = {"pin": ["4"], "export": [str(tmp_path / "out.safetensors")]}
    for command in commands:
        line = [*command, str(tmp_path / "main"), *rest.get(command[0], [])]
        assert call(line) == 2
        assert call([*line, "--volume", str(moved)]) == 0
    assert [path.name for path in Path(new["path"]).iterdir() if path.name == "pinned"]
    assert (tmp_path / "out.safetensors").is_file()


def test_train_refuses_volumes_without_room(
    tmp_path: Path,
    volumes: list[Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    line = ["train", "--model", "gpt-tiny", "--device", "cpu", "--dir", str(tmp_path / "main")]
    assert call([*line, "--volume", str(volumes[0]), "--volume", str(volumes[1])]) == 2
    assert f"--volume {tmp_path}" in capsys.readouterr().err
