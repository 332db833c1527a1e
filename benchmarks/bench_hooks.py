"""What the engine costs the training thread, at 300 parameters: outside windows and inside.

The parameters are small, so that it is the engine's own work that is measured and not memory
traffic. Printed as microseconds of the thread's own CPU time a step (a shared machine's waits do
not count), beside the update itself.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import gockpt
from gockpt.strategies.engine import Engine

PARAMS = 300
EVERY = 12
WINDOWS = 4
STEPS = 20 * EVERY


class _Stopwatch:
    """CPU time of the engine's calls, by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_step: dict[int, float] = {}
        for name in ("before_update", "after_update", "end_pass"):
            self._wrap(monkeypatch, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(Engine, name)

        def timed(engine: Engine, *args: object, **kwargs: object) -> object:
            step, start = engine.current_step, time.thread_time()
            try:
                return original(engine, *args, **kwargs)
            finally:
                spent = time.thread_time() - start
                self.by_step[step] = self.by_step.get(step, 0.0) + spent

        monkeypatch.setattr(Engine, name, timed)


def test_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Median cost of a pass: at most 50 µs outside of windows, 2 ms inside."""
    torch.set_num_threads(1)
    model = nn.ParameterList([nn.Parameter(torch.randn(16, 16)) for _ in range(PARAMS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    watch = _Stopwatch(monkeypatch)
    update: list[float] = []
    with gockpt.Checkpointer(
        model, optimizer, tmp_path, every=EVERY, windows=WINDOWS, agent="process"
    ) as checkpointer:
        while checkpointer.current_step < STEPS:
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            start = time.thread_time()
            optimizer.step()
            update.append(time.thread_time() - start)
            checkpointer.step()
    steps = [step for step in watch.by_step if step >= 2 * EVERY]
    # A pass from step s belongs to a window if one is open at its start or opens at its end.
    inside = [watch.by_step[s] for s in steps if s % EVERY == 0 or s % EVERY >= EVERY - WINDOWS]
    outside = [watch.by_step[s] for s in steps if 0 < s % EVERY < EVERY - WINDOWS]
    print(
        f"\nhooks at {PARAMS} parameters, CPU time of the training thread, median (p95):\n"
        f"  outside windows {_us(outside)}\n"
        f"  inside windows  {_us(inside)}\n"
        f"  the update itself, hooks included {_us(update)}"
    )
    assert statistics.median(outside) < 50e-6
    assert statistics.median(inside) < 2e-3


def _us(values: list[float]) -> str:
    ordered = sorted(values)
    p95 = ordered[int(0.95 * (len(ordered) - 1))]
    return f"{statistics.median(values) * 1e6:7.0f} µs ({p95 * 1e6:.0f} µs)"
