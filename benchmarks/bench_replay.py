"""Replay against torch's own fused AdamW on plain tensors of the same size, in one run.

    python -m pytest benchmarks/bench_replay.py

The rates are of parameter updates. What counts is the ratio, printed at the end: machines differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gockpt.recipe import take_recipe
from gockpt.replay import Replayer

PARAMS = 16 * 1024 * 1024
"""Three tensors of this many fp32 numbers do not fit in any cache."""

ROUNDS = 15


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def plain(params: int, grad_dtype: torch.dtype) -> Callable[[], None]:
    """One fused update of one large tensor, after the upcast that training in 16 bits makes."""
    param = torch.randn(params)
    optimizer = torch.optim.AdamW([param], lr=1e-3, fused=True)
    given = torch.randn(params).to(grad_dtype)
    param.grad = given.float()
    optimizer.step()  # creates the state

    def update() -> None:
        if given.dtype != param.dtype:
            param.grad.copy_(given)  # type: ignore[union-attr]
        optimizer.step()

    return update


def replayed(params: int, grad_dtype: torch.dtype, blocks: int = 8) -> Callable[[], None]:
    """The same update replayed over blocks of a slot."""
    slot = {"param": torch.randn(params)}
    slot |= {key: torch.zeros(params) for key in ("exp_avg", "exp_avg_sq")}
    grad = torch.randn(params).to(grad_dtype)
    replayer = Replayer([("AdamW", 1)], threads=torch.get_num_threads())
    items: list[tuple[int, Tensor]] = []
    for start in range(0, params, params // blocks):
        part = slice(start, start + params // blocks)
        block = replayer.add(
            optimizer=0,
            group=0,
            param=slot["param"][part],
            state={key: slot[key][part] for key in ("exp_avg", "exp_avg_sq")},
            reserved={},
            scalars={"step": torch.tensor(1.0)},
        )
        items.append((block, grad[part]))
    update, _ = take_recipe(torch.optim.AdamW([torch.zeros(1)], lr=1e-3, fused=True))
    return lambda: replayer.apply(0, update, items)


@pytest.mark.parametrize("grad", ["float32", "bfloat16"])
def test_replay_rate(benchmark, grad: str) -> None:  # type: ignore[no-untyped-def]
    work = replayed(PARAMS, getattr(torch, grad))
    benchmark.pedantic(work, rounds=5, warmup_rounds=1)
    benchmark.extra_info["parameters_per_s"] = PARAMS / benchmark.stats.stats.median


@pytest.mark.parametrize("grad", ["float32", "bfloat16"])
def test_plain_rate(benchmark, grad: str) -> None:  # type: ignore[no-untyped-def]
    benchmark.pedantic(plain(PARAMS, getattr(torch, grad)), rounds=5, warmup_rounds=1)
    benchmark.extra_info["parameters_per_s"] = PARAMS / benchmark.stats.stats.median


@pytest.mark.parametrize("grad", ["float32", "bfloat16"])
def test_replay_is_at_least_four_fifths_of_torchs_own(grad: str) -> None:
    """Measured in turns; the best of each counts, as other load on the machine only ever slows."""
    dtype = getattr(torch, grad)
    ours, theirs = replayed(PARAMS, dtype), plain(PARAMS, dtype)
    ours()
    times = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS)]
    best = min(ours for ours, _ in times)
    ratio = min(theirs for _, theirs in times) / best
    print(f"\n{grad} gradients: {PARAMS / best / 1e9:.2f} G/s, {ratio:.2f} of torch's fused AdamW")
    assert ratio >= 0.8


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
