"""A model of a disk: from what was done to it, every state that a power loss may leave.

Pure. The model is harsher than any real file system. Until a file is synced, each page of 4096
bytes that was written to it reached the disk or did not, and so did each change of its size. Until
a directory is synced, each name that was made, moved or removed in it did or did not. Any subset
may have survived, in any order of arrival.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gockpt.cli.crash_recorder import Op

TORN = 4096
"""Bytes that a disk writes at once, or not at all."""

# -- the model of a disk ---------------------------------------------------------------------------

Change = Callable[[bytearray], None]


@dataclass(eq=False)
class File:
    """What is durable, and the changes since."""

    durable: bytes = b""
    pending: list[Change] = field(default_factory=list)

    def after(self, changes: Sequence[Change]) -> bytes:
        if not changes:
            return self.durable
        content = bytearray(self.durable)
        for change in changes:
            change(content)
        return bytes(content)


@dataclass(eq=False)
class Directory:
    """Durable names, and the changes since: each sets names to nodes, or removes them (None)."""

    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)

    def after(self, changes: Sequence[dict[str, Node | None]]) -> dict[str, Node]:
        names: dict[str, Node | None] = dict(self.durable)
        for change in changes:
            names.update(change)
        return {name: node for name, node in names.items() if node is not None}

    def now(self) -> dict[str, Node]:
        return self.after(self.pending)


Node = File | Directory
Tree = dict[Path, bytes | None]
"""A state of the disk: content of each file, None for a directory."""


class Disk:
    """Follows a log, from a durable start."""

    def __init__(self, start: Tree | None = None) -> None:
        self.top = Directory()
        self._inodes: dict[int, File] = {}
        for path, content in sorted((start or {}).items()):
            node: Node = Directory() if content is None else File(durable=content)
            self._directory(path).durable[path.name] = node

    def _node(self, path: Path) -> Node:
        node: Node = self.top
        for part in path.parts:
            node = _as_directory(node).now()[part]
        return node

    def _directory(self, path: Path) -> Directory:
        return _as_directory(self._node(path.parent))

    def apply(self, op: Op) -> None:
        getattr(self, f"_{op.call}")(op)

    def _create(self, op: Op) -> None:
        self._inodes[op.inode] = File()
        self._directory(op.path).pending.append({op.path.name: self._inodes[op.inode]})

    def _mkdir(self, op: Op) -> None:
        self._directory(op.path).pending.append({op.path.name: Directory()})

    def _rename(self, op: Op) -> None:
        moved = {op.path.name: None, op.target.name: self._node(op.path)}
        self._directory(op.path).pending.append(moved)

    def _unlink(self, op: Op) -> None:
        self._directory(op.path).pending.append({op.path.name: None})

    def _rmtree(self, op: Op) -> None:
        doomed = _as_directory(self._node(op.path))
        doomed.pending += [{name: None} for name in doomed.now()]
        self._unlink(op)

    def _write(self, op: Op) -> None:
        for start in range(0, len(op.data), TORN):
            piece = op.data[start : start + TORN]
            self._inodes[op.inode].pending.append(
                functools.partial(_put, at=op.offset + start, piece=piece)
            )

    def _truncate(self, op: Op) -> None:
        self._inodes[op.inode].pending.append(functools.partial(_resize, size=op.offset, cut=True))

    def _fallocate(self, op: Op) -> None:
        self._inodes[op.inode].pending.append(functools.partial(_resize, size=op.offset, cut=False))

    def _fdatasync(self, op: Op) -> None:
        file = self._inodes[op.inode]
        file.durable = file.after(file.pending)
        file.pending.clear()

    def _fsync_dir(self, op: Op) -> None:
        directory = _as_directory(self._node(op.path))
        directory.durable = directory.now()
        directory.pending.clear()

    def after_a_crash(self, survives: Survives) -> Tree:
        """The state in which exactly those pending changes reached the disk that ``survives``."""
        tree: Tree = {}

        def visit(directory: Directory, path: Path) -> None:
            kept = [change for change in directory.pending if survives("name")]
            for name, node in directory.after(kept).items():
                if isinstance(node, Directory):
                    tree[path / name] = None
                    visit(node, path / name)
                    continue
                survived = [change for change in node.pending if survives("data")]
                tree[path / name] = node.after(survived)

        visit(self.top, Path())
        return tree


def _as_directory(node: Node) -> Directory:
    if not isinstance(node, Directory):
        raise TypeError("a file was used as a directory")
    return node


Survives = Callable[[str], bool]
"""Asked for each pending change, a ``name`` or ``data``."""


def _put(content: bytearray, *, at: int, piece: bytes) -> None:
    content.extend(bytes(max(0, at + len(piece) - len(content))))
    content[at : at + len(piece)] = piece


def _resize(content: bytearray, *, size: int, cut: bool) -> None:
    content.extend(bytes(max(0, size - len(content))))
    if cut:
        del content[size:]


# -- the states ------------------------------------------------------------------------------------


def choices(seed: int) -> Iterator[Survives]:
    """All names or some, with none of the data, all of it, a half, all but little, or only little.

    (Most often all names: what has no name is not there, whatever else of it is.)
    """
    chance = random.Random(seed)
    yield lambda kind: False
    for names in (1.0, 1.0, 0.7, 0.5):
        for data in (0.0, 0.03, 0.2, 0.5, 0.8, 0.97, 1.0):
            share = {"name": names, "data": data}
            yield lambda kind, share=share: chance.random() < share[kind]  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A disk as a crash may leave it, before the operation ``at`` of a log."""

    at: int
    tree: Tree
    committed: tuple[Path, ...]
    """The checkpoints that were reported as durable before, in order."""


def states(
    log: Sequence[Op],
    *,
    start: Tree | None = None,
    committed: tuple[Path, ...] = (),
    forget: Callable[[Op], bool] = lambda op: False,
) -> Iterator[State]:
    """Every state, each once.

    Args:
        start, committed: what is durable at the beginning.
        forget: operations to leave out, as if the code had not got them. The states before the
            first of them are those of the whole log, and left out too.
    """
    disk = Disk(start)
    since = next((at for at, op in enumerate(log) if forget(op)), 0)
    seen: set[object] = set()
    for at in range(len(log) + 1):
        for survives in choices(at) if at >= since else ():
            tree = disk.after_a_crash(survives)
            if (key := (committed, frozenset(tree.items()))) not in seen:
                seen.add(key)
                yield State(at=at, tree=tree, committed=committed)
        if at == len(log):
            return
        if log[at].call == "committed":
            committed = (*committed, log[at].path)
        elif not forget(log[at]):
            disk.apply(log[at])


def as_it_was(log: Sequence[Op]) -> State:
    """The disk after a log, with everything durable."""
    disk = Disk()
    for op in log:
        if op.call != "committed":
            disk.apply(op)
    committed = tuple(op.path for op in log if op.call == "committed")
    return State(at=len(log), tree=disk.after_a_crash(lambda kind: True), committed=committed)
