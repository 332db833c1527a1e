"""What training loops do to gradients, updates and weights: the checkpoint holds what they made.

Clipping, accumulation, scalers, closures, frozen parameters, buffers that are reused, schedulers.
Each loop is run with several windows; see identity_kit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import (
    Bag,
    Training,
    check,
    checked_run,
    checkpointer,
    fused_adamw,
    open_device,
    run,
    truth,
)
from replay_kit import maker
from torch import Tensor, nn
from torch.optim import lr_scheduler

import gockpt

DEVICES = pytest.mark.parametrize("device", ["cpu", "emulated"])


class Clipped(Bag):
    def update(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        super().update(step)


@DEVICES
def test_clipping(device: str, tmp_path: Path) -> None:
    with open_device(device) as opened:
        checked_run(Clipped, tmp_path, device=opened)


def test_clipping_by_a_hook_that_was_registered_after_the_checkpointer(tmp_path: Path) -> None:
    training = Bag()

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_value_(training.model.parameters(), 0.1)

    def once(ckpt: object, _: Training, step: int) -> None:
        if step == 1:
            training.optimizer.register_step_pre_hook(clip)

    ran = run(training, tmp_path, steps=8, every=4, windows=3, after=once)
    check(ran, [4, 8], None)
    assert ran.infos[8].windows == 3


@pytest.mark.parametrize("runs", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("missing", range(2, 6))
def test_parameters_without_gradient_in_some_steps(
    missing: int, runs: dict[str, bool], tmp_path: Path
) -> None:
    # Windows open after steps 2, 3, 4, 5: each position, before, inside and at the end.
    make = functools.partial(
        Bag,
        make=maker("AdamW", weight_decay=0.5, **runs),
        absent=lambda step, number: step == missing and number in (0, 3),
    )
    checked_run(make, tmp_path, every=5, windows=4, rounds=1)


FIRST = {
    "AdamW": {"fused": True},
    "Adagrad": {"fused": True},
    "SGD": {"momentum": 0.9, "dampening": 0.3},  # torch's fused one fails at a mixed first gradient
    "RAdam": {"foreach": True},
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("first", range(2, 8))
def test_a_first_gradient_before_inside_and_after_the_windows(
    first: int, name: str, tmp_path: Path
) -> None:
    make = functools.partial(
        Bag,
        make=maker(name, **FIRST[name]),
        absent=lambda step, number: step < first and number in (0, 2),
    )
    checked_run(make, tmp_path, every=5, windows=4, rounds=1)


def test_no_gradient_at_all_in_a_pass(tmp_path: Path) -> None:
    class Idle(Bag):
        def compute(self, step: int) -> None:
            if step not in (3, 7):
                super().compute(step)

    checked_run(Idle, tmp_path)


def test_frozen_parameters(tmp_path: Path) -> None:
    class Frozen(Bag):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.bag.list[0].requires_grad_(False)
            self.bag.list[4].requires_grad_(False)

    checked_run(Frozen, tmp_path)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("freeze", [True, False])
def test_freezing_and_unfreezing_before_inside_and_after_the_windows(
    freeze: bool, at: int, tmp_path: Path
) -> None:
    class Changing(Bag):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.bag.list[0].requires_grad_(freeze)

        def between(self, step: int) -> None:
            if step == at:
                self.bag.list[0].requires_grad_(not freeze)

    ran = run(Changing(), tmp_path, steps=10, every=5, windows=4)
    check(ran, [5, 10], lambda: Changing(seed=9))


class Accumulating(Bag):
    """Four micro-batches to an update, with or without new gradient tensors."""

    def compute(self, step: int) -> None:
        for micro in range(4):
            self.bag.pull(10 * step + micro, lambda *_: False).backward()


@DEVICES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_and_both_ways_of_zero_grad(
    set_to_none: bool, device: str, tmp_path: Path
) -> None:
    make = functools.partial(Accumulating, set_to_none=set_to_none)
    with open_device(device) as opened:
        checked_run(make, tmp_path, device=opened)


def test_passes_without_update_are_no_steps(tmp_path: Path) -> None:
    training = Bag(set_to_none=False)
    with checkpointer(training, tmp_path, every=2, windows=2) as ckpt:
        for micro in range(1, 13):
            training.compute(micro)
            if micro % 3 == 0:
                training.update(micro)
                expected = truth(training)
            ckpt.step()
            assert ckpt.current_step == micro // 3
    found = gockpt.open(tmp_path, 4)
    assert all(torch.equal(found.tensor(name), value) for name, value in expected.items())


@DEVICES
def test_zero_grad_of_the_model_before_the_backward(device: str, tmp_path: Path) -> None:
    class Zeroing(Bag):
        def compute(self, step: int) -> None:
            self.model.zero_grad(set_to_none=False)
            super().compute(step)

        def update(self, step: int) -> None:
            self.optimizer.step()

    with open_device(device) as opened:
        checked_run(Zeroing, tmp_path, device=opened)


class Buckets(Bag):
    """Gradients are views of one flat buffer that every backward writes again, as DDP has them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.params = list(self.model.parameters())
        sizes = [p.numel() for p in self.params]
        views = torch.zeros(sum(sizes)).split(sizes)
        self.views = [view.view(p.shape) for view, p in zip(views, self.params, strict=True)]

    def compute(self, step: int) -> None:
        grads = torch.autograd.grad(self.bag.pull(step, self._absent), self.params)
        for p, view, grad in zip(self.params, self.views, grads, strict=True):
            p.grad = view.copy_(grad)

    def update(self, step: int) -> None:
        self.optimizer.step()


@DEVICES
@pytest.mark.parametrize("windows", [2, 4])
def test_gradients_that_are_views_of_a_reused_buffer(
    windows: int, device: str, tmp_path: Path
) -> None:
    with open_device(device) as opened:
        checked_run(Buckets, tmp_path, windows=windows, device=opened)


@DEVICES
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_foreach_sgd_with_nesterov_writes_its_gradients(
    decay: float, device: str, tmp_path: Path
) -> None:
    sgd = maker("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True, weight_decay=decay)
    with open_device(device) as opened:
        checked_run(functools.partial(Bag, make=sgd), tmp_path, device=opened)


class Scaled(Bag):
    """With a loss scaler; the gradients of some passes overflow."""

    overflows: frozenset[int] = frozenset({3, 6})

    def __init__(self, seed: int = 0, **more: Any) -> None:
        super().__init__(seed, **more)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.extras = {"scaler": self.scaler}

    def compute(self, step: int) -> None:
        loss = self.bag.pull(step, self._absent)
        if step in self.overflows:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()

    def update(self, step: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


@DEVICES
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_with_skipped_steps(
    fused: bool, unscale: bool, device: str, tmp_path: Path
) -> None:
    class Unscaled(Scaled):
        def update(self, step: int) -> None:
            if unscale:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            super().update(step)

    make = functools.partial(Unscaled, make=maker("AdamW", lr=0.1, fused=fused))
    with open_device(device) as opened:
        checked_run(make, tmp_path, windows=4, device=opened)


@pytest.mark.parametrize("skipped", range(2, 9))
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_at_each_place_of_the_windows(
    skipped: int, fused: bool, tmp_path: Path
) -> None:
    class Once(Scaled):
        overflows = frozenset({skipped})

    make = functools.partial(Once, make=maker("AdamW", lr=0.1, fused=fused))
    checked_run(make, tmp_path, restore=False)


def test_skipped_steps_with_a_checkpoint_at_every_step(tmp_path: Path) -> None:
    class Often(Scaled):
        overflows = frozenset({2, 3, 5})

    make = functools.partial(Often, make=maker("AdamW", lr=0.1))
    checked_run(make, tmp_path, every=1, windows=1, rounds=6)


class Closed(Bag):
    def update(self, step: int) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.bag.pull(step, self._absent)
            loss.backward()
            return loss

        self.optimizer.step(closure)


def test_closures(tmp_path: Path) -> None:
    checked_run(Closed, tmp_path, fallback="closure")


def test_lbfgs(tmp_path: Path) -> None:
    def lbfgs(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=2)

    make = functools.partial(Closed, make=lbfgs, shapes=((17, 3), (5,)))
    checked_run(make, tmp_path, fallback="")


class Compiled(Training):
    """Compiled as a whole, in a part, or not at all; always the same model."""

    def __init__(self, seed: int = 0, *, whole: bool = True, part: bool = True) -> None:
        torch.manual_seed(seed)
        first: nn.Module = nn.Linear(65, 17)
        inner = nn.Sequential(torch.compile(first, backend="eager") if part else first, nn.GELU())
        self.model = torch.compile(inner, backend="eager") if whole else inner
        named = list(self.model.named_parameters())
        self.optimizers = {"": torch.optim.AdamW(named, lr=0.1, fused=True)}

    def compute(self, step: int) -> None:
        noise = torch.randn(3, 65, generator=torch.Generator().manual_seed(step))
        self.model(noise).square().sum().backward()


def test_a_compiled_model_is_the_same_model(tmp_path: Path) -> None:
    """Its checkpoints have the names of the model itself, whatever of it was compiled."""
    ran = run(Compiled(), tmp_path, steps=8, every=4, windows=3)
    found = gockpt.open(tmp_path, 8)
    assert (found.info.windows, found.info.proof["outcome"], found.verify()) == (3, "exact", [])
    assert "optim.0.weight.exp_avg" in found.names()
    trained = ran.training.model.state_dict().values()
    for whole, part in ((True, True), (False, True), (False, False)):
        other = Compiled(9, whole=whole, part=part)
        with checkpointer(other, tmp_path) as ckpt:
            assert ckpt.restore() is not None
        assert all(map(torch.equal, other.model.state_dict().values(), trained))


class TwoOptimizers(Bag):
    """One for the large parameters, one for the others; the second is not called in each pass."""

    def __init__(self, seed: int = 0, *, often: int = 1) -> None:
        super().__init__(seed)
        params = list(self.model.parameters())
        self.optimizers = {
            "matrices": torch.optim.AdamW(params[:2], lr=0.1, fused=True),
            "rest": torch.optim.SGD(params[2:], lr=0.05, momentum=0.9),
        }
        self._often = often

    def update(self, step: int) -> None:
        self.optimizers["matrices"].step()
        if step % self._often == 0:
            self.optimizers["rest"].step()
        self.model.zero_grad()


@DEVICES
@pytest.mark.parametrize("often", [1, 2, 3])
def test_two_optimizers(often: int, device: str, tmp_path: Path) -> None:
    with open_device(device) as opened:
        make = functools.partial(TwoOptimizers, often=often)
        checked_run(make, tmp_path, windows=4, device=opened)


class WithUnknown(TwoOptimizers):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        rest = list(self.model.parameters())[2:]
        self.optimizers = {**self.optimizers, "rest": Signed(rest, lr=0.01)}


def test_an_optimizer_that_cannot_be_replayed_beside_one_that_can(tmp_path: Path) -> None:
    checked_run(WithUnknown, tmp_path)


class Signed(torch.optim.Optimizer):
    """Not one of torch's: its state is nested, and not all of it are tensors."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["moments"] = {"first": torch.zeros_like(param), "count": 0}
                    state["pair"] = [torch.zeros(2, dtype=torch.float64), torch.ones(())]
                state["moments"]["first"].lerp_(param.grad, 0.1)
                state["moments"]["count"] += 1
                state["pair"][0] += 1
                param.sub_(state["moments"]["first"].sign(), alpha=group["lr"])


def test_an_unknown_optimizer_alone_is_saved_whole_and_says_so(tmp_path: Path) -> None:
    make = functools.partial(Bag, make=lambda params: Signed(params, lr=0.1))
    checked_run(make, tmp_path, fallback="Signed is not one of torch's")


def test_a_subclass_of_a_known_optimizer_is_unknown(tmp_path: Path) -> None:
    class Mine(torch.optim.AdamW):
        pass

    make = functools.partial(Bag, make=lambda params: Mine(params, lr=0.1))
    checked_run(make, tmp_path, fallback="Mine is not one of torch's")


def test_a_compiled_or_patched_update_is_not_trusted(tmp_path: Path) -> None:
    class Patched(Bag):
        """Does more than its class says; only the rehearsal can find that out."""

        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            update = self.optimizer.step

            def step() -> None:
                update()
                with torch.no_grad():
                    self.bag.list[0].mul_(0.99)

            self.optimizer.step = step

    checked_run(Patched, tmp_path, every=6, fallback="")


# -- weights changed after the update --------------------------------------------------------------


class Clamped(Bag):
    def update(self, step: int) -> None:
        super().update(step)
        with torch.no_grad():
            self.bag.list[0].clamp_(-0.5, 0.5)


@DEVICES
def test_weights_clamped_after_the_update(device: str, tmp_path: Path) -> None:
    with open_device(device) as opened:
        checked_run(Clamped, tmp_path, device=opened, fallback="was changed outside")


class Averaged(Bag):
    """Averaged weights are swapped in and out again between two passes, for an evaluation."""

    through_data = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def between(self, step: int) -> None:
        self._swap()
        self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for average, param in zip(self.average, self.model.parameters(), strict=True):
                kept = param.detach().clone()
                (param.data if self.through_data else param).copy_(average)
                average.copy_(kept)


@DEVICES
def test_averaged_weights_swapped_in_and_out(device: str, tmp_path: Path) -> None:
    with open_device(device) as opened:
        checked_run(Averaged, tmp_path, device=opened, fallback="was changed outside")


# -- schedulers ------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 9], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 30),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 3),
}


class Scheduled(Bag):
    def __init__(self, seed: int = 0, *, kind: str) -> None:
        super().__init__(seed, make=lambda params: torch.optim.AdamW(params, lr=0.1, fused=True))
        self.scheduler = SCHEDULERS[kind](self.optimizer)
        self.extras = {"scheduler": self.scheduler}

    def update(self, step: int) -> None:
        super().update(step)
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        else:
            self.scheduler.step()

    def rates(self, steps: int) -> list[float]:
        found = []
        for step in range(100, 100 + steps):
            self.compute(step)
            self.update(step)
            found.append(float(self.optimizer.param_groups[0]["lr"]))
        return found


def test_every_scheduler_of_torch_is_in_the_list() -> None:
    missing = set(lr_scheduler.__all__) - SCHEDULERS.keys() - {"LRScheduler"}
    assert not missing


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_as_an_extra(kind: str, tmp_path: Path) -> None:
    make = functools.partial(Scheduled, kind=kind)
    ran = checked_run(make, tmp_path)
    other = make(seed=7)
    with checkpointer(other, tmp_path) as ckpt:
        ckpt.restore()
    assert isinstance(ran.training, Scheduled)
    assert other.rates(10) == ran.training.rates(10)


@DEVICES
def test_a_real_ddp_bucket_view(device: str, tmp_path: Path) -> None:
    """DDP of one process: its reducer owns the gradients' memory."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        with open_device(device) as opened:
            checked_run(Distributed, tmp_path / "checkpoints", device=opened)
    finally:
        torch.distributed.destroy_process_group()


class Distributed(Training):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(9, 33), nn.ReLU(), nn.Linear(33, 5))
        self.ddp = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = fused_adamw(self.model.parameters())
        self.optimizers = {"": self.optimizer}

    def compute(self, step: int) -> None:
        rng = torch.Generator().manual_seed(step)
        self.ddp(torch.randn(6, 9, generator=rng)).square().mean().backward()

    def update(self, step: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
