"""The hooks: what they tell the engine, in which order, and that nothing of them stays behind."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gockpt
from gockpt.hooks import Hooks


class Listener:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.unsure: list[str | None] = []

    def before_update(self, index: int, *, unsure: str | None) -> None:
        self.heard.append(("before", index))
        self.unsure.append(unsure)

    def after_update(self, index: int) -> None:
        self.heard.append(("after", index))

    def fence(self) -> None:
        self.heard.append("fence")

    def scaler_skipped(self) -> None:
        self.heard.append("skipped")


def make() -> tuple[nn.Module, torch.optim.Optimizer, Listener]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), Listener()


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 3)).sum().backward()


def test_each_update_is_framed() -> None:
    model, _, listener = make()
    weight, bias = model.parameters()
    optimizers = {"a": torch.optim.SGD([weight], lr=0.1), "b": torch.optim.SGD([bias], lr=0.1)}
    hooks = Hooks(model, optimizers, {}, listener)
    backward(model)
    optimizers["b"].step()
    optimizers["a"].step()
    assert listener.heard == [("before", 1), ("after", 1), ("before", 0), ("after", 0)]
    assert listener.unsure == [None, None]
    hooks.remove()


def test_ours_are_next_to_the_update_whenever_the_others_were_registered() -> None:
    model, optimizer, listener = make()
    order = listener.heard
    optimizer.register_step_pre_hook(lambda *_: order.append("early pre"))
    optimizer.register_step_post_hook(lambda *_: order.append("early post"))
    hooks = Hooks(model, {"": optimizer}, {}, listener)
    optimizer.register_step_pre_hook(lambda *_: order.append("late pre"))
    optimizer.register_step_post_hook(lambda *_: order.append("late post"))
    backward(model)
    optimizer.step()
    # Not yet put in order: it cannot be sure of the gradients then, and says so.
    assert listener.unsure[0] is not None
    assert "another hook" in listener.unsure[0]
    hooks.order()
    order.clear()
    optimizer.step()
    assert order == [
        "early pre",
        "late pre",
        ("before", 0),
        ("after", 0),
        "early post",
        "late post",
    ]
    assert listener.unsure[1] is None
    hooks.remove()
    order.clear()
    optimizer.step()
    assert order == ["early pre", "late pre", "early post", "late post"]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_makes_it_unsure(by_name: bool) -> None:
    model, optimizer, listener = make()
    hooks = Hooks(model, {"": optimizer}, {}, listener)

    def closure() -> Tensor:
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    if by_name:
        optimizer.step(closure=closure)
    else:
        optimizer.step(closure)
    assert listener.unsure[0] is not None
    assert "closure" in listener.unsure[0]
    optimizer.step(None)
    assert listener.unsure[1] is None
    hooks.remove()


@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_zeroing_in_place_is_announced_before_it_happens(which: str) -> None:
    model, optimizer, listener = make()
    hooks = Hooks(model, {"": optimizer}, {}, listener)
    owner: Any = model if which == "model" else optimizer
    seen: list[float] = []
    listener.fence = lambda: seen.append(float(model.weight.grad.abs().sum()))  # type: ignore
    backward(model)
    owner.zero_grad(set_to_none=False)
    assert len(seen) == 1
    assert seen[0] > 0
    assert float(model.weight.grad.abs().sum()) == 0  # type: ignore[union-attr, operator]
    backward(model)
    owner.zero_grad(False)
    assert len(seen) == 2
    backward(model)
    owner.zero_grad()
    assert len(seen) == 2  # gradients are let go of, not written
    assert model.weight.grad is None
    hooks.remove()


def scaled(overflow: bool, *, given: bool = True) -> list[Any]:
    model, optimizer, listener = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    hooks = Hooks(model, {"": optimizer}, {"scaler": scaler} if given else {}, listener)
    loss = model(torch.ones(1, 3)).sum() * (float("inf") if overflow else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    hooks.remove()
    assert "step" not in vars(scaler)
    return listener.heard


def test_an_update_that_the_scaler_leaves_out_is_told() -> None:
    assert scaled(overflow=True) == ["skipped"]
    assert scaled(overflow=False) == [("before", 0), ("after", 0)]
    assert scaled(overflow=True, given=False) == []


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_is_not_given_is_pointed_out_once(
    fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

    def update(scaler: torch.amp.GradScaler, *given: torch.amp.GradScaler) -> int:
        caplog.clear()
        hooks = Hooks(model, {"": optimizer}, {str(id(one)): one for one in given}, Listener())
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        hooks.remove()
        return caplog.text.count("a gradient scaler is in use but not in extras")

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert update(scaler) == 1
    assert update(scaler, scaler) == 0
    assert update(torch.amp.GradScaler("cpu", enabled=False)) == 0


def test_another_optimizers_skipped_update_is_none_of_ours() -> None:
    model, optimizer, listener = make()
    other = nn.Linear(2, 2)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    hooks = Hooks(model, {"": optimizer}, {"scaler": scaler}, listener)
    scaler.scale(other(torch.ones(1, 2)).sum() * float("inf")).backward()
    scaler.step(foreign)
    assert listener.heard == []
    hooks.remove()


def test_nothing_stays_behind() -> None:
    model, optimizer, listener = make()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step in its own way
    vars_before = set(vars(model)), set(vars(optimizer))
    scaler = torch.amp.GradScaler("cpu")
    hooks = Hooks(model, {"": optimizer}, {"scaler": scaler}, listener)
    hooks.remove()
    hooks.remove()
    assert (set(vars(model)), set(vars(optimizer))) == vars_before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    backward(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad(set_to_none=False)
    assert listener.heard == []


def test_a_wrap_that_the_user_put_around_ours_is_left_alone() -> None:
    model, optimizer, listener = make()
    hooks = Hooks(model, {"": optimizer}, {}, listener)
    ours, calls = model.zero_grad, []

    def theirs(set_to_none: bool = True) -> None:
        calls.append(set_to_none)
        ours(set_to_none)

    model.zero_grad = theirs  # type: ignore[method-assign]
    hooks.remove()
    assert model.zero_grad is theirs
    model.zero_grad(True)
    assert calls == [True]


def test_a_wrap_that_was_there_before_is_put_back() -> None:
    model, optimizer, listener = make()
    calls: list[bool] = []
    mine = lambda set_to_none=True: calls.append(set_to_none)  # noqa: E731
    model.zero_grad = mine  # type: ignore[method-assign]
    hooks = Hooks(model, {"": optimizer}, {}, listener)
    model.zero_grad(set_to_none=False)
    assert (listener.heard, calls) == (["fence"], [False])
    hooks.remove()
    assert model.zero_grad is mine


def test_an_optimizer_has_one_at_a_time() -> None:
    model, optimizer, listener = make()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    hooks = Hooks(model, {"": optimizer}, {}, listener)
    with pytest.raises(gockpt.ConfigError, match="second Checkpointer"):
        Hooks(model, {"x": other, "y": optimizer}, {}, Listener())
    assert not other._optimizer_step_pre_hooks  # the refused one left nothing on the others
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    hooks.remove()
    Hooks(model, {"": optimizer}, {}, listener).remove()


# -- copies of what is hooked ----------------------------------------------------------------------


def copies(model: nn.Module) -> list[nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
        torch.optim.swa_utils.AveragedModel(model).module,
    ]


def test_a_copy_of_the_model_zeroes_its_own_gradients() -> None:
    """Averaged weights are a deep copy, made while training runs."""
    model, optimizer, listener = make()
    hooks = Hooks(model, {"": optimizer}, {}, listener)
    for copied in copies(model):
        backward(model)
        backward(copied)
        copied.zero_grad(set_to_none=False)
        assert float(copied.weight.grad.abs().sum()) == 0  # type: ignore[union-attr, operator]
        copied.zero_grad()
        assert copied.weight.grad is None
        assert model.weight.grad is not None
        assert float(model.weight.grad.abs().sum()) > 0  # type: ignore[operator]
        assert listener.heard == []
        optimizer.zero_grad()
    hooks.remove()


def test_a_copy_of_optimizer_or_scaler_is_not_hooked() -> None:
    model, optimizer, listener = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    hooks = Hooks(model, {"": optimizer}, {"scaler": scaler}, listener)
    again = pickle.loads(pickle.dumps(scaler))
    both = copy.deepcopy((model, optimizer))
    loss = both[0](torch.ones(1, 3)).sum() * float("inf")
    again.scale(loss).backward()
    again.step(both[1])
    both[1].zero_grad(set_to_none=False)
    assert listener.heard == []
    hooks.remove()


def test_the_state_dict_of_a_hooked_model_is_as_ever() -> None:
    model, optimizer, listener = make()
    names = list(model.state_dict())
    hooks = Hooks(model, {"": optimizer}, {}, listener)
    assert list(model.state_dict()) == names
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    hooks.remove()
