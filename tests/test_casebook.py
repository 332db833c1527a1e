"""What users of other checkpoint engines suffered, and cannot suffer here.

Each test is one kind of case that has no place in the tests of a single part.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from identity_kit import (
    Bag,
    Training,
    assert_same,
    check,
    check_restored,
    checkpointer,
    fused_adamw,
    one_pass,
    open_device,
    run,
    same_tree,
    truth,
)
from torch import Tensor, nn

import gockpt
from gockpt.agent.job import Job
from gockpt.storage import fs, writer

DEADLINE = 200.0


# -- a checkpoint that holds later values, or mixes steps ------------------------------------------


@pytest.mark.parametrize("windows", [1, 3])
def test_values_written_right_after_a_save_are_not_in_it(windows: int, tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, windows=windows) as ckpt:
        handle = ckpt.save()
        while ckpt.current_step < handle.step:
            one_pass(ckpt, training, ckpt.current_step + 1)
            ckpt.step()
        expected = truth(training)
        handle.wait(DEADLINE)
        with torch.no_grad():
            for param in training.model.parameters():
                param.fill_(7)
        training.optimizer.param_groups[0]["lr"] = 99.0
    found = gockpt.open(tmp_path, handle.step)
    assert_same(found.load(), expected, "saved")
    other = Bag(3)
    with checkpointer(other, tmp_path) as ckpt:
        ckpt.restore()
    assert other.optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("how", ["zero_", "mul_", "data"])
def test_gradients_that_are_written_by_hand_while_they_are_copied(how: str, tmp_path: Path) -> None:
    """On a slow link, where the copy is sure to come later than the write."""

    class ByHand(Bag):
        def update(self, step: int) -> None:
            self.optimizer.step()
            for param in self.model.parameters():
                if param.grad is not None:
                    target = param.grad.data if how == "data" else param.grad
                    target.mul_(0.5) if how == "mul_" else target.zero_()

        def compute(self, step: int) -> None:
            if how == "mul_":
                self.optimizer.zero_grad()
            super().compute(step)

    training = ByHand()
    with open_device("emulated", slowness=200_000) as device:
        ran = run(training, tmp_path, steps=8, every=4, windows=3, device=device, on_error="warn")
    good = [step for step in (4, 8) if list(tmp_path.glob(f"step-{step:09d}-*"))]
    check(ran, good, None)
    if how != "data":  # counted by torch: noticed in time, and no step is missing
        assert good == [4, 8]
    assert ran.events


def test_what_a_user_holds_of_one_checkpoint_is_not_touched_by_the_next(tmp_path: Path) -> None:
    training = Bag()
    ran = run(training, tmp_path, steps=2, every=2, windows=1)
    held = gockpt.open(tmp_path, 2).load()
    with checkpointer(training, tmp_path, every=1, windows=1) as ckpt:
        ckpt.restore()
        for step in range(3, 8):
            one_pass(ckpt, training, step)
            ckpt.step()
    assert_same(held, ran.moments[2].tensors, "held")


def test_saving_in_the_middle_of_accumulation_saves_the_next_optimizer_step(
    tmp_path: Path,
) -> None:
    training = Bag(set_to_none=False)
    with checkpointer(training, tmp_path, windows=1) as ckpt:
        for micro in range(1, 9):
            training.compute(micro)
            if micro == 2:
                handle = ckpt.save()
            if micro % 4 == 0:
                training.update(micro)
            ckpt.step()
            if micro == 4:
                expected = truth(training)
        assert handle.step == 1
        path = handle.wait(DEADLINE)
    assert_same(gockpt.open(path).load(), expected, "at the optimizer step")


# -- memory, threads, descriptors ------------------------------------------------------------------


def test_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    training = Bag(shapes=((512, 513), (77,)))
    me = psutil.Process()
    seen: list[tuple[int, int]] = []
    with checkpointer(training, tmp_path, every=1, windows=1, keep=2) as ckpt:
        for step in range(1, 81):
            one_pass(ckpt, training, step)
            ckpt.step()
            if step in (20, 80):
                ckpt.wait(DEADLINE)
                gc.collect()
                seen.append((me.memory_info().rss, len(gc.get_objects())))
    image = 3 * 512 * 513 * 4
    assert seen[1][0] - seen[0][0] < 10 * image  # of sixty; the allocator breathes a little
    assert seen[1][1] - seen[0][1] < 1000


def test_the_trainers_threads_neither_hash_nor_write_nor_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[str, str]] = set()

    def spy(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            seen.add((name, threading.current_thread().name))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, spied)

    spy(Job, "work")
    spy(fs, "pwrite_all")
    spy(writer, "new_digest")
    run(Bag(), tmp_path, steps=8, every=4, windows=3)
    assert {name for name, _ in seen} == {"work", "pwrite_all", "new_digest"}
    trainers = {"MainThread", "gockpt-outbox", "gockpt-inbox"}
    assert not {thread for _, thread in seen} & trainers


# -- what is in the state --------------------------------------------------------------------------


class Twins(nn.Module):
    """Several parameters of one shape: positions would mix them up."""

    def __init__(self, order: str) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(len(order))
        for name in order:
            self.register_parameter(name, nn.Parameter(torch.randn(5, 70, generator=rng)))


class TwinLoop(Training):
    def __init__(self, order: str, groups: Callable[[nn.Module], list[dict[str, Any]]]) -> None:
        self.model = Twins(order)
        self.optimizers = {"": torch.optim.AdamW(groups(self.model), lr=0.1, fused=True)}

    def compute(self, step: int) -> None:
        for number, name in enumerate("abcd"):
            rng = torch.Generator().manual_seed(10 * step + number)
            param = getattr(self.model, name)
            param.grad = torch.randn(param.shape, generator=rng)


def by_decay(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": [model.a, model.b], "weight_decay": 0.5, "lr": 0.3},
        {"params": [model.c, model.d], "weight_decay": 0.0},
    ]


def by_decay_reordered(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": [model.d, model.c], "weight_decay": 0.1},
        {"params": [model.b, model.a], "weight_decay": 0.1},
    ]


def test_moments_and_options_follow_their_names_through_any_reordering(tmp_path: Path) -> None:
    saved = TwinLoop("abcd", by_decay)
    run(saved, tmp_path, steps=4, every=4, windows=3)
    other = TwinLoop("dbca", by_decay_reordered)
    with checkpointer(other, tmp_path) as ckpt:
        ckpt.restore()
    assert_same(truth(other), truth(saved), "by name")
    assert [g["weight_decay"] for g in other.optimizers[""].param_groups] == [0.0, 0.5]
    assert [g["lr"] for g in other.optimizers[""].param_groups] == [0.1, 0.3]
    for step in (5, 6):
        for loop in (saved, other):
            loop.compute(step)
            loop.update(step)
    assert_same(truth(other), truth(saved), "and goes on so")


def test_groups_that_cannot_be_told_apart_any_more_are_refused(tmp_path: Path) -> None:
    saved = TwinLoop("abcd", by_decay)
    run(saved, tmp_path, steps=2, every=2, windows=1)
    merged = TwinLoop("abcd", lambda model: [{"params": list(model.parameters())}])
    before = truth(merged)
    with (
        checkpointer(merged, tmp_path) as ckpt,
        pytest.raises(gockpt.StateError, match="different options"),
    ):
        ckpt.restore()
    assert_same(truth(merged), before, "untouched")


class Pair(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one = nn.Linear(9, 9, bias=False)
        self.two = nn.Linear(9, 9, bias=False)
        if tied:
            self.two.weight = self.one.weight


class PairLoop(Training):
    def __init__(self, seed: int = 0, *, tied: bool) -> None:
        torch.manual_seed(seed)
        self.model = Pair(tied)
        self.optimizers = {"": fused_adamw(self.model.parameters())}

    def compute(self, step: int) -> None:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(4, 9, generator=rng)
        self.model.two(self.model.one(x)).square().sum().backward()  # type: ignore[operator]


def test_weights_that_are_tied_only_now_are_refused_if_they_differ(tmp_path: Path) -> None:
    run(PairLoop(tied=False), tmp_path, steps=2, every=2, windows=2)
    tied = PairLoop(3, tied=True)
    before = truth(tied)
    with (
        checkpointer(tied, tmp_path) as ckpt,
        pytest.raises(gockpt.StateError, match=r"'model.one.weight'.*tied"),
    ):
        ckpt.restore()
    assert_same(truth(tied), before, "untouched")


def test_weights_of_a_tied_model_go_into_an_untied_one(tmp_path: Path) -> None:
    saved = PairLoop(tied=True)
    run(saved, tmp_path, steps=2, every=2, windows=2)
    other = PairLoop(3, tied=False)
    with checkpointer(other, tmp_path) as ckpt:
        ckpt.restore()
    weight = saved.model.one.weight  # type: ignore[union-attr]
    assert torch.equal(other.model.one.weight, weight)  # type: ignore[union-attr, arg-type]
    assert torch.equal(other.model.two.weight, weight)  # type: ignore[union-attr, arg-type]


def test_a_checkpoint_that_has_more_than_the_model_is_refused(tmp_path: Path) -> None:
    run(Bag(shapes=((17, 65), (130,))), tmp_path, steps=2, every=2, windows=1)
    smaller = Bag(3, shapes=((17, 65),))
    before = truth(smaller)
    with (
        checkpointer(smaller, tmp_path) as ckpt,
        pytest.raises(gockpt.StateError, match=r"model\.list\.1"),
    ):
        ckpt.restore()
    assert_same(truth(smaller), before, "untouched")


class Nested(torch.optim.Optimizer):
    """State of the kinds that unknown optimizers keep."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["by_dim"] = {dim: torch.ones(size) for dim, size in enumerate(param.shape)}
                state["pair"] = (torch.zeros(3), torch.ones(()))
                state["history"] = [torch.zeros(2), 5, None]
                state["empty"] = {}
                state["nothing"] = None
                state["flags"] = (True, "text", 1.5)
            for factor in state["by_dim"].values():
                factor.mul_(1.5)
            state["pair"][0].add_(1)
            state["history"][0].sub_(1)
            state["history"][1] += 1
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("trained", [False, True])
def test_nested_state_comes_back_with_its_structure(trained: bool, tmp_path: Path) -> None:
    def make(seed: int) -> Bag:
        return Bag(seed, make=Nested, shapes=((17, 5), (130,)))

    saved, other = make(0), make(3)
    run(saved, tmp_path, steps=2, every=2, windows=1)
    if trained:
        for step in (1, 2, 3):
            other.compute(step)
            other.update(step)
    with checkpointer(other, tmp_path) as ckpt:
        ckpt.restore()
    for one, two in zip(saved.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
        found, expected = other.optimizer.state[two], saved.optimizer.state[one]
        assert same_tree(dict(found), dict(expected)), (found, expected)


def test_no_state_yet_is_restored_as_no_state(tmp_path: Path) -> None:
    """A parameter that has had no gradient when it was saved; the other training's had."""
    make = Bag(absent=lambda step, number: number == 0)
    ran = run(make, tmp_path, steps=2, every=2, windows=2)
    other = Bag(3)
    for step in (1, 2):
        other.compute(step)
        other.update(step)
    check_restored(ran, 2, other)
    assert other.bag.list[0] not in other.optimizer.state


def test_averaged_copies_of_the_model_are_no_part_of_it(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=3) as ckpt:
        average = copy.deepcopy(training.model)
        for step in range(1, 5):
            one_pass(ckpt, training, step)
            with torch.no_grad():
                for mean, param in zip(
                    average.parameters(), training.model.parameters(), strict=True
                ):
                    mean.lerp_(param, 0.5)
            average.zero_grad(set_to_none=False)
            ckpt.step()
        expected = truth(training)
    found = gockpt.open(tmp_path, 4)
    assert (found.info.windows, found.info.fallback) == (3, None)
    assert_same(found.load(), expected, "saved")


# -- the end of the process ------------------------------------------------------------------------

SCRIPT = """
    import sys, torch, gockpt, gockpt.faults
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ckpt = gockpt.Checkpointer(
        model, optimizer, sys.argv[1], every=3, windows=3, agent=sys.argv[2],
        faults=[gockpt.faults.Fault(point=point, action="errno:EIO") for point in sys.argv[3:]],
    )
    for _ in range(3):
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    print(float(model.weight.double().sum()).hex())
"""


def test_a_script_that_ends_right_after_the_save(tmp_path: Path) -> None:
    """Neither ``with`` nor ``close``: what was promised is written all the same."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    running = {
        agent: subprocess.Popen(
            [*command, str(tmp_path / agent), agent], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for agent in ("process", "thread")
    }
    for agent, process in running.items():
        out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, err.decode()
        found = gockpt.open(tmp_path / agent, 3)
        assert found.verify() == []
        assert float(found.tensor("model.weight").double().sum()).hex() == out.decode().strip()


def test_a_script_whose_last_save_fails_does_not_end_well(tmp_path: Path) -> None:
    """Nobody is left who could catch the error: the exit status is all that is seen."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), tmp_path, "process", "fs.fdatasync"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1
    assert "gockpt: the last checkpoint failed: cannot sync" in done.stderr
    assert done.stdout, "what was printed before is not lost"
    with pytest.raises(gockpt.NoCheckpointError):
        gockpt.open(tmp_path)
