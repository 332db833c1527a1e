"""The second tier: filled behind, never waited for in training, and enough to restore from.

Runs end to end on the real file system. A slow tier is one whose copies are held by an event, a
hung one has calls that do not come back.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from identity_kit import Bag, assert_same, checkpointer, one_pass, truth
from storage_kit import assert_holds, save
from test_storage_power_loss import Disk

import gockpt
from gockpt import faults, storage
from gockpt.agent import copier
from gockpt.cli.main import call
from gockpt.errors import (
    ConfigError,
    CorruptError,
    LockedError,
    NoCheckpointError,
    SpaceError,
    StorageError,
)
from gockpt.faults import Fault
from gockpt.storage import Tier, fs, reader
from gockpt.storage.lock import Lock, holder
from gockpt.storage.replica import replicate
from gockpt.storage.tier import claim

DEADLINE = 200.0
EVER = "delay:600"


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "RETRY_FIRST", 0.01)
    monkeypatch.setattr(copier, "RETRY_MOST", 0.05)
    monkeypatch.setattr(copier, "STOP_WAIT", 0.05)


@pytest.fixture
def main(tmp_path: Path) -> Path:
    return tmp_path / "main"


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return tmp_path / "tier"


class Gate:
    """Holds the copies to the tier until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

        def replicate(*args: Any, **kwargs: Any) -> Path:
            self.reached.set()
            assert self.open.wait(DEADLINE)
            return storage.replicate(*args, **kwargs)

        monkeypatch.setattr(copier, "replicate", replicate)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open.set()


def passes(ckpt: gockpt.Checkpointer, training: Bag, first: int, last: int) -> None:
    """Passes with a checkpoint each (``every=1``), each durable before the next."""
    for step in range(first, last + 1):
        one_pass(ckpt, training, step)
        ckpt.step()
        ckpt.wait(DEADLINE)


def running(training: Bag, main: Path, tier: Tier | Path, **more: Any) -> gockpt.Checkpointer:
    settings = {"every": 1, "windows": 1, "keep": 2, "tier": tier} | more
    return checkpointer(training, main, **settings)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def filled(ckpt: gockpt.Checkpointer, step: int) -> None:
    """Wait until the tier has this step, and nothing is on its way."""
    client = ckpt.client
    assert client is not None
    watch = client.tier
    assert watch is not None
    until(lambda: watch.holds(1) and watch.state is not None and watch.state.step == step, "tier")


def superseded(ckpt: gockpt.Checkpointer) -> int:
    assert ckpt.client is not None
    assert ckpt.client.tier is not None
    state = ckpt.client.tier.state
    return 0 if state is None else state.superseded


def steps_of(path: Path) -> list[int]:
    return [one.step for one in reversed(storage.scan(path)) if one.problem is None]


def files(checkpoint: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in checkpoint.iterdir()}


def left_behind(tier: Path) -> list[str]:
    """What is in a tier beside whole checkpoints."""
    whole = {one.path.name for one in storage.scan(tier) if one.problem is None}
    return sorted({path.name for path in tier.iterdir()} - whole - {".gockpt"})


# -- filled behind ---------------------------------------------------------------------------------


def test_the_tier_is_a_directory_of_checkpoints_with_its_own_retention(
    main: Path, tier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Bag()
    with running(training, main, Tier(str(tier), keep=2, keep_every=3), keep=1) as ckpt:
        for step in range(1, 7):
            passes(ckpt, training, step, step)
            filled(ckpt, step)
            if step == 1:
                ckpt.pin(1)
        expected = truth(training)
    assert steps_of(main) == [1, 6]
    assert steps_of(tier) == [1, 3, 5, 6]  # pinned, kept, and the newest two
    assert left_behind(tier) == []
    assert_same(gockpt.open(tier).load(), expected, "tier")
    assert all(gockpt.open(tier, step).verify() == [] for step in (1, 3, 5, 6))
    name = gockpt.open(main).path.name
    assert files(tier / name) == files(main / name) | {"kept": b""}
    assert call(["verify", str(tier)]) == 0
    assert call(["ls", str(tier)]) == 0
    assert "kept for ever" in capsys.readouterr().out


def test_a_slow_tier_holds_up_nobody_and_gets_the_newest(
    main: Path, tier: Path, gate: Gate
) -> None:
    training = Bag()
    with running(training, main, tier, keep=1) as ckpt:
        passes(ckpt, training, 1, 1)
        assert gate.reached.wait(DEADLINE)
        passes(ckpt, training, 2, 5)  # durable on the SSD, one after the other
        until(lambda: superseded(ckpt) == 3, "three that were passed over")
        until(lambda: steps_of(main) == [1, 5], "retention, which spares the one in copy")
        assert steps_of(tier) == []
        gate.open.set()
    assert steps_of(main) == [1, 5]
    assert steps_of(tier) == [1, 5]


def test_pinned_ones_that_were_passed_over_are_copied_later(
    main: Path, tier: Path, gate: Gate
) -> None:
    training = Bag()
    with running(training, main, tier, keep=1) as ckpt:
        passes(ckpt, training, 1, 1)
        assert gate.reached.wait(DEADLINE)
        passes(ckpt, training, 2, 2)
        ckpt.pin(2)
        passes(ckpt, training, 3, 3)
        until(lambda: superseded(ckpt) == 1, "one that was passed over")
        gate.open.set()
        until(lambda: steps_of(tier) == [1, 2, 3], "the pinned one")
    assert [one.step for one in storage.scan(tier) if one.marks] == [2]


def test_a_hung_tier_holds_up_neither_training_nor_retention_nor_the_end(
    main: Path, tier: Path, gate: Gate
) -> None:
    training = Bag()
    ckpt = running(training, main, Tier(str(tier), patience=0.3), keep=1)
    passes(ckpt, training, 1, 1)
    assert gate.reached.wait(DEADLINE)
    time.sleep(0.3)  # its patience
    passes(ckpt, training, 2, 4)
    until(lambda: steps_of(main) == [4], "retention, which spares it no more")
    with pytest.raises(StorageError, match=r"did not reach the tier .*it is safe in"):
        ckpt.close()
    assert steps_of(main) == [4]
    assert steps_of(tier) == []
    gate.open.set()


def test_an_agent_that_hangs_in_the_tier_leaves_in_time(
    main: Path, tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Bag()
    hang = [Fault(point="fs.pwrite", action=EVER, match=f"{tier}/step-*", times=0)]
    ckpt = running(
        training, main, Tier(str(tier), patience=1.0), agent="process", faults=hang, on_error="warn"
    )
    passes(ckpt, training, 1, 2)
    pid = holder(main / ".gockpt" / "rank-00000.lock")["pid"]
    assert isinstance(pid, int)
    began = time.monotonic()
    ckpt.close()
    assert time.monotonic() - began < 10
    assert not psutil.pid_exists(pid)
    assert "did not reach the tier" in caplog.text
    # The next launch finds what it lacks, and goes on.
    with running(Bag(), main, tier):
        pass
    assert steps_of(tier) == [2]
    assert left_behind(tier) == []


def test_an_agent_killed_in_the_middle_of_a_copy_is_replaced_and_the_copy_made(
    main: Path, tier: Path
) -> None:
    training = Bag()
    kill = [Fault(point="fs.pwrite", action="kill", match=f"{tier}/step-*", after=1)]
    with running(training, main, tier, agent="process", faults=kill) as ckpt:
        passes(ckpt, training, 1, 1)
        client = ckpt.client
        assert client is not None
        until(lambda: client.generation == 2, "another agent")
        filled(ckpt, 1)
        passes(ckpt, training, 2, 2)
        expected = truth(training)
    assert steps_of(tier) == [1, 2]
    assert left_behind(tier) == []
    assert_same(gockpt.open(tier).load(), expected, "tier")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        one.getMessage()
        for one in caplog.records
        if one.name == "gockpt" and "is not being filled" in one.getMessage()
    ]


@pytest.mark.parametrize("call", ["fs.fallocate", "fs.pwrite", "fs.rename", "fs.fsync_dir"])
def test_what_fails_on_the_tier_is_tried_again(
    main: Path, tier: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Bag()
    error = {"fs.fallocate": "ENOSPC", "fs.pwrite": "EIO"}.get(call, "ESTALE")
    fault = Fault(point=call, action=f"errno:{error}", match=f"{tier}/step-*", times=3)
    with running(training, main, tier, faults=[fault]) as ckpt:
        passes(ckpt, training, 1, 3)
        expected = truth(training)
    assert steps_of(tier)[-1] == 3
    assert left_behind(tier) == []
    assert_same(gockpt.open(tier).load(), expected, "tier")


def test_a_full_tier_is_told_once_and_at_the_end(
    main: Path, tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Bag()
    full = Fault(point="fs.fallocate", action="errno:ENOSPC", match=f"{tier}/*", times=0)
    ckpt = running(training, main, Tier(str(tier), patience=0.5), faults=[full])
    passes(ckpt, training, 1, 3)
    until(lambda: bool(warnings_of(caplog)), "a warning")
    passes(ckpt, training, 4, 5)
    with pytest.raises(SpaceError, match="did not reach the tier"):
        ckpt.close()
    assert len(warnings_of(caplog)) == 1
    assert "SpaceError" in warnings_of(caplog)[0]
    assert steps_of(main) == [4, 5]
    assert left_behind(tier) == []


# -- restoring from it -----------------------------------------------------------------------------


@pytest.fixture
def trained(main: Path, tier: Path) -> dict[str, torch.Tensor]:
    """Checkpoints 1 to 3 in both; what the last one holds."""
    training = Bag()
    with running(training, main, tier) as ckpt:
        for step in (1, 2, 3):
            passes(ckpt, training, step, step)
            filled(ckpt, step)
        return truth(training)


def test_a_directory_that_was_lost_is_restored_from_its_tier(
    main: Path, tier: Path, trained: dict[str, torch.Tensor]
) -> None:
    shutil.rmtree(main)
    training = Bag(seed=1)
    with running(training, main, Tier(str(tier), keep=1)) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert (restored.step, restored.source, restored.problems) == (3, "tier", ())
        assert_same(truth(training), trained, "restored")
        passes(ckpt, training, 4, 5)
        filled(ckpt, 5)
    assert steps_of(main) == [4, 5]
    assert steps_of(tier) == [3, 5] or steps_of(tier) == [3, 4, 5]  # 3 was restored from
    assert [one.sequence for one in storage.scan(main)] == [5, 4]


def test_the_newest_of_both_is_used_and_damage_told(
    main: Path, tier: Path, trained: dict[str, torch.Tensor]
) -> None:
    image = gockpt.open(main, 3).path / "rank-00000.safetensors"
    raw = bytearray(image.read_bytes())
    raw[len(raw) // 2] ^= 1
    image.write_bytes(raw)
    training = Bag(seed=1)
    with running(training, main, tier) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert (restored.step, restored.source) == (3, "tier")
        assert [str(image) in problem for problem in restored.problems] == [True]
        assert_same(truth(training), trained, "restored")
        restored = ckpt.restore(step=2)
        assert restored is not None
        assert (restored.step, restored.source) == (2, "ssd")


def test_a_tier_that_does_not_answer_is_told_and_the_directory_used(
    main: Path, tier: Path, trained: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    real = fs.listdir

    def listdir(path: Path) -> list[str]:
        if path.name.startswith("tier"):
            answer.wait(DEADLINE)
        return real(path)

    monkeypatch.setattr(fs, "listdir", listdir)
    monkeypatch.setattr(reader, "TIER_ANSWER", 0.05)
    monkeypatch.setattr(copier, "RESTART_ANSWER", 0.05)
    monkeypatch.setattr(copier, "FIRST_ANSWER", 0.05)
    with running(Bag(seed=1), main, Tier(str(tier), patience=0.1), on_error="warn") as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert (restored.step, restored.source) == (3, "ssd")
        assert ["hung" in problem for problem in restored.problems] == [True]
    with pytest.raises(NoCheckpointError, match="hung"):
        storage.load_newest(main.parent / "elsewhere", tier=tier)
    # Without checkpoints nobody could tell what numbers the tier has used.
    with pytest.raises(StorageError, match="no checkpoints to go on from"):
        running(Bag(), main.parent / "elsewhere", tier.with_name("tier-2"))
    answer.set()


def test_what_the_tier_lacks_is_copied_after_a_restart(
    main: Path, tier: Path, trained: object
) -> None:
    for one in tier.glob("step-000000003-*"):
        shutil.rmtree(one)
    (tier / "step-000000003-s000003-ffffffff").mkdir()  # an attempt of an agent that was killed
    with running(Bag(), main, tier):
        pass
    assert steps_of(tier) == [1, 2, 3]
    assert left_behind(tier) == []


def test_training_by_command_goes_on_from_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "train --model gpt-tiny --device cpu --tokens 16 --interval 2 --tier tier"
    with torch.random.fork_rng():
        assert call([*line.split(), "--steps", "2"]) == 0
        shutil.rmtree("checkpoints")
        assert call([*line.split(), "--steps", "4"]) == 0
    assert "goes on at step 2 (from its tier tier)" in capsys.readouterr().out
    assert steps_of(Path("tier")) == [2, 4]


# -- whose tier it is ------------------------------------------------------------------------------


def test_two_runs_do_not_share_a_tier(main: Path, tier: Path, trained: object) -> None:
    other = main.with_name("other")
    # As if the disk of the first had been lost, which is still there.
    in_use = pytest.raises(LockedError, match="tier is in use by trainer")
    with running(Bag(), main, tier), in_use:
        running(Bag(), other, tier)
    with running(Bag(), other, main.with_name("second")):
        pass
    with pytest.raises(ConfigError, match=f"is the tier of {main} on"):
        running(Bag(), other, tier)
    third = main.with_name("third")
    third.mkdir()
    save(third, step=1)  # has checkpoints, and never had a tier
    with pytest.raises(ConfigError, match=f"is the tier of {main} on"):
        running(Bag(), third, tier)
    Lock.acquire(tier, 0, {}).release()


def test_an_identity_is_given_once(main: Path, tier: Path) -> None:
    main.mkdir()
    claim(main, tier)
    first = (main / ".gockpt" / "identity").read_bytes()
    claim(main, tier)
    assert (tier / ".gockpt" / "identity").read_bytes() == first
    assert (main / ".gockpt" / "identity").read_bytes() == first
    (tier / ".gockpt" / "identity").write_bytes(b"{")
    with pytest.raises(CorruptError, match="identity is damaged"):
        claim(main, tier)


@pytest.mark.parametrize(
    ("tier", "why"),
    [
        (Tier("a", keep=0), "keep must be at least 1"),
        (Tier("a", keep_every=True), "keep_every must be at least 1"),
        (Tier("a", patience=0), "patience must be above 0"),
        ("main", "overlap"),
        (Path("main/tier"), "overlap"),
        (".", "overlap"),
    ],
)
def test_a_tier_that_cannot_work_is_refused(
    tier: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=why):
        running(Bag(), Path("main"), tier)
    assert list(tmp_path.iterdir()) == []


# -- one copy --------------------------------------------------------------------------------------


def found(root: Path) -> storage.Found:
    one = storage.newest(root)
    assert one is not None
    return one


def test_damage_is_never_copied(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    source = save(tmp_path, step=1)
    one = found(tmp_path)
    image = source / "rank-00000.safetensors"
    raw = bytearray(image.read_bytes())
    raw[-1] ^= 1
    image.write_bytes(raw)
    with pytest.raises(CorruptError, match="not those that were written"):
        replicate(one, tmp_path / "tier", still_ours=lambda: True)
    assert list((tmp_path / "tier").iterdir()) == []


def test_a_copy_is_not_committed_without_its_lock(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    save(tmp_path, step=1)
    with pytest.raises(LockedError):
        replicate(found(tmp_path), tmp_path / "tier", still_ours=lambda: False)
    assert list((tmp_path / "tier").iterdir()) == []


@pytest.mark.parametrize("refuse", ["fs.direct", "fs.pwrite"])
def test_a_copy_without_direct_writes_is_the_same(tmp_path: Path, refuse: str) -> None:
    (tmp_path / "tier").mkdir()
    save(tmp_path, step=1)
    faults.arm([Fault(point=refuse, action="errno:EINVAL", match=f"{tmp_path}/tier/*", times=1)])
    copy = replicate(found(tmp_path), tmp_path / "tier", still_ours=lambda: True)
    assert gockpt.open(copy).verify() == []
    assert_holds(tmp_path / "tier", 1)


def explore(tmp_path: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Copy steps 1, 2, 3, keeping 1; return what went wrong in any state of the tier."""
    main, tier = tmp_path / "main", tmp_path / "tier"
    main.mkdir()
    tier.mkdir()
    sources = []
    for step in (1, 2, 3):
        save(main, step=step)
        sources.append(found(main))
    chance = random.Random(0)
    choices: list[Callable[[], bool]] = [
        lambda: False,
        lambda: True,
        *[lambda: chance.random() < 0.5] * 4,
    ]
    copied, states = 0, 0
    failures: list[str] = []

    def crash(disk: Disk) -> None:
        nonlocal states
        for keep in choices:
            states += 1
            target = tmp_path / f"state-{states}"
            disk.build(target, keep)
            try:
                if copied:
                    step = storage.load_newest(target)[0].step
                    assert step in (copied, copied + 1)
                    assert_holds(target, step)
            except (AssertionError, StorageError) as error:
                failures.append(f"{target.name}: {error}")

    disk = Disk(tier, crash)
    disk.install(patch)
    for source in sources:
        replicate(source, tier, still_ours=lambda: True)
        copied = source.step
        crash(disk)
        storage.prune(tier, 1)
        crash(disk)
    assert states > 200
    return failures


def test_every_state_of_the_tier_after_a_power_loss_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        assert explore(tmp_path, patch) == []


@pytest.mark.parametrize("forgotten", ["fdatasync", "fsync_dir"])
def test_a_sync_that_the_copy_forgets_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Disk, forgotten, lambda *_: None)
        assert explore(tmp_path, patch) != []
