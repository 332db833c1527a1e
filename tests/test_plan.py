"""The plan: its published check values, its promises, and a second opinion by simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gockpt.plan import Estimates, Plan, Situation, one_window_stall, plan
from gockpt.situation import Gradients
from gockpt.strategies.planner import Planner
from gockpt.strategies.policy import policy

GPT = Situation(
    params=1_313_000_000,
    state_bytes=12,
    grad_bytes=2,
    window_s=0.25,
    update_s=0.03,
    forward_s=0.083,
    link_rate=20.75e9,
    link_rate_alone=25e9,
    replay_rate=1.6e9,
    image_bytes=14 * 1_313_000_000,
)
"""The default job of ``gockpt bench``: gpt-1.3b, 4,096 tokens a step, on an A100 with PCIe 4."""


def tokens(count: int, **changes: Any) -> Situation:
    return replace(GPT, window_s=0.25 * count / 4096, forward_s=0.083 * count / 4096, **changes)


# --- what the documentation promises -------------------------------------------------------------


@pytest.mark.parametrize(("state_bytes", "windows"), [(14, 5), (12, 4)])
def test_the_check_values_of_the_formula(state_bytes: int, windows: int) -> None:
    found = plan(
        Situation(
            params=1_236_000_000,
            state_bytes=state_bytes,
            grad_bytes=2,
            window_s=0.40,
            update_s=0.046,
            link_rate=13.2e9,
            share=0.9,
            slack=0.0,
        )
    )
    assert found.windows == windows
    assert found.hides
    assert found.stall_s == 0


@pytest.mark.parametrize(("count", "windows"), [(4096, 5), (8192, 2), (16384, 1)])
def test_the_default_job(count: int, windows: int) -> None:
    found = plan(tokens(count))
    assert found.windows == windows
    assert found.hides
    assert "hidden behind forward and backward" in found.note


def test_short_steps_need_many_windows_and_much_traffic() -> None:
    found = plan(tokens(2048))
    assert found.windows > 8
    assert found.traffic_factor > 2
    assert found.stall_s <= 0.01 * one_window_stall(tokens(2048))


def test_async_o_by_the_papers_own_figures() -> None:
    """Llama-3.2-1B on a V100S: 14 bytes over 13.2 GB/s, hidden behind 0.42 s at 0.83 of that."""
    s = Situation(
        params=1_236_000_000,
        state_bytes=14,
        grad_bytes=2,
        window_s=0.42,
        update_s=0.026,
        link_rate=0.83 * 13.2e9,
        link_rate_alone=13.2e9,
    )
    assert one_window_stall(s) == pytest.approx(0.962, abs=0.002)
    assert one_window_stall(replace(s, window_s=0)) == pytest.approx(1.311, abs=0.001)


def test_the_papers_engine_by_its_own_figures() -> None:
    """The same job, in pieces at 0.8 of the rate, where each update waits for its gradients."""
    s = Situation(
        params=1_236_000_000,
        state_bytes=14,
        grad_bytes=2,
        window_s=0.42,
        update_s=0.026,
        link_rate=0.8 * 0.83 * 13.2e9,
        link_rate_alone=13.2e9,
        share=1.0,
        slack=0.0,
        gradients="written",
    )
    found = plan(s)
    assert found.windows == 5
    assert found.stall_s == pytest.approx(0.40, abs=0.01)  # 0.04 + 0.08 + 0.12 + 0.16


def test_one_window_is_enough_where_the_state_fits_in_it() -> None:
    found = plan(replace(GPT, params=300_000_000))
    assert found.windows == 1
    assert found.budgets == (300_000_000,)
    assert found.gradient_bytes == found.ring_bytes == 0
    assert found.traffic_factor == 1


# --- limits ---------------------------------------------------------------------------------------


def test_a_short_interval_limits_the_windows_and_says_so() -> None:
    found = plan(replace(GPT, every=3))
    assert found.windows <= 3
    assert 0 < found.stall_s < one_window_stall(GPT)
    assert "every=3" in found.note


def test_the_memory_limit_excludes_plans_with_a_large_ring() -> None:
    free = plan(GPT)
    limit = GPT.slots * GPT.image + free.ring_bytes // 2
    limited = plan(replace(GPT, memory_limit=limit))
    assert limited.memory_bytes <= limit
    assert limited.stall_s > 0
    assert "host memory" in limited.note
    assert plan(replace(GPT, memory_limit=free.memory_bytes)) == free


def test_too_little_memory_for_the_slots_is_named_with_both_numbers() -> None:
    found = plan(replace(GPT, memory_limit=30_000_000_000))
    assert found.windows == 1
    assert "36.76 GB" in found.note
    assert "30.00 GB" in found.note


def test_headroom_limits_what_gradients_hold_on_the_device() -> None:
    assert plan(GPT).held_bytes > 500_000_000
    found = plan(replace(GPT, headroom=500_000_000))
    assert found.held_bytes <= 500_000_000
    assert found.stall_s > 0
    assert "device has no memory" in found.note


@pytest.mark.parametrize("gradients", ["reused", "zeroed", "written"])
def test_gradients_that_are_overwritten_have_a_deadline(gradients: Gradients) -> None:
    """A window too short to meet it costs stall, which the plan names and keeps below async-o's."""
    s = replace(GPT, gradients=gradients, forward_s=0.01)
    found = plan(s)
    assert 0 < found.stall_s < one_window_stall(s)
    assert f"gradients are {gradients}" in found.note
    assert found.held_bytes == 0


def test_deadlines_that_are_met_cost_nothing() -> None:
    s = replace(GPT, window_s=0.5, forward_s=0.17)
    assert plan(replace(s, gradients="reused")).hides
    assert plan(replace(s, gradients="reused")).windows == plan(s).windows == 2


def test_written_gradients_stall_for_every_byte() -> None:
    found = plan(replace(GPT, gradients="written"), windows=2)
    last = 12 * found.budgets[1] - GPT.link_rate * GPT.window_s
    expected = (2 * found.budgets[0] + last) / GPT.alone
    assert found.stall_s == pytest.approx(expected, rel=1e-6)


def test_a_slow_replay_makes_the_next_checkpoint_wait() -> None:
    s = replace(GPT, replay_rate=0.8e9, every=6)
    found = plan(s)
    assert plan(replace(s, every=60)).hides
    assert not found.hides
    assert "replay does not keep up" in found.note


def test_slow_storage_makes_the_next_checkpoint_wait() -> None:
    s = replace(GPT, every=8, write_rate=5e9)
    period = 8 * (GPT.window_s + GPT.update_s)
    assert plan(s).stall_s == pytest.approx(GPT.image / 5e9 - period, rel=0.01)
    assert "storage does not keep up" in plan(s).note
    assert plan(replace(s, every=20)).hides


def test_whole_bytes_go_in_the_last_window() -> None:
    some = plan(replace(GPT, whole_bytes=1_000_000_000))
    assert some.hides
    assert some.budgets[-1] < plan(GPT).budgets[-1] - 80_000_000
    much = plan(replace(GPT, whole_bytes=6_000_000_000))
    assert much.stall_s > 0
    assert "6.00 GB cannot be replayed" in much.note


def test_gradients_that_fill_the_window_leave_no_plan_without_stall() -> None:
    """Zero stall ends near T = g·N/B."""
    limit = GPT.grad_bytes * GPT.params / GPT.link_rate
    assert plan(replace(GPT, window_s=1.5 * limit, replay_rate=None)).hides
    short = plan(replace(GPT, window_s=0.6 * limit, replay_rate=None))
    assert 0 < short.stall_s < one_window_stall(replace(GPT, window_s=0.6 * limit))
    assert "gradients of all parameters (2.63 GB)" in short.note


# --- forced windows -------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", range(1, 9))
def test_forced_windows_share_the_work(windows: int) -> None:
    fast = replace(GPT, link_rate=1e12, link_rate_alone=1e12)
    found = plan(fast, windows=windows)
    assert found.windows == len(found.budgets) == windows
    assert found.budgets == pytest.approx([GPT.params / windows] * windows, rel=1e-3)
    assert found.hides
    assert f"{windows} window" in found.note
    assert "as forced" in found.note


def test_too_few_forced_windows_stall() -> None:
    stalls = [plan(GPT, windows=k).stall_s for k in range(1, 5)]
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[0] == one_window_stall(GPT)
    assert stalls[2] > 0


# --- promises that hold everywhere ----------------------------------------------------------------

situations = st.builds(
    Situation,
    params=st.integers(0, 10_000_000_000),
    state_bytes=st.floats(4, 24),
    grad_bytes=st.sampled_from([2.0, 3.3, 4.0]),
    window_s=st.floats(0, 3),
    update_s=st.floats(0, 0.5),
    forward_s=st.floats(0, 1),
    link_rate=st.floats(1e8, 1e11),
    link_rate_alone=st.none() | st.floats(1e8, 1e11),
    whole_bytes=st.just(0) | st.integers(0, 10_000_000_000),
    share=st.floats(0.1, 1),
    slack=st.floats(0, 0.9),
    replay_rate=st.none() | st.floats(1e8, 1e10),
    write_rate=st.none() | st.floats(1e8, 1e10),
    gradients=st.sampled_from(["fresh", "reused", "zeroed", "written"]),
    every=st.none() | st.integers(1, 100),
    headroom=st.none() | st.integers(0, 10_000_000_000),
    ring=st.none() | st.integers(0, 20_000_000_000),
    memory_limit=st.none() | st.integers(0, 100_000_000_000),
)


@given(situations, st.none() | st.integers(1, 12))
def test_every_plan_captures_all_and_never_stalls_more_than_one_window(
    s: Situation, windows: int | None
) -> None:
    found = plan(s, windows=windows)
    assert sum(found.budgets) == s.params
    assert all(budget >= 0 for budget in found.budgets)
    assert len(found.budgets) == found.windows
    assert windows in (None, found.windows)
    assert found.hides == (found.stall_s == 0)
    assert math.isfinite(found.stall_s)
    if s.ring is None:
        assert found.ring_bytes <= found.gradient_bytes + 1
    else:
        assert found.ring_bytes == (s.ring if found.windows > 1 else 0)
    if windows is None:
        one = plan(s, windows=1)
        assert found.windows <= (s.every or 64)
        assert found.stall_s <= 1.01 * one.stall_s + 0.01 * one_window_stall(s) + 1e-9
        if found.memory_bytes > (s.memory_limit or math.inf):
            assert found.windows == 1


def simulate(s: Situation, found: Plan) -> tuple[float, float]:
    """(Stall, largest fill of the ring) of this plan with fresh gradients, in steps of the link.

    One queue, first in first out; gradients of what is captured follow each update. They can be
    replayed when all of an update's have arrived.
    """
    queue: list[list[float]] = []  # [bytes left, gradient bytes of it: 0 or all]
    captured = ring = usable = peak = 0.0
    drain = math.inf if s.replay_rate is None else s.grad_bytes * s.replay_rate

    def work(seconds: float) -> None:
        nonlocal ring, usable, peak
        tick = seconds / 2000
        for _ in range(2000):
            budget = s.link_rate * tick
            while queue and budget > 0:
                sent = min(budget, queue[0][0])
                budget -= sent
                queue[0][0] -= sent
                ring += sent if queue[0][1] else 0.0
                if queue[0][0] <= 0:
                    usable += queue.pop(0)[1]
            peak = max(peak, ring)
            used = min(usable, drain * tick)
            ring, usable = ring - used, usable - used

    for window, budget in enumerate(found.budgets):
        last = window == found.windows - 1
        captured += budget
        queue.append([s.state_bytes * budget + (s.whole_bytes if last else 0), 0])
        work(s.window_s)
        if not last:
            assert not queue or queue[0][0] < 1e-3 * s.link_rate, "an early window is late"
            queue.clear()
            queue.append([s.grad_bytes * captured, s.grad_bytes * captured])
            work(s.update_s)
    return sum(entry[0] for entry in queue) / s.alone, peak


@pytest.mark.parametrize("windows", [None, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1024, 2048, 4096, 8192])
def test_a_simulation_of_the_link_agrees(count: int, windows: int | None) -> None:
    s = tokens(count)
    found = plan(s, windows=windows)
    stall, ring = simulate(s, found)
    assert stall == pytest.approx(found.stall_s, abs=0.002)
    assert ring == pytest.approx(found.ring_bytes, rel=0.02, abs=5e7)


@pytest.mark.parametrize("count", [1024, 2048, 4096])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_no_more_is_captured_than_the_ring_has_room_for(count: int, share: float) -> None:
    """A burst that finds it full would hold up the copies behind it, window after window."""
    s = replace(tokens(count), replay_rate=1.6e9)
    free = plan(s)
    limited = replace(s, ring=int(share * free.ring_bytes))
    found = plan(limited)
    stall, ring = simulate(s, found)
    assert ring <= limited.ring * 1.001
    assert stall == pytest.approx(found.stall_s, abs=0.002)
    assert free.stall_s <= found.stall_s <= one_window_stall(s)


def test_a_ring_that_is_in_the_way_is_named() -> None:
    s = replace(tokens(3072), replay_rate=1.6e9)
    free = plan(s)
    assert free.hides
    found = plan(replace(s, ring=free.ring_bytes // 2))
    assert found.stall_s > 0
    assert "the ring has no room" in found.note
    assert plan(replace(s, ring=2 * free.ring_bytes)).windows == free.windows


def test_waiting_for_room_in_the_ring_is_foreseen() -> None:
    """Also where the number of windows was forced on the plan."""
    s = replace(tokens(2048), replay_rate=0.4e9)
    free = plan(s, windows=6)
    waited = plan(replace(s, ring=0), windows=6)
    assert waited.stall_s > free.stall_s


def test_the_least_traffic_leaves_the_first_window_what_the_others_cannot_take() -> None:
    found = plan(GPT)
    assert found.budgets[0] < found.budgets[1]
    assert found.gradient_bytes < plan(GPT, windows=found.windows).gradient_bytes


# --- arguments and estimates ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"link_rate": 0.0}, "link_rate"),
        ({"state_bytes": 0}, "state_bytes"),
        ({"params": -1}, "params"),
        ({"window_s": -0.1}, "window_s"),
        ({"share": 1.1}, "share"),
        ({"slack": 1.0}, "slack"),
        ({"every": 0}, "every"),
        ({"link_rate": math.nan}, "link_rate"),
    ],
)
def test_impossible_situations_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(GPT, **changes)


def test_no_windows_cannot_be_forced() -> None:
    with pytest.raises(ValueError, match="windows"):
        plan(GPT, windows=0)


def test_estimates_are_moving_averages_of_what_was_measured() -> None:
    first = Estimates().update(window_s=0.2, link_rate=10e9)
    assert first.apply(GPT) == replace(GPT, window_s=0.2, link_rate=10e9)
    second = first.update(window_s=0.4, link_rate=None, replay_rate=1e9)
    assert second.window_s == pytest.approx(0.26)
    assert second.link_rate == 10e9
    assert second.replay_rate == 1e9
    assert second.update_s is None


def test_the_strategy_that_waits_for_gradients_is_planned_as_the_paper_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Situation(
        params=1_236_000_000,
        state_bytes=14,
        grad_bytes=2,
        window_s=0.42,
        update_s=0.026,
        link_rate=0.83 * 13.2e9,
        link_rate_alone=13.2e9,
    )
    monkeypatch.setattr(Planner, "situation", lambda *_, **__: measured)
    nothing: Any = None
    planner = Planner(policy("gockpt-paper"), nothing, nothing, nothing)
    assert planner._plan(nothing, narrow=True, gradients="fresh").windows == 5
