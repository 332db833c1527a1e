"""What each strategy waits for, and what goes on behind the training: seen on a slow emulated link.

Nothing here measures time: a copy that takes ten times as long as a phase is at a given moment done
or not, and a commit that is held by an event never ends by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from identity_kit import Bag, check, checkpointer, cpu, one_pass, open_device, run
from test_checkpointer import Gate

import gockpt
from gockpt.agent import job
from gockpt.agent.handle import Stage
from gockpt.agent.job import Job
from gockpt.agent.protocol import Captured, Update
from gockpt.devices import Device, EmulatedDevice, ModelledWork, load_profile
from gockpt.events import Span
from gockpt.state import Entry, Layout
from gockpt.strategies import POLICIES, blocks, policy
from gockpt.strategies.engine import Engine

DEADLINE = 200.0
SLOW = 200_000
"""At this shrink the state of a :class:`Bag` takes about a quarter of a second on the link."""


@pytest.fixture
def slow() -> Iterator[Device]:
    with open_device("emulated", slowness=SLOW) as device:
        yield device


def engine_of(ckpt: gockpt.Checkpointer) -> Engine:
    assert ckpt.engine is not None
    return ckpt.engine


def spans(device: Device, lane: str) -> list[Span]:
    return [span for span in device.recorder.drain() if span.lane == lane]


class Watched(Bag):
    """Looks at the device's work just before and just after the optimizer's update."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.look: Callable[[str, int], None] = lambda when, step: None

    def update(self, step: int) -> None:
        self.look("before", step)
        self.optimizer.step()
        self.look("after", step)
        self.optimizer.zero_grad()


# -- the plain ones --------------------------------------------------------------------------------


def test_sync_is_durable_when_the_step_returns(slow: Device, tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=2, strategy="sync", device=slow) as ckpt:
        for step in range(1, 5):
            one_pass(ckpt, training, step)
            handle = ckpt.save()
            ckpt.step()
            assert handle.done() == (step % 2 == 0 or handle.step == step)
            assert ckpt.latest == (step if handle.done() else step - 1 or None)
    assert set(engine_of(ckpt).windows_used) == {1}


def test_what_is_left_goes_by_portions_which_are_told_as_they_arrive(
    slow: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The agent can write the first one while the others are still on the link."""
    told, copied = threading.Event(), 0
    copy, captured = slow.copy, Job.captured

    def held(pairs: Any, *, lane: str, **more: Any) -> Any:
        nonlocal copied
        if lane != "state":
            return copy(pairs, lane=lane, **more)
        copied += 1
        wait = copied == 2

        def when_told() -> Any:
            assert not wait or told.wait(DEADLINE)
            return pairs

        return copy(when_told, lane=lane, **more)

    def tell(job: Job, message: Captured) -> None:
        captured(job, message)
        told.set()

    monkeypatch.setattr(blocks, "PORTION_S", 1e-9)
    monkeypatch.setattr(slow, "copy", held)
    monkeypatch.setattr(Job, "captured", tell)
    training = Bag()
    with checkpointer(training, tmp_path, every=1, strategy="sync", device=slow) as ckpt:
        one_pass(ckpt, training, 1)
        ckpt.step()
        assert ckpt.latest == 1
        assert copied > 2
        found = gockpt.open(tmp_path, 1)
        assert found.verify() == []
        assert found.info.proof["outcome"] == "exact"


def test_what_has_been_replayed_is_written_while_the_rest_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Extents are handed over in the middle of the last update, not when all of it is done."""
    seen: list[str] = []
    hand_over, end = job._FinalBytes._hand_over, Job._end_update

    def handed(self: Any, extent: int, stop: int) -> None:
        seen.append("final")
        hand_over(self, extent, stop)

    def ended(self: Job, message: Update) -> None:
        seen.append(f"update {message.version}")
        end(self, message)

    monkeypatch.setattr(job, "SLICE", 1)  # one block
    monkeypatch.setattr(job._FinalBytes, "_hand_over", handed)
    monkeypatch.setattr(Job, "_end_update", ended)
    training = Bag(shapes=[(300_000,)] * 6)  # an extent is a megabyte
    ran = run(training, tmp_path, steps=8, every=8, windows=4)
    check(ran, [8], lambda: Bag(3, shapes=[(300_000,)] * 6))
    assert "final" in seen[seen.index("update 7") + 1 : seen.index("update 8")]
    assert "final" not in seen[: seen.index("update 7")]


def test_bytes_that_are_final_twice_are_a_defect_and_no_extent_is_taken_for_complete() -> None:
    """Else bytes counted twice would stand for others that are still being replayed."""
    size = 3 << 20
    entries = [
        Entry(name=str(n), dtype="uint8", shape=(size // 4,), order=(0,), offset=size // 4 * n)
        for n in range(4)
    ]
    found: list[tuple[int, int]] = []
    final = job._FinalBytes(
        Layout(entries=entries, params=[], size=size), lambda *extent: found.append(extent)
    )
    final.add(0, size // 4)
    assert found == []
    with pytest.raises(gockpt.AgentError, match="final twice"):
        final.add(0, size // 4)
    assert found == []


GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("ends", "first", "expected"),
    [
        ([], 0, []),
        ([MIB, 2 * MIB], 2, []),
        ([MIB, 2 * MIB], 0, [2]),  # not worth more messages
        ([MIB, 2 * MIB], 1, [2]),
        ([64 * MIB * n for n in range(1, 4)], 0, [1, 2, 3]),
        ([64 * MIB * n for n in range(1, 4)], 1, [2, 3]),
        ([GIB * n for n in range(1, 17)], 0, [2, 4, 6, 8, 10, 12, 14, 16]),  # no more than eight
        ([GIB * n for n in range(1, 17)], 8, [9, 10, 11, 12, 13, 14, 15, 16]),
        ([GIB], 0, [1]),  # a block is not divided
        ([GIB, GIB + 1, GIB + 2], 0, [1, 3]),
        ([64 * MIB, 128 * MIB, 128 * MIB], 0, [1, 3]),  # empty blocks belong to it as well
        ([4, 4], 1, [2]),
        ([0, 0], 0, [2]),
    ],
)
def test_portions_are_of_about_equal_bytes(
    ends: list[int], first: int, expected: list[int]
) -> None:
    """Here the link carries 64 MiB in the least time that is worth a portion."""
    rate = 64 * MIB / blocks.PORTION_S
    assert blocks.portions(ends, first, link_rate=rate) == expected


def test_async_has_copied_when_the_step_returns_but_not_written(
    slow: Device,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    gate = Gate(monkeypatch)
    training = Watched()
    with checkpointer(training, tmp_path, every=2, strategy="async", device=slow) as ckpt:
        for step in range(1, 3):
            one_pass(ckpt, training, step)
            ckpt.step()
        capture = engine_of(ckpt)._closing
        assert capture is not None
        assert all(copied.done() for copied in capture.state_copies)
        assert ckpt.latest is None
        one_pass(ckpt, training, 3)  # training goes on while the write is held
        ckpt.step()
        assert capture.handle.stage < Stage.COMMITTED
        gate.open()
        assert capture.handle.wait(DEADLINE).name.startswith("step-000000002")


def test_async_o_copies_behind_the_forward_and_the_update_waits_for_the_rest(
    slow: Device,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    gate = Gate(monkeypatch)
    training = Watched()
    seen: dict[str, bool] = {}
    with checkpointer(training, tmp_path, every=2, strategy="async-o", device=slow) as ckpt:
        for step in range(1, 3):
            one_pass(ckpt, training, step)
            ckpt.step()
        capture = engine_of(ckpt)._closing
        assert capture is not None

        def look(when: str, step: int) -> None:
            seen[when] = all(copied.done() for copied in capture.window_copies)

        look("returned", 2)
        training.look = look
        one_pass(ckpt, training, 3)
        ckpt.step()
        assert seen == {"returned": False, "before": False, "after": True}
        assert capture.handle.stage < Stage.COMMITTED
        gate.open()
    waited = [span.name for span in spans(slow, "stall") if span.step in (2, 3)]
    assert "state" in waited


def test_none_makes_nothing(slow: Device, tmp_path: Path) -> None:
    training, before = Bag(), set(threading.enumerate())
    with checkpointer(training, tmp_path / "x", every=1, strategy="none", device=slow) as ckpt:
        for step in range(1, 4):
            one_pass(ckpt, training, step)
            ckpt.step()
        assert set(threading.enumerate()) <= before
        assert slow.blocked_seconds() == 0
    assert not (tmp_path / "x").exists()


# -- several windows -------------------------------------------------------------------------------


def windows_of(device: Device, target: int, every: int) -> list[int]:
    """The windows (by the step that opened them) in which state was copied for a target."""
    state = spans(device, "state")
    return sorted({span.step for span in state if target - every < span.step <= target})


def test_gockpt_copies_a_share_in_each_window(tmp_path: Path) -> None:
    with open_device("emulated") as device:
        ran = run(Bag(), tmp_path, steps=8, every=8, windows=4, strategy="gockpt", device=device)
        assert windows_of(device, 8, 8) == [5, 6, 7, 8]
    check(ran, [8], None)
    assert (ran.infos[8].base, ran.infos[8].windows) == (5, 4)
    assert ran.infos[8].recipe["updates"] == 3
    # Parts captured in windows 1, 2 and 3 were brought to the target by 3, 2 and 1 updates.
    numel = sum(param.numel() for param in ran.training.model.parameters())
    share = -(-numel // 4)
    expected = (3 + 2 + 1) * share
    assert abs(ran.infos[8].recipe["replayed"] - expected) <= 3 * 2 * 64


class Large(Bag):
    """About a hundred thousand parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, shapes=((64, 512), (64, 512), (64, 256), (300,), (64, 256)))


def planned_device(slowness: int) -> EmulatedDevice:
    work = ModelledWork(forward_s=0.02, backward_s=0.03, update_s=0.006, shrink=slowness)
    return EmulatedDevice(load_profile("a100-pcie4"), work)


def trained(path: Path, device: Device, steps: int, **arguments: Any) -> tuple[Engine, Any, Bag]:
    """A run whose every checkpoint is durable before the next one opens."""
    training = Large()
    plans: dict[int, Any] = {}
    with checkpointer(training, path, device=device, **arguments) as ckpt:
        engine = engine_of(ckpt)
        for step in range(1, steps + 1):
            one_pass(ckpt, training, step)
            ckpt.step()
            if engine._capture is not None:
                plans.setdefault(engine._capture.target, engine.planner.current)
    return engine, plans, training


def test_gockpt_opens_as_many_windows_as_it_planned(tmp_path: Path) -> None:
    """The state takes about as long as a window on this link: one window would stall."""
    device = planned_device(900)
    try:
        engine, plans, _ = trained(tmp_path, device, 24, every=8)
        infos = {step: gockpt.open(tmp_path, step).info for step in (8, 16, 24)}
    finally:
        device.close()
    assert [info.fallback for info in infos.values()] == [None] * 3
    assert len(plans) >= 2  # a machine that is late has long windows: one may then be enough
    for step, plan in plans.items():
        info = infos[step]
        assert plan.windows >= 2
        assert len(plan.budgets) == plan.windows
        assert sum(plan.budgets) == sum(p.numel() for p in Large().model.parameters())
        assert info.base == step - info.windows + 1
        # The first one opens as soon as there is a plan, which may be late.
        assert info.windows == plan.windows or (step == 8 and info.windows < plan.windows)
        assert info.proof["outcome"] == "exact"
    assert engine.windows_used == [info.windows for info in infos.values()]


def test_gockpt_takes_one_window_where_one_hides_everything(tmp_path: Path) -> None:
    device = planned_device(50)
    try:
        engine, _, _ = trained(tmp_path, device, 16, every=8)
    finally:
        device.close()
    assert engine.planner.current is not None
    assert engine.planner.current.windows == 1
    assert engine.windows_used == [1, 1]
    assert engine.trust.reason is None


def test_an_interval_shorter_than_the_plan_is_used_whole(tmp_path: Path) -> None:
    with open_device("emulated") as device:
        written = lambda ckpt, training, step: ckpt.wait(DEADLINE)  # noqa: E731
        ran = run(Bag(), tmp_path, steps=9, every=3, windows=7, device=device, after=written)
    check(ran, [3, 6, 9], None)
    assert [ran.infos[step].windows for step in (6, 9)] == [3, 3]


@pytest.mark.parametrize("strategy", ["gockpt-paper", "gockpt-o-paper", "gockpt"])
def test_who_waits_for_gradients(strategy: str, tmp_path: Path) -> None:
    """As published, the update waits until its gradients have left; else it overlaps them."""
    training = Watched(shapes=[(256,)] * 20)
    seen: list[tuple[str, bool]] = []
    work = ModelledWork(forward_s=0.1, backward_s=0.0, update_s=0.004, shrink=300_000)
    device = EmulatedDevice(load_profile("a100-pcie4"), work)
    with (
        contextlib.closing(device),
        checkpointer(
            training, tmp_path, every=6, windows=3, strategy=strategy, device=device
        ) as ckpt,
    ):
        engine = engine_of(ckpt)

        def look(when: str, step: int) -> None:
            capture = engine._capture
            if when == "after" and capture is not None and capture._update is not None:
                copies = [one for sent in capture._update.sent for one in sent.copies]
                assert copies
                seen.append((when, all(copied.done() for copied in copies)))

        training.look = look
        for step in range(1, 7):
            one_pass(ckpt, training, step)
            ckpt.step()
    assert len(seen) == 2  # updates between three windows
    # (What was filled as it came may be so little that its gradients are there at once.)
    assert all(done for _, done in seen) == policy(strategy).wait_gradients
    assert gockpt.open(tmp_path).info.windows == 3


@pytest.mark.parametrize("strategy", ["gockpt-paper", "gockpt-o-paper"])
def test_as_published_each_window_is_filled_as_it_comes(strategy: str, tmp_path: Path) -> None:
    """It takes what the link carries until the update is due; the rest goes in the last window."""
    with open_device("emulated", slowness=300_000) as device:
        training = Bag(shapes=[(64,)] * 60)
        ran = run(training, tmp_path, steps=8, every=8, windows=3, strategy=strategy, device=device)
        assert windows_of(device, 8, 8) == [6, 7, 8]
    check(ran, [8], None)
    assert ran.infos[8].windows == 3


def test_no_strategy_has_more_in_flight_than_there_are_slots(tmp_path: Path) -> None:
    for name, one in POLICIES.items():
        if not one.saves:
            continue
        training = Bag()
        with checkpointer(training, tmp_path / name, every=1, strategy=name, windows=1) as ckpt:
            for step in range(1, 7):
                one_pass(ckpt, training, step)
                ckpt.step()
        client = ckpt.client
        assert client is not None
        assert 1 <= client.totals.in_flight_max <= 2, name
        assert len(list((tmp_path / name).glob("step-*"))) == 6, name


def test_a_stall_is_never_hidden_by_the_emulation(tmp_path: Path) -> None:
    """What the engine holds the training for is added to the modelled time, not taken off it."""
    with open_device("emulated", slowness=SLOW) as device:
        run(Bag(), tmp_path, steps=2, every=2, windows=None, strategy="async", device=device)
        recorded = device.recorder.drain()
    copy = sum(s.end - s.start for s in recorded if s.lane == "state")
    stall = sum(s.end - s.start for s in recorded if s.lane == "stall")
    assert stall >= 0.9 * copy
    assert stall == pytest.approx(device.blocked_seconds(), rel=0.05)


# -- the table -------------------------------------------------------------------------------------


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(gockpt.ConfigError, match="did you mean 'async-o'"):
        policy("asynco")
    with pytest.raises(gockpt.ConfigError, match="choose one of none, sync"):
        policy("???")


def test_each_strategy_says_what_it_is() -> None:
    assert list(POLICIES) == [
        "none", "sync", "async", "async-o", "gockpt-paper", "gockpt-o-paper", "gockpt",
    ]  # fmt: skip
    assert all(one.summary and one.name == name for name, one in POLICIES.items())
    cpu()
