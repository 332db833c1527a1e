"""Small trainings, the truth about them, and runs that compare every checkpoint with it.

What the identity tests share. The truth is found here by plain code of its own: clones of all that
a checkpoint has to hold, taken at the end of the pass. A checked run then compares, bit for bit,
what was committed and what a fresh training holds after it was restored.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gockpt
from gockpt.devices import CpuDevice, Device, EmulatedDevice, ModelledWork, load_profile

SHAPES: tuple[tuple[int, ...], ...] = ((17, 65), (130,), (3, 3, 7, 5), (), (1,), (0, 4), (513,))
"""Cut inside, smaller than a cut, 0-dim, one element, empty."""

Optimizers = dict[str, torch.optim.Optimizer]
Truth = dict[str, Tensor]


class Training:
    """A model, its optimizers, and one pass of the loop in two parts."""

    model: nn.Module
    optimizers: Optimizers
    extras: Mapping[str, object] = {}

    def compute(self, step: int) -> None:
        """Forward and backward of pass ``step``."""
        raise NotImplementedError

    def update(self, step: int) -> None:
        """What the loop does from there to the end of the pass."""
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    def between(self, step: int) -> None:
        """What the loop does after ``ckpt.step()``."""


class Params(nn.Module):
    """Parameters of any shapes, whose gradients are whatever one asks for."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        kind = torch.complex64 if dtype.is_complex else torch.float32
        self.list = nn.ParameterList(
            torch.randn(shape, generator=rng, dtype=kind).to(dtype) for shape in shapes
        )

    def pull(self, step: int, absent: Callable[[int, int], bool]) -> Tensor:
        """A loss whose gradients are random numbers of the step."""
        rng = torch.Generator().manual_seed(1000 + step)
        terms = []
        for number, param in enumerate(self.list):
            noise = torch.randn(param.shape, generator=rng) * 10.0 ** -(number % 3)
            if param.requires_grad and not absent(step, number):
                terms.append((param.abs() if param.is_complex() else param).mul(noise).sum())
        return torch.stack([term.double() for term in terms]).sum()


Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def fused_adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


class Bag(Training):
    """Trains :class:`Params` with one optimizer."""

    def __init__(
        self,
        seed: int = 0,
        *,
        make: Make = fused_adamw,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        absent: Callable[[int, int], bool] = lambda step, number: False,
        before: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None,
        set_to_none: bool = True,
    ) -> None:
        self.model = self.bag = Params(shapes, dtype, seed)
        self.optimizer = make(self.model.parameters())
        self.optimizers = {"": self.optimizer}
        self._absent = absent
        self._before = before
        self._set_to_none = set_to_none

    def compute(self, step: int) -> None:
        self.bag.pull(step, self._absent).backward()

    def update(self, step: int) -> None:
        self._before(self.optimizer, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self._set_to_none)


# -- the truth -------------------------------------------------------------------------------------


def truth(training: Training) -> Truth:
    """Clones of every tensor that a checkpoint holds now, by its global name."""
    model, optimizers = training.model, training.optimizers
    found = {
        f"model.{fqn}": value.detach().clone()
        for fqn, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    fqns = {id(p): fqn for fqn, p in model.named_parameters()}
    for key, optimizer in optimizers.items():
        prefix = f"optim.{key}." if len(optimizers) > 1 else "optim."
        for group in optimizer.param_groups:
            given = group.get("param_names", [""] * len(group["params"]))
            for param, name in zip(group["params"], given, strict=True):
                fqn = fqns.get(id(param), name)
                if id(param) not in fqns:
                    found[f"{prefix}{fqn}.master"] = param.detach().clone()
                for path, value in leaves(optimizer.state.get(param, {})):
                    found[f"{prefix}{fqn}.{path}"] = value.detach().clone()
    return found


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested optimizer state, by path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, f"{path}/{key}" if path else str(key))


def options(training: Training) -> list[dict[str, Any]]:
    """Hyper-parameters of all groups, comparable."""
    return [
        {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for optimizer in training.optimizers.values()
        for group in optimizer.param_groups
    ]


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its indices."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(raw(one), raw(two))


def same_tree(one: Any, two: Any) -> bool:
    """Whether two nested states are the same, containers and kinds of keys included."""
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        return bool(torch.equal(one, two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same_tree(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same_tree, one, two))
    return bool(one == two)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Names, dtypes, shapes and every bit."""
    names = {name for name in found if not name.startswith(("extras.", "model_extra."))}
    assert names == set(expected), what
    wrong = [name for name, value in expected.items() if not same_bits(found[name], value)]
    assert not wrong, f"{what}: {wrong}"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Everything that was true at the end of one pass."""

    tensors: Truth
    options: list[dict[str, Any]]
    rng: tuple[Any, ...]

    @classmethod
    def of(cls, training: Training) -> Moment:
        return cls(tensors=truth(training), options=options(training), rng=draws())


def draws() -> tuple[Any, ...]:
    """What the generators would give next, without moving them."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    drawn = (random.random(), float(np.random.rand()), torch.rand(3).tolist())
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return drawn


# -- runs ------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Ran:
    """A run that has ended."""

    path: Path
    training: Training
    moments: dict[int, Moment]
    events: dict[str, int]
    infos: dict[int, Any] = field(default_factory=dict)


Passed = Callable[[gockpt.Checkpointer, Training, int], None]


def checkpointer(training: Training, path: Path, **arguments: Any) -> gockpt.Checkpointer:
    """A checkpointer for a training, set up for quick tests."""
    quick = {"agent": "thread", "keep": None, "close_timeout": 60.0, "device": cpu()}
    optimizers = training.optimizers
    return gockpt.Checkpointer(
        training.model,
        optimizers.get("", optimizers),
        path,
        **({"extras": training.extras} | quick | arguments),
    )


def one_pass(ckpt: gockpt.Checkpointer, training: Training, step: int) -> None:
    """Pass ``step`` of the loop, up to the call of ``ckpt.step()``."""
    device = ckpt.device
    with device.phase("forward", step):
        training.compute(step)
    with device.phase("update", step):
        training.update(step)


def run(
    training: Training,
    path: Path,
    *,
    steps: int,
    every: int | None,
    windows: int | None,
    after: Passed = lambda ckpt, training, step: None,
    **arguments: Any,
) -> Ran:
    """Train, and remember the moment at each step that a checkpoint is due."""
    ckpt = checkpointer(training, path, every=every, windows=windows, **arguments)
    moments: dict[int, Moment] = {}
    with ckpt:
        for step in range(ckpt.current_step + 1, steps + 1):
            one_pass(ckpt, training, step)
            moments[step] = Moment.of(training)
            ckpt.step()
            assert ckpt.current_step == step
            after(ckpt, training, step)
            training.between(step)
    engine = ckpt.engine
    events = {} if engine is None else engine.events
    return Ran(path=path, training=training, moments=moments, events=events)


def check(ran: Ran, steps: Iterable[int], fresh: Callable[[], Training] | None) -> None:
    """Compare what was committed for these steps, and restored from it, with the truth."""
    steps = list(steps)
    for step in steps:
        found = gockpt.open(ran.path, step)
        assert found.verify() == []
        assert found.info.proof["outcome"] == "exact"
        assert_same(found.load(), ran.moments[step].tensors, f"committed, step {step}")
        ran.infos[step] = found.info
    if fresh is not None:
        check_restored(ran, steps[-1], fresh())


def check_restored(ran: Ran, step: int, training: Training) -> None:
    """Restore into another training, which then must be as this one was."""
    moment = ran.moments[step]
    with checkpointer(training, ran.path) as ckpt:
        restored = ckpt.restore(step)
        assert restored is not None
        assert (restored.step, ckpt.current_step) == (step, step)
        assert_same(truth(training), moment.tensors, f"restored, step {step}")
        assert options(training) == moment.options
        assert draws() == moment.rng


def checked_run(
    make: Callable[..., Training],
    path: Path,
    *,
    every: int = 4,
    windows: int | None = 3,
    rounds: int = 2,
    fallback: str | None = None,
    restore: bool = True,
    **arguments: Any,
) -> Ran:
    """Run, and compare every checkpoint; all of them must have been taken as planned.

    Args:
        make: makes the training; ``make(seed=…)`` one that starts elsewhere.
        fallback: a part of the reason why several windows could not be used; None: they were.
    """
    ran = run(make(), path, steps=rounds * every, every=every, windows=windows, **arguments)
    targets = range(every, rounds * every + 1, every)
    check(ran, targets, (lambda: make(seed=99)) if restore else None)
    if windows is not None:
        for step, info in ran.infos.items():
            expect_taken(info, windows, fallback, f"step {step}")
    return ran


def expect_taken(info: Any, windows: int, fallback: str | None, what: str) -> None:
    """How a checkpoint was taken: in all windows, or in one and why."""
    if fallback is None:
        assert (info.windows, info.fallback) == (windows, None), what
        assert info.base == info.step - windows + 1, what
    else:
        assert info.windows == 1, what
        assert info.fallback is not None, what
        assert fallback in info.fallback, f"{what}: {info.fallback}"


# -- devices ---------------------------------------------------------------------------------------


@functools.cache
def cpu() -> CpuDevice:
    """One for all runs: the first use of a device measures its link."""
    return CpuDevice()


@contextlib.contextmanager
def open_device(name: str, *, slowness: int = 20_000) -> Iterator[Device]:
    """``cpu``, or ``emulated`` with milliseconds of work and a link ``slowness`` times slower."""
    if name == "cpu":
        yield cpu()
        return
    work = ModelledWork(forward_s=0.008, backward_s=0.008, update_s=0.004, shrink=slowness)
    device = EmulatedDevice(load_profile("a100-pcie4"), work)
    try:
        yield device
    finally:
        device.close()
