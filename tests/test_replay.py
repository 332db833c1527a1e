"""Replaying blocks from their own versions on gives the bits of the real state."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_kit import (
    CASES,
    FLAGS,
    Training,
    blocks_of,
    cut,
    maker,
    replay_and_compare,
    same_bits,
    vary,
)
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gockpt import optim
from gockpt.errors import StateError
from gockpt.recipe import take_recipe
from gockpt.replay import BATCH, PIECE, Replayer
from gockpt.state import CUT, flatten


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPES = [(1,), (), (0,), (0, 5), (63,), (3, 64), (50, 27), (4096 + 17,)]


@pytest.mark.parametrize(("name", "options", "runs"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_replay_gives_the_bits_of_the_real_update(
    name: str, options: dict[str, Any], runs: str, dtype: str
) -> None:
    training = Training(
        maker(name, **options, **FLAGS[runs]),
        SHAPES,
        dtype=getattr(torch, dtype),
        before=vary,
        # One never has a gradient in even steps, one has its first in step 3.
        absent=absences(name, runs, options),
    )
    group = training.optimizer.param_groups[0]
    reasons = {
        optim.obstacle(training.optimizer, group, param, allow_slow=True)
        for param in training.params
    }
    if name == "SGD" and runs == "fused" and options.get("momentum") and "16" in dtype:
        assert reasons == {"torch's fused SGD with momentum does not repeat in 16 bits"}
        return
    assert reasons == {None}
    replay_and_compare(training, blocks_of(training, CUT, 17 * CUT))


def absences(name: str, runs: str, options: dict[str, Any]) -> Callable[[int, int], bool]:
    late = 3
    if name == "SGD" and runs == "fused" and options.get("momentum"):
        # torch itself fails where only some of a group's parameters have their momentum.
        late = 0
    return lambda step, param: (param == 5 and step % 2 == 1) or (param == 6 and step < late)


@pytest.mark.parametrize("runs", FLAGS)
@pytest.mark.parametrize("threads", [1, 2])
def test_large_parameters_in_pieces_and_batches(runs: str, threads: int) -> None:
    """Trained on two threads; the replay's bits do not depend on how many it has."""
    torch.set_num_threads(2)
    size = BATCH + PIECE // 2 + 17
    training = Training(maker("AdamW", **FLAGS[runs]), [(size,)], steps=2)
    replay_and_compare(training, [(0, 0, 640, 1), (0, 640, size, 0)], threads=threads)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_cut_any_versions_any_absence(data: st.DataObject) -> None:
    name, options, runs = data.draw(st.sampled_from([case.values for case in CASES]))
    steps = data.draw(st.integers(1, 6))
    shapes = data.draw(st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=3))
    gaps = data.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 2))))
    if name == "SGD" and runs == "fused":
        gaps = {gap for gap in gaps if gap[0] > 0}
    training = Training(
        maker(name, **options, **FLAGS[runs]),
        [tuple(shape) for shape in shapes],
        steps=steps,
        before=vary,
        absent=lambda step, param: (step, param) in gaps,
    )
    blocks = []
    for index, param in enumerate(training.params):
        most = param.numel() // CUT
        cuts = data.draw(st.sets(st.integers(1, most), max_size=4)) if most else set()
        for start, stop in cut(param.numel(), *(CUT * c for c in sorted(cuts))):
            blocks.append((index, start, stop, data.draw(st.integers(0, steps))))
    replay_and_compare(training, blocks)


def test_groups_with_their_own_options() -> None:
    def make(params: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": params[:2], "weight_decay": 0.3, "name": "decay"},
                {"params": params[2:], "lr": 0.5, "amsgrad": True, "foreach": False},
            ],
            fused=None,
            foreach=True,
        )

    training = Training(make, [(300,), (7,), (300,), (65,)], before=vary)
    assert [g.implementation for g in training.recipes[0].groups if g] == ["foreach", "forloop"]
    replay_and_compare(training, blocks_of(training, 64))


def test_channels_last_parameters_are_replayed_in_memory_order() -> None:
    rng = torch.Generator().manual_seed(0)
    param = torch.randn(8, 4, 3, 3, generator=rng).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW([param], fused=True)
    start, recipes, grads = flatten(param).clone(), [], []
    for _ in range(3):
        param.grad = torch.randn(param.shape, generator=rng).to(memory_format=torch.channels_last)
        assert optim.obstacle(optimizer, optimizer.param_groups[0], param) is None
        assert optim.gradient_obstacle(param, param.grad) is None
        recipes.append(take_recipe(optimizer)[0])
        grads.append(flatten(param.grad).clone())
        optimizer.step()
    replayer = Replayer([("AdamW", 1)], threads=1)
    moments = {key: torch.zeros_like(start) for key in ("exp_avg", "exp_avg_sq")}
    block = replayer.add(optimizer=0, group=0, param=start, state={}, reserved=moments, scalars={})
    for recipe, grad in zip(recipes, grads, strict=True):
        replayer.apply(0, recipe, [(block, grad)])
    assert same_bits(start, flatten(param))
    assert same_bits(moments["exp_avg"], flatten(optimizer.state[param]["exp_avg"]))


@pytest.mark.parametrize("threads", [1, 2])
def test_16_bit_loops_shared_by_threads(threads: int) -> None:
    torch.set_num_threads(2)
    make = maker("Adam", weight_decay=0.1, foreach=False)
    training = Training(make, [(2 * 64_000,)], steps=3, dtype=torch.bfloat16)
    assert (
        optim.obstacle(training.optimizer, training.optimizer.param_groups[0], training.params[0])
        is None
    )
    replay_and_compare(training, blocks_of(training, 64 * 700, 64 * 1501), threads=threads)


@pytest.mark.parametrize("runs", FLAGS)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_gradients_sent_in_16_bits_are_widened(runs: str, narrow: torch.dtype) -> None:
    training = Training(maker("AdamW", **FLAGS[runs]), [(PIECE + 70,), (130,)], narrow=narrow)
    replay_and_compare(training, blocks_of(training, 64), narrow=narrow)


def test_a_gradient_that_would_not_widen_exactly_is_refused() -> None:
    replayer, block = one_block("SGD", torch.zeros(64, dtype=torch.float16))
    update = take_recipe(torch.optim.SGD([torch.zeros(64)]))[0]
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(StateError, match="does not widen"):
            replayer.apply(0, update, [(block, torch.zeros(64, dtype=dtype))])


def one_block(name: str, param: Tensor, **reserved: Tensor) -> tuple[Replayer, int]:
    replayer = Replayer([(name, 1)], threads=1)
    block = replayer.add(optimizer=0, group=0, param=param, state={}, reserved=reserved, scalars={})
    return replayer, block


def scale(optimizer: Any, step: int) -> None:
    """What GradScaler does with a fused optimizer; in step 2 it found an infinity."""
    vary(optimizer, step)
    optimizer.grad_scale = torch.tensor(2.0**step)
    optimizer.found_inf = torch.tensor(1.0 if step == 2 else 0.0)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_scaled_and_skipped_updates_of_fused_optimizers(name: str) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {}
    training = Training(maker(name, fused=True, **options), [(300,), ()], before=scale)
    assert [recipe.skipped for recipe in training.recipes] == [False, False, True, False, False]
    assert same_bits(training.versions[2][0]["param"], training.versions[3][0]["param"])
    replay_and_compare(training, blocks_of(training, 64, 128))


def test_a_first_update_that_is_skipped_creates_the_state_of_adam() -> None:
    def before(optimizer: Any, step: int) -> None:
        scale(optimizer, step + 2)

    training = Training(maker("Adam", fused=True), [(300,)], steps=2, before=before)
    assert training.recipes[0].skipped
    replay_and_compare(training, blocks_of(training))


def test_fused_sgd_that_skips_its_first_update_is_refused() -> None:
    """torch leaves the momentum uninitialised then, so there is nothing to compare with."""
    optimizer: Any = torch.optim.SGD([torch.zeros(64)], momentum=0.9, fused=True)
    optimizer.found_inf = torch.tensor(1.0)
    replayer, block = one_block("SGD", torch.zeros(64), momentum_buffer=torch.zeros(64))
    with pytest.raises(StateError, match="very first update"):
        replayer.apply(0, take_recipe(optimizer)[0], [(block, torch.ones(64))])


@pytest.mark.parametrize("runs", ["forloop", "fused"])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_in_a_tensor(runs: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def before(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.3 / (step + 1))

    lr = torch.ones(shape, dtype=dtype)
    training = Training(maker("AdamW", lr=lr, **FLAGS[runs]), [(300,), ()], before=before)
    replay_and_compare(training, blocks_of(training, 64))


def test_amsgrad_and_momentum_that_are_switched_off_leave_their_state_alone() -> None:
    def before(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            if "amsgrad" in group:
                group["amsgrad"] = step < 2
            else:
                group["momentum"] = 0.9 if step < 2 else 0.0

    for make in (maker("Adam", amsgrad=True), maker("SGD", momentum=0.9)):
        training = Training(make, [(300,)], before=before)
        replay_and_compare(training, blocks_of(training, 64, 128, 192))


def test_state_for_which_there_is_no_room_is_refused() -> None:
    """Momentum switched on within a window: the image has no place for it."""
    update = take_recipe(torch.optim.SGD([torch.zeros(64)], momentum=0.9))[0]
    replayer, block = one_block("SGD", torch.zeros(64))
    with pytest.raises(StateError, match="created state 'momentum_buffer'"):
        replayer.apply(0, update, [(block, torch.ones(64))])


def test_two_optimizers_with_blocks_of_their_own() -> None:
    first = Training(maker("AdamW", fused=True), [(200,)])
    second = Training(maker("SGD", momentum=0.9), [(200,)])
    replayer = Replayer([("AdamW", 1), ("SGD", 1)], threads=1)
    slots = []
    for index, training in enumerate((first, second)):
        slot = {"param": training.versions[0][0]["param"].clone()}
        keys = ("exp_avg", "exp_avg_sq") if index == 0 else ("momentum_buffer",)
        reserved = {key: torch.zeros(200) for key in keys}
        number = replayer.add(
            optimizer=index, group=0, param=slot["param"], state={}, reserved=reserved, scalars={}
        )
        assert number == index
        slots.append(slot | reserved)
    for step in range(len(first.recipes)):
        for index, training in enumerate((first, second)):
            grad = training.grads[step][0]
            assert grad is not None
            replayer.apply(index, training.recipes[step], [(index, grad.clone())])
    for slot, training in zip(slots, (first, second), strict=True):
        for key, value in slot.items():
            assert same_bits(value, training.versions[-1][0][key])
    with pytest.raises(StateError, match="does not belong to block 1"):
        replayer.apply(0, first.recipes[0], [(1, torch.zeros(200))])


def test_pieces_with_different_steps_do_not_agree() -> None:
    param = torch.zeros(2 * PIECE)
    moments = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
    replayer, block = one_block("Adam", param, **moments)
    replayer.apply(0, take_recipe(torch.optim.Adam([param]))[0], [(block, torch.ones_like(param))])
    assert replayer.scalars(block) == {"step": torch.tensor(1.0)}
    replayer._blocks[block].pieces[1].state["step"] += 1
    with pytest.raises(StateError, match="differ in their 0-dim state"):
        replayer.scalars(block)


def test_replay_runs_no_hooks_and_imports_no_compiler() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a replay is nobody's update")

    handle = register_optimizer_step_pre_hook(fail)
    try:
        replayer, block = one_block("SGD", param := torch.zeros(64))
        update = take_recipe(torch.optim.SGD([torch.zeros(64)], lr=1.0))[0]
        replayer.apply(0, update, [(block, torch.ones(64))])
    finally:
        handle.remove()
    assert torch.equal(param, -torch.ones(64))
    recipe = msgspec.msgpack.encode(take_recipe(torch.optim.AdamW([torch.zeros(64)]))[0])
    program = (
        "import msgspec, sys, torch\n"
        "from gockpt.recipe import OptimizerUpdate\n"
        "from gockpt.replay import Replayer\n"
        "zeros = lambda: torch.zeros(64)\n"
        "replayer = Replayer([('AdamW', 1)], threads=1)\n"
        "block = replayer.add(optimizer=0, group=0, param=zeros(), state={}, scalars={},\n"
        "                     reserved={'exp_avg': zeros(), 'exp_avg_sq': zeros()})\n"
        f"update = msgspec.msgpack.decode({recipe!r}, type=OptimizerUpdate)\n"
        "replayer.apply(0, update, [(block, zeros())])\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=200, check=False).returncode == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda training: training.grads.__setitem__(2, [None]),
        lambda training: training.recipes.__setitem__(2, training.recipes[1]),
        lambda training: training.grads[2][0].__setitem__(7, 0.0),
        lambda training: training.versions.__setitem__(1, training.versions[2]),
    ],
    ids=["gradient dropped", "recipe of another step", "one gradient value", "one version late"],
)
def test_a_wrong_replay_is_seen_by_the_comparison(damage: Callable[[Training], Any]) -> None:
    training = Training(maker("AdamW", fused=True), [(300,)], before=vary)
    replay_and_compare(training, [(0, 0, 300, 1)])
    damage(training)
    with pytest.raises(AssertionError):
        replay_and_compare(training, [(0, 0, 300, 1)])


def test_blocks_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(StateError, match="exp_avg"):
        one_block("Adam", torch.zeros(64), exp_avg=torch.zeros(63))
    replayer, block = one_block("Adam", torch.zeros(64))
    update = take_recipe(torch.optim.Adam([torch.zeros(64)]))[0]
    with pytest.raises(StateError, match="does not belong"):
        replayer.apply(0, update, [(block, torch.zeros(63))])
    other = take_recipe(torch.optim.SGD([torch.zeros(64)]))[0]
    with pytest.raises(StateError, match="a recipe of SGD"):
        replayer.apply(0, other, [(block, torch.zeros(64))])
    with pytest.raises(StateError, match="LBFGS is no optimizer"):
        one_block("LBFGS", torch.zeros(64))


def test_a_recipe_without_the_blocks_group_is_refused() -> None:
    replayer, block = one_block("SGD", torch.zeros(64))
    update = take_recipe(torch.optim.SGD([torch.zeros(64)]), groups=[])[0]
    with pytest.raises(StateError, match="lacks group 0"):
        replayer.apply(0, update, [(block, torch.zeros(64))])
