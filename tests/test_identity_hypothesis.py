"""Any shapes, any schedule: the checkpoint is the true state. Driven by hypothesis, kept small.

What is drawn: shapes and dtypes, the optimizer, its options and how they change, which gradients
are missing in which step, which passes only accumulate, when saves are asked for, interval and
windows; and where a run is stopped, and from which step it goes on.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from identity_kit import (
    Bag,
    Moment,
    Ran,
    assert_same,
    check_restored,
    checkpointer,
    one_pass,
    truth,
)
from replay_kit import OPTIONS, maker

import gockpt
from gockpt import optim

SIZES = st.sampled_from([0, 1, 2, 3, 17, 63, 64, 65, 128, 200])
SHAPES = st.lists(st.lists(SIZES, max_size=3).map(tuple), min_size=1, max_size=5).filter(
    lambda shapes: sum(_numel(shape) for shape in shapes) < 60_000
)
MULTI = [name for name, kind in optim.KINDS.items() if kind.fused_cpu]
QUICK = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


@st.composite
def optimizers(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(MULTI))
    options = draw(st.sampled_from(OPTIONS[name]))
    return maker(name, lr=0.05, **options, fused=True)


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    every = draw(st.integers(1, 5))
    steps = draw(st.integers(every, 11))
    return {
        "every": every,
        "windows": draw(st.integers(1, 5)),
        "steps": steps,
        "missing": draw(st.sets(st.tuples(st.integers(1, steps), st.integers(0, 4)), max_size=8)),
        "accumulate": draw(st.sets(st.integers(1, steps), max_size=3)),
        "asked": draw(st.sets(st.integers(1, steps), max_size=2)),
        "rates": draw(st.lists(st.floats(1e-4, 0.5), min_size=steps, max_size=steps)),
        "set_to_none": draw(st.booleans()),
    }


@QUICK
@given(
    shapes=SHAPES,
    make=optimizers(),
    schedule=schedules(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_training_is_saved_and_restored_as_it_was(
    shapes: list[tuple[int, ...]], make: Any, schedule: dict[str, Any], dtype: torch.dtype
) -> None:
    def build(seed: int = 0) -> Bag:
        return Bag(
            seed,
            make=make,
            shapes=shapes,
            dtype=dtype,
            # One parameter at least has a gradient: there is nothing to backpropagate else.
            absent=lambda step, number: number > 0 and (step, number) in schedule["missing"],
            set_to_none=schedule["set_to_none"],
        )

    with tempfile.TemporaryDirectory() as name:
        ran = trained(build(), schedule, Path(name))
        saved = sorted(gockpt.open(one).step for one in Path(name).glob("step-*"))
        every, steps = schedule["every"], schedule["steps"]
        assert set(saved) >= set(range(every, steps + 1, every))
        assert set(saved) <= ran.moments.keys()
        for step in saved:
            found = gockpt.open(name, step)
            assert found.info.proof["outcome"] == "exact"
            assert_same(found.load(), ran.moments[step].tensors, f"committed, step {step}")
        check_restored(ran, saved[-1], build(seed=9))


def trained(training: Bag, schedule: dict[str, Any], path: Path) -> Ran:
    """Go through the schedule, and remember each step."""
    moments: dict[int, Moment] = {}
    with checkpointer(training, path, every=schedule["every"], windows=schedule["windows"]) as ckpt:
        for step in range(1, schedule["steps"] + 1):
            if step in schedule["asked"]:
                ckpt.save()
            if step in schedule["accumulate"]:
                training.compute(100 + step)
                ckpt.step()  # no update: no step
            training.optimizer.param_groups[0]["lr"] = schedule["rates"][step - 1]
            one_pass(ckpt, training, step)
            moments[step] = Moment.of(training)
            ckpt.step()
        assert ckpt.current_step == schedule["steps"]
    events = {} if ckpt.engine is None else ckpt.engine.events
    assert "failed" not in events
    return Ran(path=path, training=training, moments=moments, events=events)


@QUICK
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    windows=st.integers(1, 4),
    data=st.data(),
)
def test_any_number_of_restarts_changes_nothing(
    cuts: list[int], windows: int, data: st.DataObject
) -> None:
    """Stop anywhere, restore any step that is there, go on: as if it had been done in one go."""
    with tempfile.TemporaryDirectory() as name:
        unbroken = Bag()
        expected = {}
        for step in range(1, sum(cuts) + 1):
            unbroken.compute(step)
            unbroken.update(step)
            expected[step] = truth(unbroken)
        known: list[int] = []
        for cut in cuts:
            training = Bag(len(known))
            with checkpointer(training, Path(name), every=3, windows=windows) as ckpt:
                if known:
                    wanted = data.draw(st.sampled_from([None, *known]))
                    restored = ckpt.restore(wanted)
                    assert restored is not None
                    assert wanted in (None, restored.step)
                    assert_same(truth(training), expected[restored.step], "restored")
                for _ in range(cut):
                    step = ckpt.current_step + 1
                    one_pass(ckpt, training, step)
                    if not known:
                        expected[step] = truth(training)
                    assert_same(truth(training), expected[step], f"step {step}")
                    ckpt.step()
            known = sorted({gockpt.open(one).step for one in Path(name).glob("step-*")})
