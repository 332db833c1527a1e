"""Names that read like other names: each tensor comes back to its own parameter, or is refused.

The parameters are free-standing ones that the optimizer itself names, as masters have any name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import Bag, Training, checked_run, checkpointer, one_pass, run, same_tree
from torch import Tensor, nn

import gockpt

NAMES = (
    "w", "w.x", "w.exp_avg", "w.exp_avg.exp_avg", "w.master", "w.step", "a.master", "a",
    "a.master.exp_avg", "model.w", "optim.w", "w.", "master", "extras.w", "w/x",
)  # fmt: skip
"""All of one shape, so that nothing but the name can tell them apart."""

Pairs = Iterable[tuple[str, Tensor]]


class Model(nn.Module):
    """A module called ``model`` inside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 5)
        self.w = nn.Parameter(torch.ones(7))


class Named(Training):
    """Parameters with any names, in one optimizer or in several."""

    def __init__(
        self,
        seed: int = 0,
        *,
        make: Callable[[Pairs], torch.optim.Optimizer],
        names: Iterable[str] = NAMES,
        keys: Iterable[str] = ("",),
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.model = Model()
        self.params = {key: {n: torch.randn(96, generator=rng) for n in names} for key in keys}
        self.optimizers = {
            key: make([(n, p.requires_grad_()) for n, p in params.items()])
            for key, params in self.params.items()
        }

    def compute(self, step: int) -> None:
        rng = torch.Generator().manual_seed(step)
        for params in self.params.values():
            for param in params.values():
                param.grad = torch.randn(param.shape, generator=rng)


def adamw(pairs: Pairs) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pairs, lr=0.01, fused=True)


class OnlyTensors(torch.optim.Optimizer):
    """Not one of torch's: all of its state are tensors, found by name alone."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                self.begin(state, param)
            for value in tensors(dict(state)):
                value.lerp_(param.grad, 0.1)
            param.sub_(param.grad, alpha=0.1)

    def begin(self, state: dict[Any, Any], param: Tensor) -> None:
        state |= {"exp_avg": torch.zeros_like(param), "a/b": torch.zeros_like(param)}


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [found for value in tree.values() for found in tensors(value)]


class OddKeys(OnlyTensors):
    """Keys that are no plain names."""

    def begin(self, state: dict[Any, Any], param: Tensor) -> None:
        for key in ("x.foo", "master.x", 0, ("a", 1), 2.5, None, True, "", "."):
            state[key] = torch.zeros_like(param)
        state["inner"] = {1: torch.zeros_like(param), "a.b": {"c": torch.zeros_like(param)}}


class OddFlatKeys(OnlyTensors):
    """The same without anything nested."""

    def begin(self, state: dict[Any, Any], param: Tensor) -> None:
        state |= {key: torch.zeros_like(param) for key in (0, "x.exp_avg", "b/c")}


class OwnMaster(OnlyTensors):
    """Keeps a copy of the weights in its state, as some do."""

    def begin(self, state: dict[Any, Any], param: Tensor) -> None:
        state["master"] = param.detach().clone()


@pytest.mark.parametrize("make", [adamw, OnlyTensors])
@pytest.mark.parametrize("keys", [("",), ("a", "w", "model", "optim")])
def test_each_state_comes_back_to_its_own_parameter(
    make: Callable[[Pairs], torch.optim.Optimizer], keys: tuple[str, ...], tmp_path: Path
) -> None:
    training = functools.partial(Named, make=make, keys=keys)
    fallback = None if make is adamw else "OnlyTensors is not one of torch's"
    checked_run(training, tmp_path / "checked", fallback=fallback)
    restored(training(), training(seed=3), tmp_path / "keys")


def restored(training: Named, other: Named, path: Path) -> None:
    run(training, path, steps=2, every=2, windows=1)
    with checkpointer(other, path) as ckpt:
        ckpt.restore()
    for key, params in training.params.items():
        for name, param in params.items():
            twin = other.params[key][name]
            assert torch.equal(param, twin), name
            one, two = (t.optimizers[key].state for t in (training, other))
            assert same_tree(dict(two[twin]), dict(one[param])), name


@pytest.mark.parametrize("make", [OddKeys, OddFlatKeys])
@pytest.mark.parametrize("keys", [("",), ("a", "w")])
def test_keys_of_any_kind_come_back_as_they_were(
    make: Callable[[Pairs], torch.optim.Optimizer], keys: tuple[str, ...], tmp_path: Path
) -> None:
    one, two = (Named(seed, make=make, names=("w", "w.x", "a"), keys=keys) for seed in (0, 3))
    restored(one, two, tmp_path)


def test_a_key_called_master_is_no_master_copy(tmp_path: Path) -> None:
    one, two = (
        Bag(seed, make=lambda params: OwnMaster(params), shapes=((17, 5), (130,)))
        for seed in (0, 3)
    )
    run(one, tmp_path, steps=2, every=2, windows=1)
    with checkpointer(two, tmp_path) as ckpt:
        ckpt.restore()
    for param, twin in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert same_tree(dict(two.optimizer.state[twin]), dict(one.optimizer.state[param]))


class Alike(OnlyTensors):
    """Two keys that are written alike."""

    keys: tuple[Any, Any]

    def begin(self, state: dict[Any, Any], param: Tensor) -> None:
        state["inner"] = {key: torch.zeros_like(param) for key in self.keys}


@pytest.mark.parametrize("keys", [(0, "0"), (True, "True"), (None, "None"), (1.5, "1.5")])
def test_keys_that_are_written_alike_are_refused(keys: tuple[Any, Any], tmp_path: Path) -> None:
    make = type("Alike", (Alike,), {"keys": keys})
    training = Named(make=make, names=["w"])
    with checkpointer(training, tmp_path, every=2, windows=1) as ckpt:
        one_pass(ckpt, training, 1)
        ckpt.step()
        one_pass(ckpt, training, 2)
        with pytest.raises(gockpt.StateError, match=f"both be saved as 'optim.w.inner/{keys[1]}'"):
            ckpt.step()
    assert not list(tmp_path.glob("step-*"))


def test_a_key_called_master_beside_a_master_copy_is_refused(tmp_path: Path) -> None:
    training = Named(make=OwnMaster, names=["w"])
    training.compute(1)
    training.update(1)
    with pytest.raises(gockpt.StateError, match=r"both be saved as 'optim\.w\.master'"):
        checkpointer(training, tmp_path)


def test_names_of_optimizers_have_no_dots(tmp_path: Path) -> None:
    with pytest.raises(gockpt.ConfigError, match="names without dots"):
        checkpointer(Named(make=adamw, keys=("a", "a.b")), tmp_path)
