"""What models are made of: every tensor of theirs comes back, bit for bit.

Tied, strided, complex, 16-bit, empty; buffers; master weights. See identity_kit.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import (
    Bag,
    Training,
    assert_same,
    check,
    checked_run,
    checkpointer,
    fused_adamw,
    one_pass,
    open_device,
    run,
    truth,
)
from replay_kit import maker
from torch import Tensor, nn
from torch.nn import functional as F

import gockpt
from gockpt.storage.catalog import scan
from gockpt.strategies.capture import Capture
from gockpt.strategies.gradients import Sent

DEVICES = pytest.mark.parametrize("device", ["cpu", "emulated"])


class Loop(Training):
    """A real module, trained on random numbers."""

    shape: tuple[int, ...] = (6, 9)

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = self.build()
        self.optimizer = fused_adamw(self.model.parameters())
        self.optimizers = {"": self.optimizer}

    def build(self) -> nn.Module:
        raise NotImplementedError

    def compute(self, step: int) -> None:
        rng = torch.Generator().manual_seed(step)
        self.model(torch.randn(self.shape, generator=rng)).square().mean().backward()


# -- tied ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 9)
        self.middle = nn.Linear(9, 9)
        self.head = nn.Linear(9, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long() % 31
        return self.head(self.middle(self.embed(tokens)))


class TiedLoop(Loop):
    def build(self) -> nn.Module:
        return Tied()


def test_tied_weights_are_stored_once_and_have_both_names(tmp_path: Path) -> None:
    checked_run(TiedLoop, tmp_path)
    found = gockpt.open(tmp_path)
    assert found.record("model.embed.weight") is found.record("model.head.weight")
    assert torch.equal(found.tensor("model.embed.weight"), found.tensor("model.head.weight"))
    assert "optim.head.weight.exp_avg" not in found.names()


def test_tied_weights_stay_tied_after_a_restore(tmp_path: Path) -> None:
    checked_run(TiedLoop, tmp_path)
    other = TiedLoop(seed=3)
    with checkpointer(other, tmp_path) as ckpt:
        ckpt.restore()
    assert isinstance(other.model, Tied)
    assert other.model.head.weight is other.model.embed.weight


class TiedToView(nn.Module):
    """A buffer that is a view of a part of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 9))
        self.register_buffer("top", self.weight.detach()[:4])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def test_a_view_of_a_parameter(tmp_path: Path) -> None:
    class Viewed(Loop):
        def build(self) -> nn.Module:
            return TiedToView()

    checked_run(Viewed, tmp_path)


# -- buffers ---------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 70), nn.BatchNorm1d(70), nn.ReLU(), nn.Linear(70, 5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(7, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.mask[int(self.seen) % 7] ^= True
        self.scratch += 1
        return self.body(x)


class NormedLoop(Loop):
    def build(self) -> nn.Module:
        return Normed()


@DEVICES
@pytest.mark.parametrize("windows", [1, 4])
def test_batch_norm_and_buffers_that_change_in_the_forward(
    windows: int, device: str, tmp_path: Path
) -> None:
    with open_device(device) as opened:
        checked_run(NormedLoop, tmp_path, windows=windows, device=opened)
    assert "model.scratch" not in gockpt.open(tmp_path).names()


def test_a_model_without_optimizer_state_or_buffers_at_all(tmp_path: Path) -> None:
    make = functools.partial(Bag, make=maker("SGD", lr=0.1))
    checked_run(make, tmp_path)


def test_extra_state_of_modules(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

        def get_extra_state(self) -> dict[str, Any]:
            return {"calls": self.calls, "pair": (1, 2.5)}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            assert state["pair"] == (1, 2.5)
            self.calls = state["calls"]

    class Counted(Loop):
        def build(self) -> nn.Module:
            return nn.Sequential(Counting(9, 33), Counting(33, 3))

    ran = run(Counted(), tmp_path, steps=4, every=4, windows=3)
    other = Counted(seed=1)
    with checkpointer(other, tmp_path) as ckpt:
        ckpt.restore()
    assert_same(truth(other), ran.moments[4].tensors, "restored")
    assert [layer.calls for layer in other.model] == [4, 4]


# -- dtypes ----------------------------------------------------------------------------------------


@DEVICES
def test_bf16_weights(device: str, tmp_path: Path) -> None:
    with open_device(device) as opened:
        checked_run(functools.partial(Bag, dtype=torch.bfloat16), tmp_path, device=opened)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    checked_run(functools.partial(Bag, dtype=dtype), tmp_path)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_are_saved_whole(dtype: torch.dtype, tmp_path: Path) -> None:
    make = functools.partial(Bag, make=lambda params: torch.optim.Adam(params, lr=0.1), dtype=dtype)
    checked_run(make, tmp_path, fallback="complex")


def test_complex_parameters_beside_others(tmp_path: Path) -> None:
    class Mixed(Bag):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            rng = torch.Generator().manual_seed(seed)
            self.bag.list.append(torch.randn(70, dtype=torch.complex64, generator=rng))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
            self.optimizers = {"": self.optimizer}

    checked_run(Mixed, tmp_path)


class Master(Bag):
    """16-bit weights and gradients, the optimizer on 32-bit copies under the same names."""

    exact = True

    def __init__(self, seed: int = 0, *, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(seed, dtype=dtype)
        self.named = dict(self.model.named_parameters())
        self.masters = {fqn: p.detach().float() for fqn, p in self.named.items()}
        self.optimizer = torch.optim.AdamW(list(self.masters.items()), lr=0.05, fused=True)
        self.optimizers = {"": self.optimizer}

    def update(self, step: int) -> None:
        for fqn, p in self.named.items():
            self.masters[fqn].grad = None if p.grad is None else self.widen(p.grad)
        self.optimizer.step()
        with torch.no_grad():
            for fqn, p in self.named.items():
                p.copy_(self.masters[fqn])

    def compute(self, step: int) -> None:
        for p in self.named.values():
            p.grad = None
        super().compute(step)

    def widen(self, grad: Tensor) -> Tensor:
        return grad.float()


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_with_16_bit_gradients(
    dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    with open_device(device) as opened:
        ran = checked_run(
            functools.partial(Master, dtype=dtype), tmp_path, windows=4, device=opened
        )
    assert ran.events == {}
    names = gockpt.open(tmp_path).names()
    assert {"model.list.0", "optim.list.0.master", "optim.list.0.exp_avg"} <= set(names)


@pytest.mark.parametrize("scale", [0.5, 0.3])
def test_gradients_that_are_no_plain_upcast_are_never_narrowed(
    scale: float, tmp_path: Path
) -> None:
    class Rescaled(Master):
        def widen(self, grad: Tensor) -> Tensor:
            return grad.float() * scale

    written = lambda ckpt, training, step: ckpt.wait(60)  # noqa: E731 - a slot is always free
    ran = run(Rescaled(), tmp_path, steps=20, every=4, windows=3, after=written)
    check(ran, range(4, 21, 4), lambda: Rescaled(seed=4))
    assert [info.windows for info in ran.infos.values()].count(3) >= 2  # 32 bits are sent instead


def test_a_gradient_that_is_found_wanting_too_late_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at the last update comes after the next one began, as on a device that lags."""

    class Rescaled(Master):
        scale = 1.0

        def widen(self, grad: Tensor) -> Tensor:
            return grad.float() * self.scale

    look, confirm, confirmed = Sent.problem, Capture.confirm, threading.Event()

    def late(sent: Sent) -> str | None:
        assert sent.step != 4 or confirmed.wait(60)
        return look(sent)

    def confirming(capture: Capture, late: Callable[[str], None]) -> bool:
        done = confirm(capture, late)
        confirmed.set()
        return done

    monkeypatch.setattr(Sent, "problem", late)
    monkeypatch.setattr(Capture, "confirm", confirming)
    training = Rescaled()
    errors: list[gockpt.GockptError] = []
    ckpt = checkpointer(training, tmp_path, every=4, windows=3)
    for step in range(1, 13):
        training.scale = 0.3 if step == 4 else 1.0
        one_pass(ckpt, training, step)
        try:
            ckpt.step()
            if step > 4:
                ckpt.wait(60)
        except gockpt.GockptError as error:
            errors.append(error)
    ckpt.close()
    assert [type(error) for error in errors] == [gockpt.AgentError]
    assert "no plain upcast" in str(errors[0])
    assert ckpt.engine is not None
    assert ckpt.engine.events["fallbacks"] == 1  # the engine has learnt it, too: 32 bits from here
    assert {found.step for found in scan(tmp_path)} == {8, 12}


def test_a_master_whose_cast_is_not_the_weight(tmp_path: Path) -> None:
    class Rounded(Master):
        """Weights are rounded downwards: no plain cast, so they must be sent themselves."""

        def update(self, step: int) -> None:
            super().update(step)
            with torch.no_grad():
                for p in self.named.values():
                    p.copy_(torch.nextafter(p, torch.full_like(p, -9.0)))

    ran = run(Rounded(), tmp_path, steps=8, every=4, windows=3)
    check(ran, [4, 8], lambda: Rounded(seed=4))


def test_moments_keep_their_dtype(tmp_path: Path) -> None:
    """torch's own load_state_dict would cast them to the parameter's."""

    class WideMoments(Bag):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed, make=lambda p: Momentum(p, lr=0.1), dtype=torch.bfloat16)

    class Momentum(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state.setdefault("moment", torch.zeros(p.shape, dtype=torch.float32))
                state["moment"].lerp_(p.grad.float(), 0.1)
                p.sub_(state["moment"].to(p.dtype), alpha=0.1)

    checked_run(WideMoments, tmp_path, fallback="Momentum")
    assert gockpt.open(tmp_path).tensor("optim.list.0.moment").dtype == torch.float32


# -- layouts ---------------------------------------------------------------------------------------


def test_0_dim_empty_and_one_element_parameters(tmp_path: Path) -> None:
    shapes = ((), (1,), (1, 1, 1), (0,), (0, 5), (3, 0, 2), (2,), (65,))
    checked_run(functools.partial(Bag, shapes=shapes), tmp_path)


def test_nothing_but_an_empty_parameter(tmp_path: Path) -> None:
    class Empty(Bag):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed, shapes=((0, 3), (1,)))

    checked_run(Empty, tmp_path)


class Strided(Bag):
    """Transposed, expanded from a larger tensor with holes, and with an odd start."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        rng = torch.Generator().manual_seed(seed)
        self.bag.list[0] = nn.Parameter(torch.randn(65, 17, generator=rng).T)
        self.bag.list[1] = nn.Parameter(torch.randn(260, generator=rng)[::2])
        self.bag.list[6] = nn.Parameter(torch.randn(520, generator=rng)[3:516])
        self.optimizer = fused_adamw(self.model.parameters())
        self.optimizers = {"": self.optimizer}


@DEVICES
def test_non_contiguous_parameters(device: str, tmp_path: Path) -> None:
    with open_device(device) as opened:
        ran = checked_run(Strided, tmp_path, device=opened)
    saved = gockpt.open(tmp_path).tensor("model.list.0")
    assert saved.stride() == ran.training.model.get_parameter("list.0").stride() == (1, 17)


class Convs(Loop):
    shape = (2, 8, 5, 5)

    def build(self) -> nn.Module:
        made = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3))
        return made.to(memory_format=torch.channels_last)

    def compute(self, step: int) -> None:
        rng = torch.Generator().manual_seed(step)
        images = torch.randn(self.shape, generator=rng).to(memory_format=torch.channels_last)
        self.model(images).square().mean().backward()


def test_channels_last(tmp_path: Path) -> None:
    checked_run(Convs, tmp_path)
    saved = gockpt.open(tmp_path).tensor("model.0.weight")
    assert saved.is_contiguous(memory_format=torch.channels_last)
    assert not saved.is_contiguous()


def test_state_that_lies_in_memory_unlike_its_parameter(tmp_path: Path) -> None:
    """As torch's load_state_dict may leave it: the parameter is then captured whole."""

    class Loaded(Convs):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.compute(1)
            self.optimizer.step()
            for state in self.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].contiguous()

    checked_run(Loaded, tmp_path, restore=False)


def test_sparse_gradients_are_saved_whole(tmp_path: Path) -> None:
    class Sparse(Loop):
        def build(self) -> nn.Module:
            return nn.Embedding(40, 9, sparse=True)

        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.optimizers = {"": self.optimizer}

        def compute(self, step: int) -> None:
            tokens = torch.arange(step, step + 7)
            self.model(tokens).square().sum().backward()

    checked_run(Sparse, tmp_path, fallback="its gradient is sparse")


def test_parametrized_modules(tmp_path: Path) -> None:
    class Normalised(Loop):
        def build(self) -> nn.Module:
            return nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(9, 33)), nn.Linear(33, 2)
            )

    checked_run(Normalised, tmp_path)


def test_a_transformer(tmp_path: Path) -> None:
    class Small(Loop):
        shape = (2, 7, 16)

        def build(self) -> nn.Module:
            layer = nn.TransformerEncoderLayer(16, 2, 40, dropout=0.1, batch_first=True)
            return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def compute(self, step: int) -> None:
            out = self.model(torch.randn(self.shape))
            F.dropout(out, 0.2).square().mean().backward()

    checked_run(Small, tmp_path, windows=4)
