"""Power loss at every call: what was not synced is lost, kept or reordered, and it never matters.

Saves and prunes run, and before each of their calls the states of the disk are built that a crash
at this moment may leave: every write to a file since its last sync reached the disk or did not,
every name changed since its directory's last sync likewise.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from storage_kit import assert_holds, assert_same_bits, save, small_image

from gockpt import storage
from gockpt.errors import StorageError
from gockpt.storage import fs


@dataclass
class File:
    """An inode: what is durable, and the changes since."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Callable[[bytearray], None]] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.pending:
            change(self.durable)
        self.pending.clear()


@dataclass
class Directory:
    """Durable names, and the changes since: each sets names to inodes, or removes them (None)."""

    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)

    def sync(self) -> None:
        self.durable = self.after(self.pending)
        self.pending.clear()

    def after(self, changes: list[dict[str, Node | None]]) -> dict[str, Node]:
        names: dict[str, Node | None] = dict(self.durable)
        for change in changes:
            names.update(change)
        return {name: node for name, node in names.items() if node is not None}


Node = File | Directory


class Disk:
    """Follows the calls of :mod:`fs` below ``root``; ``crash`` is told before each of them."""

    def __init__(self, root: Path, crash: Callable[[Disk], None]) -> None:
        self.root, self.crash = root, crash
        self.top = Directory()
        self.open: dict[int, File] = {}
        self.one_at_a_time = threading.RLock()
        self.paused = False

    def find(self, path: Path) -> tuple[Directory, str]:
        node: Node = self.top
        *above, name = path.relative_to(self.root).parts
        for part in above:
            assert isinstance(node, Directory)
            node = node.after(node.pending)[part]
        assert isinstance(node, Directory)
        return node, name

    def node(self, path: Path) -> Node:
        if path == self.root:
            return self.top
        directory, name = self.find(path)
        return directory.after(directory.pending)[name]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for call in (
            *("create", "pwrite_all", "truncate", "fallocate", "fdatasync"),
            *("mkdir", "rename", "unlink", "rmtree", "fsync_dir"),
        ):
            patch.setattr(fs, call, self.wrap(call, getattr(fs, call)))

    def wrap(self, call: str, real: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **named: object) -> object:
            with self.one_at_a_time:
                if self.paused:
                    return real(*args, **named)
                self.crash(self)
                result = real(*args, **named)
                getattr(self, call, lambda *_: None)(result, *args)
                return result

        return wrapped

    def create(self, fd: int, path: Path) -> None:
        directory, name = self.find(path)
        self.open[fd] = File()
        directory.pending.append({name: self.open[fd]})

    def mkdir(self, _: None, path: Path) -> None:
        directory, name = self.find(path)
        directory.pending.append({name: Directory()})

    def rename(self, _: None, source: Path, target: Path) -> None:
        node = self.node(source)
        directory, name = self.find(source)
        directory.pending.append({name: None, self.find(target)[1]: node})

    def rmtree(self, _: None, path: Path) -> None:
        doomed = self.node(path)
        assert isinstance(doomed, Directory)
        doomed.pending += [{name: None} for name in doomed.after(doomed.pending)]
        directory, name = self.find(path)
        directory.pending.append({name: None})

    def pwrite_all(self, _: None, fd: int, data: memoryview, offset: int) -> None:
        piece = bytes(data)

        def change(content: bytearray) -> None:
            content.extend(bytes(max(0, offset + len(piece) - len(content))))
            content[offset : offset + len(piece)] = piece

        self.open[fd].pending.append(change)

    def truncate(self, _: None, fd: int, size: int) -> None:
        def change(content: bytearray) -> None:
            content.extend(bytes(max(0, size - len(content))))
            del content[size:]

        self.open[fd].pending.append(change)

    def fdatasync(self, _: None, fd: int) -> None:
        self.open[fd].sync()

    def fsync_dir(self, _: None, path: Path) -> None:
        node = self.node(path)
        assert isinstance(node, Directory)
        node.sync()

    @contextlib.contextmanager
    def swapped(self, state: Path) -> Iterator[None]:
        """Let ``state`` stand in the place of the root, as absolute paths lead there."""
        aside = self.root.with_name("aside")
        self.root.rename(aside)
        state.rename(self.root)
        self.paused = True
        try:
            yield
        finally:
            self.paused = False
            self.root.rename(state)
            aside.rename(self.root)

    def build(self, target: Path, keep: Callable[[], bool]) -> None:
        """One state of the disk after a crash: each pending change survives if ``keep()``."""

        def write(directory: Directory, path: Path) -> None:
            path.mkdir()
            survived = [change for change in directory.pending if keep()]
            for name, node in directory.after(survived).items():
                if isinstance(node, Directory):
                    write(node, path / name)
                    continue
                content = bytearray(node.durable)
                for change in node.pending:
                    if keep():
                        change(content)
                (path / name).write_bytes(content)

        write(self.top, target)


def explore(tmp_path: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Save steps 1, 2, 3, keeping 1; return what went wrong in any state after any crash."""
    chance = random.Random(0)
    committed = 0
    states: list[str] = []
    failures: list[str] = []
    choices: list[Callable[[], bool]] = [
        lambda: False,
        lambda: True,
        *[lambda: chance.random() < 0.5] * 4,
    ]

    def crash(disk: Disk) -> None:
        for keep in choices:
            target = tmp_path / f"state-{len(states)}"
            states.append(target.name)
            disk.build(target, keep)
            try:
                if committed:
                    found = storage.load_newest(target)[0].step
                    assert found in (committed, committed + 1)
                    assert_holds(target, found)
            except (AssertionError, StorageError) as error:
                failures.append(f"{target.name}: {error}")

    root = tmp_path / "root"
    root.mkdir()
    disk = Disk(root, crash)
    disk.install(patch)
    for step in (1, 2, 3):
        save(root, step=step)
        committed = step
        crash(disk)
        storage.prune(root, 1)
        crash(disk)
    assert len(states) > 200
    return failures


def test_every_state_after_a_crash_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        assert explore(tmp_path, patch) == []


@pytest.mark.parametrize("forgotten", ["fdatasync", "fsync_dir"])
def test_a_forgotten_sync_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """The exploration itself works: it finds the bug that is planted here."""
    with monkeypatch.context() as patch:
        patch.setattr(Disk, forgotten, lambda *_: None)
        assert explore(tmp_path, patch) != []


# -- over volumes ----------------------------------------------------------------------------------


def explore_volumes(tmp_path: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Save steps 1 and 2 over two volumes, keeping 1; return what went wrong in any state.

    After each crash the newest is there, bit for bit, and after the next start no part of anything
    that is not in the main directory.
    """
    chance = random.Random(0)
    committed = states = 0
    failures: list[str] = []
    choices: list[Callable[[], bool]] = [
        lambda: False,
        lambda: True,
        *[lambda: chance.random() < 0.5] * 2,
    ]
    root = tmp_path / "root"
    main, volumes = root / "main", [root / "one", root / "two"]

    def restart() -> None:
        if committed:
            found, tensors, _ = storage.load_newest(main)
            assert found.step in (committed, committed + 1)
            for name, wanted in small_image(found.step).tensors.items():
                assert_same_bits(tensors[name], wanted)
        storage.collect_leftovers(main, "fedcba98")
        there = {found.path.name for found in storage.scan(main)}
        parts = {one.name for volume in volumes for one in volume.glob("gockpt-*/*")}
        assert parts <= there, "parts were left behind"

    def crash(disk: Disk) -> None:
        nonlocal states
        for keep in choices:
            states += 1
            state = tmp_path / "state"
            disk.build(state, keep)
            with disk.swapped(state):
                try:
                    restart()
                except (AssertionError, StorageError) as error:
                    failures.append(f"state {states}: {error}")
            shutil.rmtree(state)

    root.mkdir()
    disk = Disk(root, crash)
    disk.install(patch)
    patch.setattr(fs, "inode", lambda path: 1)  # a state that is built has another one
    storage.make_directories(main)
    for step in (1, 2):
        save(main, step=step, volumes=volumes)
        committed = step
        crash(disk)
        storage.prune(main, 1)
        crash(disk)
    assert states > 200
    return failures


def test_every_state_of_several_volumes_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        assert explore_volumes(tmp_path, patch) == []


@pytest.mark.parametrize("forgotten", ["share", "checkpoint on a volume", "main directory"])
def test_a_forgotten_sync_of_a_volume_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    real = Disk.fsync_dir

    def fsync_dir(disk: Disk, result: None, path: Path) -> None:
        kind = {"gockpt-": "share", "step-00": "checkpoint on a volume", "main": "main directory"}
        if kind.get(path.name[:7]) != forgotten or "main/step" in str(path):
            real(disk, result, path)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "fsync_dir", fsync_dir)
        assert explore_volumes(tmp_path, patch) != []
