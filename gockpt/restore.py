"""Putting a checkpoint's state back into a model and its optimizers.

Runs on the main thread. What always holds: everything is checked before anything is changed; state
is keyed by name, never by position; dtypes are restored as they were recorded.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from gockpt.errors import CorruptError, StateError
from gockpt.inventory import MASTER, Inventory, LiveParam, placeholder, plain_name
from gockpt.tagged import decode

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was restored."""

    step: int
    path: Path
    source: str
    """Where it came from: ``memory`` (a slot of the agent's), ``ssd``, or ``tier`` (the second)."""
    problems: tuple[str, ...]
    """Newer checkpoints that were not good, and why."""
    proof: str
    """``exact``, ``close`` or ``off``: how sure it is that this was the true state."""
    seconds: float
    """All that :meth:`Checkpointer.restore` took…"""
    read_seconds: float
    """…of which for finding, reading and checking it…"""
    apply_seconds: float
    """…and for putting it back into model, optimizers and objects."""


def apply(inventory: Inventory, model: nn.Module, tensors: Tensors, groups: Any) -> None:
    """Put model and optimizer state back.

    Args:
        groups: the manifest's ``groups``.

    Raises:
        StateError: checkpoint and model do not fit; nothing was changed.
        CorruptError: it says what no checkpoint says; nothing was changed.
    """
    decoded = _decoded(groups, tensors)
    plan = _Plan(inventory, tensors, decoded)
    plan.check()
    with torch.no_grad():
        plan.apply()
    if decoded["model"]:
        names = {plain_name(name): name for name in model.state_dict()}
        extra = {names.get(name, name): value for name, value in decoded["model"].items()}
        model.load_state_dict(extra, strict=False)


def extras_of(extras: Any) -> Any:
    """The user's objects in a manifest's ``extras``, still encoded.

    Raises:
        CorruptError: there are none.
    """
    return _convert(extras, _Extras, "extras").tree


class _Extras(msgspec.Struct):
    tree: Any


class _Group(msgspec.Struct):
    optimizer: str
    params: list[str]
    options: Any


class _Groups(msgspec.Struct):
    groups: list[_Group]
    plain: Any
    model: Any


T = TypeVar("T")


def _convert(value: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CorruptError(f"the manifest's {what} are damaged: {error}") from error


def _decoded(groups: Any, tensors: Tensors) -> dict[str, Any]:
    """A manifest's ``groups`` with the values that are encoded in it."""
    read = _convert(groups, _Groups, "groups")
    return {
        "plain": _mapping(decode(read.plain, tensors, root="plain")),
        "model": _mapping(decode(read.model, tensors, root="model")),
        "groups": [
            {
                "optimizer": group.optimizer,
                "params": group.params,
                "options": _mapping(decode(group.options, tensors, root="options")),
            }
            for group in read.groups
        ],
    }


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise CorruptError("the manifest's groups are damaged: something has no names")
    return value


class _Plan:
    def __init__(self, inventory: Inventory, tensors: Tensors, decoded: Mapping[str, Any]) -> None:
        self._inventory = inventory
        self._tensors = tensors
        self._saved_groups: list[dict[str, Any]] = decoded["groups"]
        self._plain = _states(decoded["plain"])
        self._claimed = {
            f"{owner}.{path}" for owner, state in self._plain.items() for path in _paths(state)
        }
        self._params = [*inventory.replayable, *inventory.others]
        self._by_owner = self._named_alone()

    def _named_alone(self) -> dict[str, dict[str, Any]]:
        """State that is told by the names of its tensors alone: owner → key → placeholder."""
        found: dict[str, dict[str, Any]] = {}
        for name in self._tensors:
            owner, _, key = name.rpartition(".")
            if name.startswith("optim.") and name not in self._claimed and key != MASTER:
                found.setdefault(owner, {})[key] = placeholder(key)
        return found

    def check(self) -> None:
        for name in self._claimed - self._tensors.keys():
            raise CorruptError(f"{name!r} is missing in the checkpoint; restore an older one")
        for name, tensor in self._targets():
            saved = self._tensors.get(name)
            if saved is None or name in self._claimed:
                raise StateError(
                    f"{name!r} is not in the checkpoint; is it of another model? See gockpt.open"
                )
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                raise StateError(
                    f"{name!r} is {_what(saved)} in the checkpoint but {_what(tensor)} in the model"
                )
        self._check_names()
        self._options = [self._options_of(i, g) for i, g in self._live_groups()]

    def _check_names(self) -> None:
        """Nothing of the saved model may be left out, and what is tied now must have been equal."""
        entries = self._inventory.layout.entries
        model = [entry for entry in entries if entry.name in self._inventory.model_tensors]
        known = {name for entry in model for name in (entry.name, *entry.aliases)}
        for name in self._tensors:
            if name.startswith("model.") and name not in known:
                raise StateError(
                    f"the model has no {name!r}, which is in the checkpoint; is it another model?"
                )
        for entry in model:
            for alias in entry.aliases:
                saved = self._tensors.get(alias)
                if saved is not None and not _same_bits(saved, self._tensors[entry.name]):
                    raise StateError(
                        f"{entry.name!r} and {alias!r} are tied but differ in the checkpoint; "
                        "build the model as it was when it was saved"
                    )

    def apply(self) -> None:
        for name, tensor in self._targets():
            tensor.detach().copy_(self._tensors[name])
        for (index, number), options in zip(self._live_groups(), self._options, strict=True):
            optimizer = list(self._inventory.optimizers.values())[index]
            group = optimizer.param_groups[number]
            for key, value in options.items():
                current = group.get(key)
                if isinstance(current, Tensor) and isinstance(value, Tensor):
                    current.copy_(value)
                else:
                    group[key] = value
        for live in self._params:
            self._apply_state(live)

    def _targets(self) -> list[tuple[str, Tensor]]:
        found = list(self._inventory.model_tensors.items())
        found += [
            (self._inventory.state_name(live, MASTER), live.param)
            for live in self._params
            if live.is_master
        ]
        return found

    def _live_groups(self) -> list[tuple[int, int]]:
        return [
            (index, number)
            for index, optimizer in enumerate(self._inventory.optimizers.values())
            for number in range(len(optimizer.param_groups))
        ]

    def _options_of(self, index: int, number: int) -> dict[str, Any]:
        """The saved options of the group that these parameters were in, whatever its position."""
        key = list(self._inventory.optimizers)[index]
        names = {
            live.name
            for live in self._params
            if (live.optimizer_index, live.group_index) == (index, number)
        }
        matching = [
            group
            for group in self._saved_groups
            if group["optimizer"] == key and names & set(group["params"])
        ]
        if not names:
            return {}
        if not matching:
            raise StateError(
                f"the checkpoint has no optimizer group with {sorted(names)[0]!r}; "
                "build the optimizer as it was when it was saved"
            )
        options: dict[str, Any] = matching[0]["options"]
        if any(not _same_options(group["options"], options) for group in matching[1:]):
            raise StateError(
                f"group {number} of the optimizer joins groups that had different options; "
                "build the optimizer as it was when it was saved"
            )
        return options

    def _apply_state(self, live: LiveParam) -> None:
        owner = self._inventory.state_name(live, "")[:-1]
        plain = self._plain.get(owner) or self._by_owner.get(owner)
        optimizer = live.optimizer
        if not plain:
            optimizer.state.pop(live.param, None)
            return
        state = optimizer.state[live.param]
        for key in [key for key in state if key not in plain]:
            if state[key] is not None:
                del state[key]
        for key, value in plain.items():
            state[key] = self._rebuilt(live, owner, value, state.get(key))

    def _rebuilt(self, live: LiveParam, owner: str, plain: Any, current: Any) -> Any:
        """The containers of a plain state with the saved tensors in them."""
        if isinstance(plain, Mapping):
            old = current if isinstance(current, Mapping) else {}
            made = copy.copy(plain)
            for key, value in plain.items():
                made[key] = self._rebuilt(live, owner, value, old.get(key))  # type: ignore[index]
            return made
        if (path := _path(plain)) is not None:
            return self._placed(live, self._tensors[f"{owner}.{path}"], current)
        if type(plain) in (list, tuple):
            olds = current if type(current) is type(plain) else ()
            pairs = itertools.zip_longest(plain, olds[: len(plain)])
            return type(plain)(self._rebuilt(live, owner, value, old) for value, old in pairs)
        return plain

    def _placed(self, live: LiveParam, saved: Tensor, current: Any) -> Tensor:
        """The saved tensor where the optimizer wants it; in place where that is possible."""
        if (
            isinstance(current, Tensor)
            and current.shape == saved.shape
            and current.dtype == saved.dtype
        ):
            return current.copy_(saved)
        group = live.group
        # As torch itself places it: 0-dim state is on the host unless a kernel reads it.
        on_host = saved.dim() == 0 and not (group.get("capturable") or group.get("fused"))
        device = torch.device("cpu") if on_host else live.param.device
        fresh = torch.empty_like(saved, device=device)
        return fresh.copy_(saved)


def _states(plain: Any) -> dict[str, Mapping[Any, Any]]:
    if isinstance(plain, dict) and all(isinstance(state, Mapping) for state in plain.values()):
        return plain
    raise CorruptError("the checkpoint's optimizer state has no structure; restore an older one")


def _path(plain: Any) -> str | None:
    """Where the tensor is that this stands for, or None."""
    if type(plain) is tuple and len(plain) == 2 and isinstance(plain[1], str):
        return plain[1] if plain == placeholder(plain[1]) else None
    return None


def _paths(plain: Any) -> Iterator[str]:
    """All tensors that stand in a plain state."""
    if (path := _path(plain)) is not None:
        yield path
    elif isinstance(plain, Mapping | list | tuple):
        for value in plain.values() if isinstance(plain, Mapping) else plain:
            yield from _paths(value)


def _same_options(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    if one.keys() != two.keys():
        return False
    return all(
        torch.equal(value, two[key]) if isinstance(value, Tensor) else value == two[key]
        for key, value in one.items()
    )


def _same_bits(one: Tensor, two: Tensor) -> bool:
    if one is two:
        return True
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)]
    return one.shape == two.shape and torch.equal(*as_bytes)


def _what(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
