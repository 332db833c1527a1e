"""Every optimizer of torch, every way torch has to run it: checkpoints are the true state.

Runs on the CPU, with the agent as a thread; see identity_kit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import Bag, Training, check, checked_run, open_device, run
from replay_kit import CASES, FLAGS, maker, vary

from gockpt import optim
from gockpt.strategies import POLICIES

Make = Callable[..., Training]


def bag(name: str, flags: dict[str, bool], options: dict[str, Any], **more: Any) -> Make:
    return functools.partial(Bag, make=maker(name, **options, **flags), before=vary, **more)


@pytest.mark.parametrize(("name", "opts", "runs"), CASES)
def test_each_optimizer_with_every_option_and_hyper_parameters_that_change(
    name: str, opts: dict[str, Any], runs: str, tmp_path: Path
) -> None:
    windows = 2 + len(opts) % 3
    checked_run(bag(name, FLAGS[runs], opts), tmp_path, every=windows + 1, windows=windows)


SIXTEEN = [
    (name, runs, dtype)
    for name, runs, dtype in itertools.product(
        optim.KINDS, FLAGS, (torch.bfloat16, torch.float16, torch.float64)
    )
    if runs != "fused" or optim.KINDS[name].fused_cpu
]


@pytest.mark.parametrize(("name", "runs", "dtype"), SIXTEEN)
def test_each_optimizer_in_other_dtypes(
    name: str, runs: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    checked_run(bag(name, FLAGS[runs], {}, dtype=dtype), tmp_path, every=3, windows=3, rounds=1)


@pytest.mark.parametrize("runs", FLAGS)
def test_16_bit_sgd_with_momentum_is_replayed_where_torch_repeats_it(
    runs: str, tmp_path: Path
) -> None:
    make = bag("SGD", FLAGS[runs], {"momentum": 0.9}, dtype=torch.bfloat16)
    refused = "does not repeat in 16 bits" if runs == "fused" else None
    checked_run(make, tmp_path, windows=3, fallback=refused)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("windows", range(1, 9))
def test_any_number_of_windows(device: str, windows: int, tmp_path: Path) -> None:
    with open_device(device) as opened:
        checked_run(Bag, tmp_path, every=8, windows=windows, device=opened)


@pytest.mark.parametrize("every", [1, 3])
def test_intervals_shorter_than_the_windows(every: int, tmp_path: Path) -> None:
    ran = run(Bag(), tmp_path, steps=5 * every, every=every, windows=8)
    check(ran, range(every, 5 * every + 1, every), None)
    assert ran.infos[every].windows == every
    assert max(info.windows for info in ran.infos.values()) == every  # fewer: no slot was free


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("strategy", [name for name, one in POLICIES.items() if one.saves])
def test_every_strategy_saves_the_true_state(strategy: str, device: str, tmp_path: Path) -> None:
    with open_device(device) as opened:
        several = POLICIES[strategy].max_windows > 1
        ran = checked_run(
            Bag, tmp_path, every=4, windows=3 if several else None, strategy=strategy, device=opened
        )
    assert {info.strategy for info in ran.infos.values()} == {strategy}
    assert {info.windows for info in ran.infos.values()} == {3 if several else 1}


@pytest.mark.parametrize("agent", ["thread", "process"])
def test_both_kinds_of_agent(agent: str, tmp_path: Path) -> None:
    checked_run(Bag, tmp_path, windows=3, agent=agent)


@pytest.mark.parametrize("fused", [False, True])
def test_a_learning_rate_held_in_a_tensor(fused: bool, tmp_path: Path) -> None:
    def halve(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)

    make = maker("AdamW", lr=torch.tensor(0.1), fused=fused)
    checked_run(functools.partial(Bag, make=make, before=halve), tmp_path)


def test_groups_of_their_own_options(tmp_path: Path) -> None:
    def grouped(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [
            {"params": params[:2], "lr": 0.1, "weight_decay": 0.3},
            {"params": params[2:5], "betas": (0.5, 0.6), "amsgrad": True},
            {"params": params[5:], "fused": False, "foreach": True, "maximize": True},
        ]
        return torch.optim.AdamW(groups, lr=0.01, fused=True)

    checked_run(functools.partial(Bag, make=grouped, before=vary), tmp_path)
