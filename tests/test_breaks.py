"""What breaks the assumption of several windows: the same step is taken in one, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import (
    Bag,
    Training,
    check,
    checkpointer,
    expect_taken,
    one_pass,
    open_device,
    run,
    truth,
)
from torch import nn

import gockpt


class Meddling(Bag):
    """Does something between two passes, once."""

    def __init__(self, seed: int = 0, *, at: int = 0, what: str = "") -> None:
        super().__init__(seed)
        self.at, self.what = at, what

    def between(self, step: int) -> None:
        if step == self.at:
            with torch.no_grad():
                getattr(self, self.what)()

    def a_parameter_changed(self) -> None:
        self.bag.list[0].mul_(0.5)

    def state_changed(self) -> None:
        self.optimizer.state[self.bag.list[0]]["exp_avg"].zero_()

    def state_replaced(self) -> None:
        state = self.optimizer.state[self.bag.list[0]]
        state["exp_avg"] = state["exp_avg"] * 2

    def a_state_dict_loaded(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def the_models_state_dict_loaded(self) -> None:
        self.model.load_state_dict({k: v * 2 for k, v in self.model.state_dict().items()})

    def memory_replaced(self) -> None:
        self.bag.list[0].data = self.bag.list[0].data * 2

    def a_group_added(self) -> None:
        extra = nn.Parameter(torch.randn(70))
        self.bag.list.append(extra)
        self.optimizer.add_param_group({"params": [extra]})

    def a_parameter_replaced(self) -> None:
        old, new = self.bag.list[0], nn.Parameter(torch.randn(17, 65))
        self.bag.list[0] = new
        self.optimizer.param_groups[0]["params"][0] = new
        self.optimizer.state.pop(old)

    def state_cleared(self) -> None:
        self.optimizer.state.clear()


BREAKS = {
    "a_parameter_changed": "'list.0' was changed outside",
    "state_changed": "was changed outside",
    "state_replaced": "replaced outside",
    "a_state_dict_loaded": "replaced outside",
    "the_models_state_dict_loaded": "was changed outside",
    "memory_replaced": "was replaced outside",
    "a_group_added": "",
    "a_parameter_replaced": "was replaced",
    "state_cleared": "",
}


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("at", [5, 6, 7])
@pytest.mark.parametrize("what", BREAKS)
def test_a_break_inside_the_windows(what: str, at: int, device: str, tmp_path: Path) -> None:
    # Windows of step 8 open after steps 5, 6, 7 and 8.
    training = Meddling(at=at, what=what)
    with open_device(device) as opened:
        ran = run(training, tmp_path, steps=8, every=8, windows=4, device=opened)
    check(ran, [8], None)
    expect_taken(ran.infos[8], 1, BREAKS[what], what)


@pytest.mark.parametrize("what", BREAKS)
def test_a_break_outside_of_the_windows_is_none(what: str, tmp_path: Path) -> None:
    training = Meddling(at=3, what=what)
    ran = run(training, tmp_path, steps=8, every=8, windows=3)
    check(ran, [8], None)
    expect_taken(ran.infos[8], 3, None, what)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("what", BREAKS)
@pytest.mark.parametrize("windows", [1, 3])
def test_a_break_in_the_last_window(windows: int, what: str, device: str, tmp_path: Path) -> None:
    """The target has passed: the state as it was then is saved, or nothing, with an error."""
    training = Meddling(at=4, what=what)
    with open_device(device) as opened:
        ran = run(
            training, tmp_path, steps=8, every=4, windows=windows, device=opened, on_error="warn"
        )
    check(ran, [8], None)
    if "failed" not in ran.events:
        check(ran, [4], None)


def test_several_windows_are_tried_again_when_the_cause_has_ended(tmp_path: Path) -> None:
    training = Meddling(at=7, what="a_parameter_changed")
    written = lambda ckpt, training, step: ckpt.wait(60)  # noqa: E731 - a slot is always free
    ran = run(training, tmp_path, steps=40, every=4, windows=3, after=written)
    check(ran, range(4, 41, 4), lambda: Bag(3))
    windows = [ran.infos[step].windows for step in range(4, 41, 4)]
    assert windows[:2] == [3, 1]
    assert windows[-3:] == [3, 3, 3]
    assert ran.events["fallbacks"] == 1


def test_two_updates_in_a_pass_are_refused(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=3) as ckpt:
        one_pass(ckpt, training, 1)
        training.compute(2)
        with pytest.raises(gockpt.ConfigError, match="two updates"):
            training.optimizer.step()


def test_the_end_of_training_inside_the_windows(tmp_path: Path) -> None:
    for steps in range(2, 6):
        path = tmp_path / str(steps)
        ran = run(Bag(), path, steps=steps, every=5, windows=4)
        check(ran, [steps], lambda: Bag(4))


def test_the_end_in_the_middle_of_a_pass_saves_nothing_new(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=3) as ckpt:
        for step in range(1, 4):
            one_pass(ckpt, training, step)
            ckpt.step()
        one_pass(ckpt, training, 4)
    assert not list(tmp_path.glob("step-*"))


def test_a_restore_inside_the_windows(tmp_path: Path) -> None:
    training: Training = Bag()
    moments: dict[int, Any] = {}
    with checkpointer(training, tmp_path, every=4, windows=3) as ckpt:
        for step in (1, 2, 3, 4, 5, 6, 7):
            one_pass(ckpt, training, step)
            moments[step] = truth(training)
            ckpt.step()
        restored = ckpt.restore()
        assert restored is not None
        assert restored.step == ckpt.current_step == 4
        for name, value in truth(training).items():
            assert torch.equal(value, moments[4][name])
        for step in (5, 6, 7, 8):
            one_pass(ckpt, training, step)
            if step in moments:
                for name, value in truth(training).items():
                    assert torch.equal(value, moments[step][name])
            ckpt.step()
    assert gockpt.open(tmp_path).step == 8
