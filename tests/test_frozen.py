"""Frozen parameters are copied into each slot once, and never taken for unchanged if they are not.

``state_bytes`` counts what really went over the link.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import Bag, assert_same, checkpointer, one_pass, truth
from torch import nn

import gockpt
from gockpt.strategies import POLICIES

NUMEL = 300_000
BYTES = 4 * NUMEL
DEADLINE = 200.0


class Adapted(Bag):
    """With weights that nothing trains, and what a loop may do with them."""

    def __init__(self, seed: int = 0, write: Callable[[nn.Parameter, int], None] | None = None):
        super().__init__(seed)
        weights = torch.full((NUMEL,), float(seed))
        self.bag.register_parameter("frozen", nn.Parameter(weights, requires_grad=False))
        self._write = write

    def update(self, step: int) -> None:
        super().update(step)
        frozen = self.bag.get_parameter("frozen")
        if self._write is not None:
            self._write(frozen, step)


def copied(training: Bag, path: Path, *, steps: int = 20, **arguments: Any) -> list[int]:
    """How many times the frozen weights were copied in each checkpoint; all are checked."""
    counts: list[int] = []
    defaults = {"every": 4, "windows": 2, "keep": None}
    with checkpointer(training, path, **{**defaults, **arguments}) as ckpt:
        engine = ckpt.engine
        assert engine is not None
        before = 0
        for step in range(1, steps + 1):
            one_pass(ckpt, training, step)
            ckpt.step()
            if step % 4 == 0:
                expected = truth(training)
                ckpt.wait(DEADLINE)
                counts.append((engine.state_bytes - before) // BYTES)
                before = engine.state_bytes
                if found := list(path.glob(f"step-{step:09d}-*")):
                    opened = gockpt.open(found[0])
                    assert opened.verify() == []
                    assert opened.info.proof["outcome"] in ("exact", "off")
                    assert_same(opened.load(), expected, f"step {step}")
    return counts


@pytest.mark.parametrize("strategy", sorted(set(POLICIES) - {"none"}))
def test_each_slot_gets_them_once(strategy: str, tmp_path: Path) -> None:
    windows = 2 if POLICIES[strategy].max_windows > 1 else None
    arguments = {"strategy": strategy, "windows": windows}
    assert copied(Adapted(), tmp_path, **arguments) == [1, 1, 0, 0, 0]
    assert len(list(tmp_path.glob("step-*"))) == 5


def test_three_slots(tmp_path: Path) -> None:
    assert copied(Adapted(), tmp_path, steps=24, slots=3) == [1, 1, 1, 0, 0, 0]


def test_without_a_proof_they_are_copied_each_time(tmp_path: Path) -> None:
    assert copied(Adapted(), tmp_path, proof=False) == [1] * 5


def test_what_is_written_in_each_pass_is_copied_each_time(tmp_path: Path) -> None:
    """An average of other weights, written so that nothing counts it."""

    def average(frozen: nn.Parameter, step: int) -> None:
        frozen.data.mul_(0.5).add_(step)

    assert copied(Adapted(write=average), tmp_path) == [1] * 5
    assert len(list(tmp_path.glob("step-*"))) == 5


@pytest.mark.parametrize("how", ["copy_", "swapped"])
def test_what_is_written_once_is_copied_once_more(how: str, tmp_path: Path) -> None:
    """Loading other weights: as values, or as another tensor."""

    def load(frozen: nn.Parameter, step: int) -> None:
        if step != 14:
            return
        if how == "swapped":
            frozen.data = torch.full((NUMEL,), 7.0)
        else:
            with torch.no_grad():
                frozen.copy_(torch.full((NUMEL,), 7.0))

    counts = copied(Adapted(write=load), tmp_path, steps=28)
    assert counts == [1, 1, 0, 1, 1, 0, 0]
    assert len(list(tmp_path.glob("step-*"))) == 7


def test_a_write_that_nothing_counts_is_found_by_the_proof(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs one checkpoint; they are copied each time from then on, and windows stay several."""

    def write(frozen: nn.Parameter, step: int) -> None:
        if step == 14:
            frozen.data.add_(1)

    training = Adapted(write=write)
    counts = copied(training, tmp_path, steps=28, on_error="warn")
    assert counts == [1, 1, 0, 0, 1, 1, 1]
    steps = sorted(gockpt.open(one).step for one in tmp_path.glob("step-*"))
    assert steps == [4, 8, 12, 20, 24, 28]
    assert "is not the true state" in caplog.text
    last = gockpt.open(tmp_path, 28).info
    assert (last.windows, last.fallback) == (2, None)


def test_a_restored_training_copies_them_again(tmp_path: Path) -> None:
    training = Adapted(write=lambda frozen, step: None)
    with checkpointer(training, tmp_path, every=4, windows=2, keep=None) as ckpt:
        engine = ckpt.engine
        assert engine is not None
        for step in range(1, 21):
            one_pass(ckpt, training, step)
            ckpt.step()
            if step % 4 == 0:
                ckpt.wait(DEADLINE)
        assert engine._frozen.reused == BYTES
        assert ckpt.restore(12) is not None
        for step in range(13, 17):
            one_pass(ckpt, training, step)
            ckpt.step()
        ckpt.wait(DEADLINE)
        assert engine._frozen.reused == 0
    found = gockpt.open(tmp_path)
    assert (found.step, found.verify()) == (16, [])
    assert_same(found.load(), truth(training), "after a restore")


def test_a_capture_that_was_given_up_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """Its step is taken again, into another slot; the first one was never proved."""
    training = Adapted()
    with checkpointer(training, tmp_path, every=4, windows=2, keep=None) as ckpt:
        engine, client = ckpt.engine, ckpt.client
        assert engine is not None
        assert client is not None
        for step in range(1, 29):
            one_pass(ckpt, training, step)
            ckpt.step()
            if step in (4, 8, 16):
                assert engine._closing is not None
                client.problems[engine._closing.sequence] = "planted"
            if step % 4 == 0:
                expected = truth(training)
                ckpt.wait(DEADLINE)
                found = gockpt.open(tmp_path, step)
                assert found.verify() == []
                assert_same(found.load(), expected, f"step {step}")
        assert engine.events["fallbacks"] == 3
        assert engine._frozen.reused == BYTES
