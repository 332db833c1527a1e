"""A checkpoint's state in the shapes that torch gives it: state dicts of model and optimizers.

For looking and exporting, in whichever process does that; restore puts state back by name instead.
Nothing is read but the manifest until a tensor is asked for: each function takes ``tensor``, which
returns the tensor of a name (:meth:`gockpt.Checkpoint.tensor`, or a stand-in for it). What always
holds: the state of a parameter is found by its name, and stands where its group lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gockpt.errors import CorruptError
from gockpt.inventory import placeholder
from gockpt.storage import Checkpoint

MODEL, OPTIMIZER = "model.", "optim."
MASTER = "master"
"""The key of a copy that the optimizer updates in place of the model's tensor."""

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One parameter group of an optimizer."""

    optimizer: str
    """Key of the optimizer; "" if there is only one."""
    params: tuple[str, ...]
    """Names of its parameters, in their order."""
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint's manifest says of model and optimizers, decoded."""

    checkpoint: Checkpoint
    groups: tuple[Group, ...]
    state: dict[tuple[str, str], dict[str, str]]
    """(optimizer, parameter) → state key → name of the tensor, master copies included."""
    plain: dict[str, Any]
    """Prefix of a parameter's state → state that is more than tensors by name."""
    model_extra: dict[str, Any]
    """What modules returned from ``get_extra_state``, by its key in the state dict."""

    def model_names(self) -> dict[str, str]:
        """Name in the model's state dict → name in the checkpoint, those of tied tensors too."""
        names = self.checkpoint.names()
        return {n.removeprefix(MODEL): n for n in names if n.startswith(MODEL)}

    def model_state(self, tensor: Read) -> dict[str, Any]:
        """What ``model.state_dict()`` was; tied tensors are one."""
        read: dict[str, Tensor] = {}
        state: dict[str, Any] = {}
        for name, full in self.model_names().items():
            own = self.checkpoint.record(full).name
            if own not in read:
                read[own] = tensor(own)
            state[name] = read[own]
        return state | self.model_extra

    def masters(self, tensor: Read) -> dict[str, Tensor]:
        """The optimizers' own copies of parameters, by the parameter's name."""
        return {
            name: tensor(keys[MASTER]) for (_, name), keys in self.state.items() if MASTER in keys
        }

    def optimizer_states(self, tensor: Read, *, by_name: bool = False) -> dict[str, dict[str, Any]]:
        """What ``optimizer.state_dict()`` of each optimizer was, by its key.

        Args:
            by_name: parameters are called by name, as torch.distributed.checkpoint does, and not
                by their position, as ``torch.optim.Optimizer.load_state_dict`` does.
        """
        states: dict[str, dict[str, Any]] = {}
        counts: dict[str, int] = {}
        for group in self.groups:
            made = states.setdefault(group.optimizer, {"state": {}, "param_groups": []})
            first = counts.get(group.optimizer, 0)
            counts[group.optimizer] = first + len(group.params)
            labels: list[str | int] = (
                list(group.params) if by_name else list(range(first, counts[group.optimizer]))
            )
            for label, name in zip(labels, group.params, strict=True):
                found = self._state_of(group.optimizer, name, tensor)
                if found:
                    made["state"][label] = found
            named = {"param_names": list(group.params)} if by_name else {}
            made["param_groups"].append({**group.options, **named, "params": labels})
        return states

    def _state_of(self, optimizer: str, param: str, tensor: Read) -> dict[str, Any]:
        names = {k: n for k, n in self.state.get((optimizer, param), {}).items() if k != MASTER}
        plain = self.plain.get(_prefix(self.groups, optimizer, param))
        filled = _filled(plain or {key: placeholder(key) for key in names}, names, tensor)
        return dict(filled)


def contents(checkpoint: Checkpoint) -> Contents:
    """Decode what the manifest says of model and optimizers.

    Raises:
        CorruptError: it is not what gockpt writes.
    """
    try:
        saved: Mapping[str, Any] = {"groups": [], **checkpoint.groups}
        groups = tuple(
            Group(
                optimizer=group["optimizer"],
                params=tuple(group["params"]),
                options=checkpoint.value(group["options"]),
            )
            for group in saved["groups"]
        )
        return Contents(
            checkpoint=checkpoint,
            groups=groups,
            state=_state_names(checkpoint, groups),
            plain=checkpoint.value(saved.get("plain", {"dict": []})),
            model_extra=checkpoint.value(saved.get("model", {"dict": []})),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptError(
            f"{checkpoint.path}: the groups of its manifest are damaged ({error!r}); "
            "use another checkpoint",
            path=checkpoint.path,
        ) from error


def _prefix(groups: tuple[Group, ...], optimizer: str, param: str) -> str:
    several = len({group.optimizer for group in groups}) > 1
    return f"{OPTIMIZER}{optimizer}.{param}" if several else f"{OPTIMIZER}{param}"


def _state_names(
    checkpoint: Checkpoint, groups: tuple[Group, ...]
) -> dict[tuple[str, str], dict[str, str]]:
    """Which tensors are whose state: the longest parameter name that a tensor's begins with."""
    owner = {
        _prefix(groups, group.optimizer, param): (group.optimizer, param)
        for group in groups
        for param in group.params
    }
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name in checkpoint.names():
        prefix = name
        while name.startswith(OPTIMIZER) and "." in prefix:
            prefix = prefix.rpartition(".")[0]
            if prefix in owner:
                found.setdefault(owner[prefix], {})[name[len(prefix) + 1 :]] = name
                break
    return found


def _filled(plain: Any, names: Mapping[str, str], tensor: Read) -> Any:
    """The containers of a plain state, with a tensor for each placeholder."""
    if isinstance(plain, Mapping):
        return {key: _filled(value, names, tensor) for key, value in plain.items()}
    if type(plain) is tuple and len(plain) == 2 and plain == placeholder(plain[1]):
        return tensor(names[plain[1]])
    if type(plain) in (list, tuple):
        return type(plain)(_filled(value, names, tensor) for value in plain)
    return plain
