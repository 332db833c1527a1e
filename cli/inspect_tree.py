"""A checkpoint's tensors as a tree of modules, with alike siblings shown once.

Pure: from :mod:`gockpt.contents` to rows for a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gockpt.cli.inspect_facts import kind, own_names, shape_text
from gockpt.contents import MODEL, Contents
from gockpt.storage import TensorRecord

_SMALL = 3
"""Most tensors of a module that gets no line of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the tree."""

    label: str
    """With the lines of the tree in front."""
    shape: str = ""
    dtype: str = ""
    nbytes: int
    state_bytes: int
    """Of the optimizer's state of what is on this line."""


@dataclass(slots=True)
class _Node:
    record: TensorRecord | None = None
    state_bytes: int = 0
    children: dict[str, _Node] = field(default_factory=dict)

    def total(self) -> int:
        own = self.record.entry.nbytes if self.record is not None else 0
        return own + sum(child.total() for child in self.children.values())

    def total_state(self) -> int:
        return self.state_bytes + sum(child.total_state() for child in self.children.values())

    def likeness(self) -> tuple[object, ...]:
        """Equal for nodes that look the same apart from their own name."""
        record = self.record
        own = None if record is None else (record.shape, record.dtype, bool(record.aliases))
        below = tuple((name, child.likeness()) for name, child in self.children.items())
        return own, self.state_bytes, below


def rows(contents: Contents) -> Iterator[Row]:
    """Every tensor of model, optimizer and extras; optimizer state beside its parameter."""
    checkpoint = contents.checkpoint
    roots = {"model": _Node(), "optimizer": _Node(), "extras": _Node()}
    beside = {
        name: param
        for (_, param), keys in contents.state.items()
        for name in keys.values()
        if MODEL + param in checkpoint
    }
    for name in own_names(checkpoint):
        record = checkpoint.record(name)
        if name in beside:
            owner = checkpoint.record(MODEL + beside[name]).name
            _node(roots["model"], owner.split(".")[1:]).state_bytes += record.entry.nbytes
        else:
            path = name.split(".")
            known = path[0] in ("model", "optim", "extras")
            _node(roots[kind(name)], path[1:] if known else path).record = record
    for title, root in roots.items():
        if root.children:
            yield Row(label=title, nbytes=root.total(), state_bytes=root.total_state())
            yield from _below(root, "")


def _node(root: _Node, path: Sequence[str]) -> _Node:
    for part in path:
        root = root.children.setdefault(part, _Node())
    return root


def _below(node: _Node, indent: str) -> Iterator[Row]:
    groups = list(_alike(node))
    for number, (first, last, count, child) in enumerate(groups):
        end = number == len(groups) - 1
        name = first if count == 1 else f"{first} … {last}"
        while child.record is None and len(child.children) == 1:
            ((inner, child),) = child.children.items()
            name += f".{inner}"
        if count > 1:
            name += f"   {count} alike, each:"
        yield _row(f"{indent}{'└ ' if end else '├ '}{name}", child)
        yield from _below(child, indent + ("  " if end else "│ "))


def _row(label: str, node: _Node) -> Row:
    record = node.record
    if record is None:
        return Row(label=label, nbytes=node.total(), state_bytes=node.total_state())
    also = "".join(f" = {alias.removeprefix(MODEL)}" for alias in record.aliases)
    return Row(
        label=label + also,
        shape=shape_text(record.shape),
        dtype=record.dtype,
        nbytes=record.entry.nbytes,
        state_bytes=node.state_bytes,
    )


def _alike(node: _Node) -> Iterator[tuple[str, str, int, _Node]]:
    """Children in order; neighbours with numbers for names that are alike are one."""
    run: list[tuple[str, _Node]] = []
    for name, child in _shown(node):
        joins = (
            run
            and name.isdigit()
            and run[-1][0].isdigit()
            and int(name) == int(run[-1][0]) + 1
            and child.likeness() == run[0][1].likeness()
        )
        if run and not joins:
            yield run[0][0], run[-1][0], len(run), run[0][1]
            run = []
        run.append((name, child))
    if run:
        yield run[0][0], run[-1][0], len(run), run[0][1]


def _shown(node: _Node) -> Iterator[tuple[str, _Node]]:
    """Children by name; of a small one with nothing but tensors its tensors (``norm.weight``)."""
    for name, child in node.children.items():
        inner = child.children
        flat = all(one.record is not None and not one.children for one in inner.values())
        if child.record is None and flat and len(inner) <= _SMALL and not name.isdigit():
            yield from ((f"{name}.{key}", one) for key, one in inner.items())
        else:
            yield name, child


def state_kinds(contents: Contents) -> list[tuple[str, int]]:
    """The kinds of state that parameters have, with how many have each."""
    counts: dict[str, int] = {}
    for keys in contents.state.values():
        text = _state_text(contents, keys)
        counts[text] = counts.get(text, 0) + 1
    without = sum(len(group.params) for group in contents.groups) - sum(counts.values())
    if without > 0:
        counts["none yet"] = without
    return list(counts.items())


def _state_text(contents: Contents, keys: dict[str, str]) -> str:
    by_dtype: dict[str, list[str]] = {}
    for key, name in sorted(keys.items(), key=lambda pair: not re.match("master", pair[0])):
        record = contents.checkpoint.record(name)
        label = record.dtype if record.shape else f"a {record.dtype} number"
        by_dtype.setdefault(label, []).append(key)
    return "; ".join(f"{', '.join(names)} ({label})" for label, names in by_dtype.items())
