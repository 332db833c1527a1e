"""Recipes: what an update of the optimizers was, apart from its gradients.

Taken on the training thread, in the pre-hook of ``optimizer.step()``, without reading anything back
from an accelerator; sent to the agent, which fills in what had to be copied and replays them. What
always holds: a recipe has the very numbers (type and dtype included) that torch computes with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from gockpt.errors import StateError
from gockpt.optim import (
    FLAGS,
    Implementation,
    device_type,
    is_recordable,
    kind_of,
    replay_implementation,
)
from gockpt.state import dtype_name, torch_dtype


class TensorValue(msgspec.Struct, frozen=True, kw_only=True, tag="tensor"):
    """A number that the optimizer holds as a tensor (it then computes in the tensor's dtype)."""

    name: str
    dtype: str
    value: float | None = None
    """None until the agent fills in what was copied from the device."""

    def tensor(self) -> Tensor:
        """The number as a 0-dim CPU tensor.

        Raises:
            StateError: its value was never filled in.
        """
        if self.value is None:
            raise StateError(f"the recipe's {self.name} never arrived; the capture must be ended")
        return torch.tensor(self.value, dtype=torch_dtype(self.dtype))


Scalar = bool | int | float | str | TensorValue | None
Hyper = Scalar | tuple[Scalar, ...]


class GroupUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter group in one update."""

    implementation: Implementation
    """What the replay has to run."""
    hyper: dict[str, Hyper]


class OptimizerUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One call of one optimizer's ``step()``."""

    cls: str
    groups: tuple[GroupUpdate | None, ...]
    """None: a group that isn't replayed."""
    defaults: dict[str, Hyper] = {}
    grad_scale: TensorValue | None = None
    found_inf: TensorValue | None = None

    @property
    def skipped(self) -> bool:
        """Whether the fused kernel found an infinity and did nothing. Known once filled in."""
        return self.found_inf is not None and self.found_inf.value == 1.0


def take_recipe(
    optimizer: Optimizer, *, prefix: str = "", groups: Collection[int] | None = None
) -> tuple[OptimizerUpdate, list[tuple[str, Tensor]]]:
    """Record the update that ``optimizer`` is about to make.

    Args:
        prefix: starts the name of each device value, to tell several optimizers apart.
        groups: indices of the groups that are replayed; the others are not recorded.

    Returns:
        The update, and the 0-dim device tensors that have to reach the agent with it: clones, which
        nobody writes again. Numbers held in CPU tensors are read at once and need no copy.

    Raises:
        StateError: a class or hyper-parameter that a recipe cannot hold
            (:func:`gockpt.optim.group_obstacle` would have said so).
    """
    kind = kind_of(optimizer)
    if kind is None:
        raise StateError(f"{type(optimizer).__name__} cannot be replayed; save it in one window")
    take = _Taking(prefix)
    taken: list[GroupUpdate | None] = []
    for index, group in enumerate(optimizer.param_groups):
        if groups is not None and index not in groups:
            taken.append(None)
            continue
        hyper = {
            key: take.value(f"groups.{index}.{key}", group[key])
            for key in optimizer.defaults
            if key not in FLAGS and key in group
        }
        runs = replay_implementation(kind, group, device_type(group))
        taken.append(GroupUpdate(implementation=runs, hyper=hyper))
    update = OptimizerUpdate(
        cls=kind.name,
        groups=tuple(taken),
        defaults=_defaults(optimizer),
        grad_scale=take.optional("grad_scale", getattr(optimizer, "grad_scale", None)),
        found_inf=take.optional("found_inf", getattr(optimizer, "found_inf", None)),
    )
    return update, take.copies


def fill(update: OptimizerUpdate, values: Mapping[str, float]) -> OptimizerUpdate:
    """The update with the device values that have arrived, by name (agent side)."""

    def filled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(filled(item) for item in value)
        if isinstance(value, TensorValue) and value.value is None:
            return msgspec.structs.replace(value, value=values.get(value.name))
        return value

    groups = tuple(
        group
        and msgspec.structs.replace(
            group, hyper={key: filled(value) for key, value in group.hyper.items()}
        )
        for group in update.groups
    )
    return msgspec.structs.replace(
        update,
        groups=groups,
        grad_scale=filled(update.grad_scale),
        found_inf=filled(update.found_inf),
    )


def revive(value: Hyper) -> Any:
    """The hyper-parameter as torch had it (the agent's side of :func:`take_recipe`)."""
    if isinstance(value, tuple):
        return tuple(revive(item) for item in value)
    return value.tensor() if isinstance(value, TensorValue) else value


def _defaults(optimizer: Optimizer) -> dict[str, Hyper]:
    # Read by Adagrad alone, when it creates state; a default that is a tensor is never read so.
    return {
        key: value
        for key, value in optimizer.defaults.items()
        if key == "initial_accumulator_value" and isinstance(value, int | float)
    }


class _Taking:
    """Turns values into their records, collecting what has to be copied from the device."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.copies: list[tuple[str, Tensor]] = []

    def value(self, name: str, value: Any) -> Hyper:
        if isinstance(value, tuple | list):
            return tuple(self.scalar(f"{name}.{i}", item) for i, item in enumerate(value))
        return self.scalar(name, value)

    def scalar(self, name: str, value: Any) -> Scalar:
        if isinstance(value, Tensor):
            return self.optional(name, value)
        if not is_recordable(value) or isinstance(value, tuple | list):
            raise StateError(f"{name} is a {type(value).__name__}; use a number or a 0-dim tensor")
        # A numpy float is a float to torch, but not to the message encoder.
        return float(value) if isinstance(value, float) else value

    def optional(self, name: str, value: Tensor | None) -> TensorValue | None:
        if value is None:
            return None
        if not is_recordable(value):
            raise StateError(f"{name} is no single floating-point number; save in one window")
        name, dtype = self.prefix + name, dtype_name(value.dtype)
        if value.device.type == "cpu":
            return TensorValue(name=name, dtype=dtype, value=value.item())
        self.copies.append((name, value.detach().reshape(()).clone()))
        return TensorValue(name=name, dtype=dtype)
