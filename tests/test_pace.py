"""Pacing, on a clock of its own: nothing here depends on how fast the machine is."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gockpt import pace
from gockpt.pace import Pacer, sleep_until


class Clock:
    """A clock that only sleeping, and whoever sets it, moves."""

    def __init__(self, now: float = 1000.0, late: float = 0.0) -> None:
        self.now = now
        self.late = late
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pace, "time", made)
    return made


def test_work_is_done_no_sooner_than_its_rate_allows(clock: Clock) -> None:
    start = clock.now
    pacer = Pacer(100.0)
    for _ in range(5):
        pacer.take(50)
    # The first turn may begin up to LATE in the past: it counts as a late wake-up.
    assert clock.now == pytest.approx(start + 2.5 - Pacer.LATE)


def test_late_wake_ups_do_not_add_up(clock: Clock) -> None:
    """1000 small turns, each woken 2 ms late, take as long as one large turn."""
    clock.late = 0.002
    start = clock.now
    pacer = Pacer(1000.0)
    for _ in range(1000):
        pacer.take(10)
    assert clock.now - start == pytest.approx(10.0, abs=0.01)


def test_idle_time_is_not_saved_up(clock: Clock) -> None:
    pacer = Pacer(100.0)
    pacer.take(100)
    clock.now += 60
    start = clock.now
    pacer.take(100)
    assert clock.now - start == pytest.approx(1.0 - Pacer.LATE)


def test_a_turn_booked_slightly_late_begins_where_the_last_one_ended(clock: Clock) -> None:
    pacer = Pacer(100.0)
    end = pacer.book(100)
    clock.now = end + Pacer.LATE / 2
    assert pacer.book(100) == pytest.approx(end + 1.0)


def test_a_turn_may_have_a_rate_of_its_own(clock: Clock) -> None:
    pacer = Pacer(100.0)
    end = pacer.book(100)
    assert pacer.book(100, rate=50.0) == pytest.approx(end + 2.0)
    assert pacer.book(100) == pytest.approx(end + 3.0)


def test_booking_does_not_sleep(clock: Clock) -> None:
    Pacer(1.0).book(1000)
    assert clock.slept == []


@given(
    amounts=st.lists(st.floats(0.1, 1e6), min_size=1, max_size=30),
    pauses=st.lists(st.floats(0, 2), min_size=30, max_size=30),
)
def test_the_rate_is_never_exceeded(amounts: list[float], pauses: list[float]) -> None:
    rate = 1e6
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "time", clock)
        pacer = Pacer(rate)
        start = clock.now
        for amount, pause in zip(amounts, pauses, strict=False):
            pacer.take(amount)
            clock.now += pause
        most = (clock.now - start + Pacer.LATE) * rate
    assert sum(amounts) <= most * (1 + 1e-9) + 1e-3


def test_turns_of_several_threads_lie_one_behind_the_other(clock: Clock) -> None:
    """Both threads would read the same end, if they could meet between reading and booking."""
    meeting = threading.Barrier(2)

    def meet() -> float:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)
        return clock.now

    pacer, ends = Pacer(100.0), []
    pacer.book(100)
    clock.monotonic = meet  # type: ignore[method-assign]
    threads = [threading.Thread(target=lambda: ends.append(pacer.book(100))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(ends) - min(ends) == pytest.approx(1.0)


def test_sleeping_until_the_past_returns_at_once(clock: Clock) -> None:
    sleep_until(clock.now - 1)
    sleep_until(clock.now)
    assert clock.slept == []


def test_a_sleep_that_ends_early_is_continued(clock: Clock) -> None:
    clock.late = -0.25
    until = clock.now + 1
    for_real = clock.sleep

    def short(seconds: float) -> None:
        clock.late = -seconds / 2 if len(clock.slept) < 3 else 0.0
        for_real(seconds)

    clock.sleep = short  # type: ignore[method-assign]
    sleep_until(until)
    assert clock.now >= until
    assert len(clock.slept) == 4
