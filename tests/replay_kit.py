"""Real runs of real optimizers, and their replay from blocks: what the tests of replay share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from gockpt import optim
from gockpt.recipe import OptimizerUpdate, take_recipe
from gockpt.replay import Replayer
from gockpt.state import flatten

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.0}],
    "SGD": [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    "Adagrad": [
        {},
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3},
        {"maximize": True},
    ],
    "NAdam": [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"weight_decay": 0.1, "maximize": True}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}],
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adamax": [{}, {"weight_decay": 0.1}, {"maximize": True}],
    "ASGD": [{}, {"weight_decay": 0.1, "t0": 2.0, "lambd": 0.01}],
    "Rprop": [{}, {"maximize": True}],
}
FLAGS: dict[str, dict[str, bool]] = {
    "forloop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
CASES = [
    pytest.param(name, options, runs, id="-".join([name, runs, *options]))
    for name, list_of_options in OPTIONS.items()
    for options in list_of_options
    for runs in FLAGS
    if runs != "fused" or optim.KINDS[name].fused_cpu
]
Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(as_int), b.view(as_int))


def maker(name: str, **options: Any) -> Make:
    return lambda params: optim.KINDS[name].cls(list(params), **options)  # type: ignore[call-arg]


class Training:
    """A real run of a real optimizer: its state at each version, its recipes, its gradients."""

    def __init__(
        self,
        make: Make,
        shapes: Sequence[tuple[int, ...]],
        *,
        dtype: torch.dtype = torch.float32,
        narrow: torch.dtype | None = None,
        steps: int = 5,
        absent: Callable[[int, int], bool] = lambda step, param: False,
        before: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None,
    ) -> None:
        rng = torch.Generator().manual_seed(7)
        params = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
        self.optimizer = make(params)
        self.params = params
        self.versions = [self.snapshot()]
        self.reserved = [self.state_keys()]
        self.recipes: list[OptimizerUpdate] = []
        self.grads: list[list[Tensor | None]] = []
        for step in range(steps):
            before(self.optimizer, step)
            grads: list[Tensor | None] = []
            for i, param in enumerate(params):
                grad = torch.randn(param.shape, generator=rng) * 10.0 ** -(i % 3)
                param.grad = None if absent(step, i) else grad.to(narrow or dtype).to(dtype)
                grads.append(None if param.grad is None else flatten(param.grad).clone())
            self.grads.append(grads)
            self.recipes.append(sent(take_recipe(self.optimizer)[0]))
            self.optimizer.step()
            self.versions.append(self.snapshot())
            self.reserved.append(self.state_keys())

    def state_keys(self) -> dict[int, tuple[str, ...]]:
        """The elementwise keys of each parameter, by identity, that its group asks for now."""
        kind = optim.KINDS[type(self.optimizer).__name__]
        return {
            id(param): optim.state_keys(kind, group)[0]
            for group in self.optimizer.param_groups
            for param in group["params"]
        }

    def snapshot(self) -> list[dict[str, Tensor]]:
        kind = optim.kind_of(self.optimizer)
        assert kind is not None
        return [
            {"param": flatten(param).clone()}
            | {
                key: value.clone() if key in kind.scalar else flatten(value).clone()
                for key, value in self.optimizer.state.get(param, {}).items()
            }
            for param in self.params
        ]


def sent(update: OptimizerUpdate) -> OptimizerUpdate:
    """What arrives at the other end of a socket."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=OptimizerUpdate)


Block = tuple[int, int, int, int]
"""Parameter, first and last element, version at capture."""


def replay_and_compare(
    training: Training,
    blocks: Sequence[Block],
    *,
    threads: int = 1,
    narrow: torch.dtype | None = None,
) -> None:
    """Replay the blocks to the last version and compare all their state with the real one.

    Args:
        narrow: send gradients in this dtype.
    """
    kind = optim.kind_of(training.optimizer)
    assert kind is not None
    replayer = Replayer([(kind.name, len(training.optimizer.param_groups))], threads=threads)
    group_of = {
        id(p): i for i, g in enumerate(training.optimizer.param_groups) for p in g["params"]
    }
    slots: list[dict[str, Tensor]] = []
    for number, (index, start, stop, version) in enumerate(blocks):
        param = training.params[index]
        group = group_of[id(param)]
        captured = training.versions[version][index]
        slot = {k: t[start:stop].clone() for k, t in captured.items() if k not in kind.scalar}
        reserved = {
            key: torch.full((stop - start,), math.nan, dtype=param.dtype)
            for key in training.reserved[version][id(param)]
            if key not in slot
        }
        assert number == replayer.add(
            optimizer=0,
            group=group,
            param=slot["param"],
            state={k: t for k, t in slot.items() if k != "param"},
            reserved=reserved,
            scalars={k: t for k, t in captured.items() if k in kind.scalar},
        )
        slots.append(slot | reserved)
    for step, recipe in enumerate(training.recipes):
        items = [
            (number, grad[start:stop].to(narrow or grad.dtype, copy=True))
            for number, (index, start, stop, version) in enumerate(blocks)
            if version <= step and (grad := training.grads[step][index]) is not None
        ]
        replayer.apply(0, recipe, items)
    for number, (index, start, stop, _) in enumerate(blocks):
        truth = training.versions[-1][index]
        expected = {k: t[start:stop] for k, t in truth.items() if k not in kind.scalar}
        assert replayer.has_state(number) == expected.keys() - {"param"}
        for key, value in expected.items():
            assert same_bits(slots[number][key], value), (blocks[number], key)
        scalars = replayer.scalars(number)
        assert scalars.keys() == truth.keys() & set(kind.scalar)
        for key, value in scalars.items():
            assert same_bits(value, truth[key]), (blocks[number], key)


def cut(numel: int, *cuts: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *(c for c in cuts if c < numel), numel]))


def blocks_of(training: Training, *cuts: int) -> list[Block]:
    """Every parameter cut at the same places, each block captured at another version."""
    version = itertools.cycle(range(len(training.recipes) + 1))
    return [
        (index, start, stop, next(version))
        for index, param in enumerate(training.params)
        for start, stop in cut(param.numel(), *cuts)
    ]


def vary(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Change every number that may change between two updates."""
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (step + 1 + i)
        for key in ("weight_decay", "momentum", "dampening", "lr_decay", "eps", "rho", "lambd"):
            if group.get(key) and not (key == "dampening" and group["nesterov"]):
                group[key] *= 0.97
        if "betas" in group:
            group["betas"] = (0.9 - 0.01 * step, 0.999 - 0.001 * step)
        if "etas" in group:
            group["etas"] = (0.5 + 0.01 * step, 1.2 + 0.01 * step)
