"""How many real tokens fit into a part of an emulated step. Before the first step only."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from gockpt.errors import ConfigError
from gockpt.workloads.build import Workload

CANDIDATES = (4, 8, 16, 32, 64)
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RealTokens:
    """A number of tokens, and the seconds that one pass over them takes here."""

    tokens: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def measure_real_tokens(workload: Workload, budget_s: float) -> RealTokens:
    """The most tokens of :data:`CANDIDATES` whose forward and backward stay within ``budget_s``.

    If not even the fewest do, those are returned all the same: compare ``seconds``. Weights, data
    position and random state are left as they were. The answer depends on this machine at this
    moment, so runs that are to be compared must be given *one* answer (``build(tokens=…)``).
    """
    if budget_s <= 0:
        raise ConfigError(f"a budget of {budget_s} s fits no step; give a positive time")
    best = measure(workload, CANDIDATES[0])
    for tokens in CANDIDATES[1:]:
        if best.seconds > budget_s or tokens > workload.built.context:
            break
        longer = measure(workload, tokens)
        if longer.seconds > budget_s:
            break
        best = longer
    return best


def measure(workload: Workload, tokens: int) -> RealTokens:
    """The slowest of a few passes over one sequence of this many tokens, after a warm-up."""
    batch = torch.zeros(1, tokens, dtype=torch.int64, device=workload.device)
    times = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            loss = workload.loss(batch, batch)
            middle = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            times.append((middle - start, time.perf_counter() - middle))
            workload.zero_grad()
    forward_s, backward_s = max(times[1:], key=sum)
    return RealTokens(tokens=tokens, forward_s=forward_s, backward_s=backward_s)
