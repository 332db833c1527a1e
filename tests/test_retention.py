"""What retention must never take: the newest valid one, the one restored from, marked ones.

Random histories of saves, failures, damage, pins, restores and launches are compared with a model
that is as simple as the promise.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from identity_kit import Bag, checkpointer, one_pass
from storage_kit import LAUNCH, Image, save, small_image, write_image

import gockpt
from gockpt import faults, storage
from gockpt.cli.main import call
from gockpt.errors import NoCheckpointError, StorageError
from gockpt.faults import Fault
from gockpt.storage import fs
from gockpt.storage.marks import mark
from gockpt.storage.names import KEPT

EVERY = 5
DEADLINE = 200.0


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@functools.cache
def image() -> Image:
    return small_image()


@dataclass
class Known:
    """A checkpoint as the model knows it."""

    path: Path
    step: int
    valid: bool = True
    pinned: bool = False

    @property
    def marked(self) -> bool:
        return self.pinned or self.step % EVERY == 0


class History:
    """A directory, and what must be in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: list[Known] = []  # newest first
        self.restored: Known | None = None

    def save(self, step: int) -> None:
        """As an agent does it: what keep_every marks is marked before it is committed."""
        sequence = storage.next_sequence(self.root)
        assert all(sequence > storage.parse_name(one.path.name).sequence for one in self.known)  # type: ignore[union-attr]
        path = storage.create_checkpoint(self.root, step=step, sequence=sequence, launch=LAUNCH)
        try:
            manifest = write_image(path, image())
            if step % EVERY == 0:
                mark(path, KEPT)
            storage.commit(path, manifest, still_ours=lambda: True)
        except StorageError:
            storage.discard(path)
            raise
        self.known.insert(0, Known(path, step))

    def fail(self, step: int) -> None:
        point = ("fs.pwrite", "fs.rename", "fs.fdatasync", "fs.create")[step % 4]
        faults.arm([Fault(point=point, action="errno:ENOSPC", after=step % 2)])
        with contextlib.suppress(StorageError):
            self.save(step)
        faults.disarm()

    def damage(self, number: int) -> None:
        one = self._pick(number)
        if one is not None and sum(other.valid for other in self.known) > 1:
            (one.path / "rank-00000.safetensors").unlink(missing_ok=True)
            one.valid = False

    def pin(self, number: int) -> None:
        one = self._pick(number)
        if one is None:
            return
        newest = next((k for k in self.known if k.step == one.step and k.valid), None)
        if newest is None:
            with pytest.raises(NoCheckpointError):
                storage.pin(self.root, one.step)
        else:
            assert storage.pin(self.root, one.step) == newest.path
            newest.pinned = True

    def unpin(self, number: int) -> None:
        one = self._pick(number)
        if one is not None and one.step % EVERY:
            storage.unpin(self.root, one.step)
            for other in self.known:
                other.pinned &= other.step != one.step

    def restore(self, number: int) -> None:
        valid = [one for one in self.known if one.valid]
        if valid:
            self.restored = valid[number % len(valid)]

    def prune(self, number: int) -> None:
        keep = 1 + number % 3
        protect = {self.restored.path} if self.restored else set()
        storage.prune(self.root, keep, protect)
        valid = [one for one in self.known if one.valid]
        if len(valid) < keep:
            return
        line = self.known.index(valid[keep - 1])
        newer, older = self.known[: line + 1], self.known[line + 1 :]
        self.known = newer + [one for one in older if one.marked or one is self.restored]

    def launch(self, number: int) -> None:
        """A new launch collects what a dead one has left."""
        (self.root / f"step-{number:09d}-s999999-ffffffff").mkdir(exist_ok=True)
        storage.collect_leftovers(self.root, LAUNCH)

    def _pick(self, number: int) -> Known | None:
        return self.known[number % len(self.known)] if self.known else None

    def check(self) -> None:
        found = storage.scan(self.root)
        assert [one.path for one in found] == [one.path for one in self.known]
        assert [one.problem is None for one in found] == [one.valid for one in self.known]
        assert [bool(one.marks) for one in found] == [one.marked for one in self.known]
        if self.restored is not None:
            assert self.restored in self.known
        assert not list(self.root.glob(".trash-*"))


ACTIONS: list[Callable[[History, int], None]] = [
    History.save, History.save, History.save, History.fail, History.damage, History.pin,
    History.unpin, History.restore, History.prune, History.prune, History.launch,
]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 12)), min_size=5, max_size=25))
def test_no_history_loses_what_must_stay(
    actions: list[tuple[Callable[[History, int], None], int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        history = History(Path(name))
        for act, number in actions:
            act(history, number)
            history.check()
        history.prune(0)
        history.check()


# -- pins ------------------------------------------------------------------------------------------


def rename_after(monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], object]) -> None:
    """Before the first rename, and in front of whoever makes it, do this with its source."""
    real = fs.rename

    def rename(source: Path, target: Path) -> None:
        monkeypatch.setattr(fs, "rename", real)
        work(source)
        fs.rename(source, target)

    monkeypatch.setattr(fs, "rename", rename)


def test_a_pin_in_the_last_moment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention has already chosen it when it is pinned."""
    old, new = save(tmp_path, step=1), save(tmp_path, step=2)
    rename_after(monkeypatch, lambda source: storage.pin(tmp_path, 1))
    storage.prune(tmp_path, 1)
    assert {one.path for one in storage.scan(tmp_path) if one.problem is None} == {old, new}
    assert not list(tmp_path.glob(".trash-*"))


def test_a_pin_in_the_last_moment_counts_even_if_the_agent_dies_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = save(tmp_path, step=1), save(tmp_path, step=2)
    storage.pin(tmp_path, 1)
    old.rename(old.with_name(f".trash-{old.name}"))  # what an agent that died there leaves
    assert storage.collect_leftovers(tmp_path, LAUNCH) == []
    assert storage.examine(old).problem is None


def test_a_failed_checkpoint_is_deleted_although_it_is_marked(tmp_path: Path) -> None:
    failed = storage.create_checkpoint(tmp_path, step=5, sequence=1, launch="ffffffff")
    mark(failed, KEPT)
    assert storage.collect_leftovers(tmp_path, LAUNCH) == [failed]
    assert storage.scan(tmp_path) == []


def steps_of(path: Path) -> list[int]:
    return [one.step for one in reversed(storage.scan(path))]


def test_a_run_keeps_multiples_pinned_ones_and_the_one_restored_from(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=2, windows=1, keep=1, keep_every=8) as ckpt:
        for step in range(1, 13):
            one_pass(ckpt, training, step)
            ckpt.step()
            ckpt.wait(DEADLINE)
            if step == 4:
                ckpt.pin(4)
                with pytest.raises(NoCheckpointError, match=r"no checkpoint of step 3, only .*4"):
                    ckpt.pin(3)
        assert ckpt.restore() is not None
        for step in range(13, 17):
            one_pass(ckpt, training, step)
            ckpt.step()
            ckpt.wait(DEADLINE)
    assert steps_of(tmp_path) == [4, 8, 12, 16]
    assert all(gockpt.open(tmp_path, step).verify() == [] for step in (4, 8, 12, 16))


# -- the commands ----------------------------------------------------------------------------------


def test_pin_and_unpin_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step=step)
    assert call(["pin", str(tmp_path), "1"]) == 0
    assert "is pinned" in capsys.readouterr().out
    storage.prune(tmp_path, 1)
    assert steps_of(tmp_path) == [1, 3]
    assert call(["ls", str(tmp_path)]) == 0
    assert "valid, pinned" in capsys.readouterr().out
    assert call(["unpin", str(tmp_path), "1"]) == 0
    assert "is no longer pinned" in capsys.readouterr().out
    assert call(["unpin", str(tmp_path), "1"]) == 0
    assert "no checkpoint of step 1 was pinned" in capsys.readouterr().out
    storage.prune(tmp_path, 1)
    assert steps_of(tmp_path) == [3]


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_what_is_not_there_cannot_be_pinned(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, step=1)
    assert call([command, str(tmp_path), "2"]) == 2
    assert "has no checkpoint of step 2, only 1" in capsys.readouterr().err
    assert call([command, str(tmp_path / "nowhere"), "1"]) == 2
    assert "no such directory" in capsys.readouterr().err
