"""How many writes are in flight: found by rates that a simulated disk has, never by a real one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gockpt.storage.tuning import FIRST, MOST, Depth

MIB = 1 << 20
FAST = 4e9

RateOf = Callable[[int], float]


class Disk:
    """Files of 64 extents, written at the rate that so many writes in flight have."""

    def __init__(self, rate: RateOf) -> None:
        self.rate = rate
        self.now = 1000.0
        self.most = 0

    def write(self, depth: Depth, *, files: int = 1, more: bool = True) -> None:
        for left in list(range(63, -1, -1)) * files:
            self.most = max(self.most, depth.now)
            self.now += 16 * MIB / self.rate(depth.now)
            depth.ended(16 * MIB, self.now, more=more and left > 0)


def saturating(at: int) -> RateOf:
    return lambda depth: FAST * min(depth, at) / at


@pytest.mark.parametrize("best", [2, 4, 8, 16])
def test_it_climbs_as_far_as_the_rate_grows_and_no_further(best: int) -> None:
    depth = Depth()
    Disk(saturating(best)).write(depth, files=12)
    assert depth.now == best
    assert depth.rate == pytest.approx(FAST)


def test_a_disk_that_does_not_care_gets_few_writes() -> None:
    disk, depth = Disk(lambda depth: 3e8), Depth()
    disk.write(depth, files=6)
    assert depth.now == FIRST
    assert disk.most == 2 * FIRST  # one step up was tried


def test_a_disk_that_more_writes_slow_down_gets_few_too() -> None:
    depth = Depth()
    Disk(lambda depth: FAST / depth).write(depth, files=6)
    assert depth.now == FIRST


def test_there_is_a_limit() -> None:
    disk, depth = Disk(lambda depth: 1e8 * depth), Depth()
    disk.write(depth, files=40)
    assert depth.now == disk.most == MOST


def test_a_number_that_was_given_never_changes() -> None:
    disk, depth = Disk(saturating(8)), Depth(3, 3)
    disk.write(depth, files=6)
    disk.rate = saturating(2)
    disk.write(depth, files=6)
    assert depth.now == disk.most == 3


def test_what_one_file_taught_serves_the_next_one() -> None:
    """Fast files are too short to learn all at once, so the search goes on in the next one."""
    disk, depth = Disk(saturating(8)), Depth()
    disk.write(depth)
    assert depth.rate is None
    assert depth.now > FIRST
    disk.write(depth, files=2)
    assert depth.rate is not None
    assert depth.now == 8


@pytest.mark.parametrize("after", [0.2, 3.0])
def test_it_is_measured_again_when_the_disk_has_changed(after: float) -> None:
    disk, depth = Disk(saturating(8)), Depth()
    disk.write(depth, files=12)
    assert depth.now == 8
    disk.rate = lambda depth: after * FAST  # whatever the number
    disk.write(depth, files=12)
    assert depth.now == FIRST
    assert depth.rate == pytest.approx(after * FAST)


def test_a_passing_trouble_changes_nothing() -> None:
    disk, depth = Disk(saturating(8)), Depth()
    disk.write(depth, files=12)
    disk.now += 2.0  # between two files: no part of a sample
    disk.write(depth, files=2)
    for _ in range(5):
        disk.write(depth)
        depth.ended(MIB, disk.now, more=True)
        disk.now += 1.0  # a write that took long: one sample is spoiled
        disk.write(depth, files=2)
        assert depth.now == 8
        assert depth.rate == pytest.approx(FAST)


def test_a_slot_that_fills_slowly_is_not_taken_for_a_slow_disk() -> None:
    disk, depth = Disk(saturating(8)), Depth()
    disk.write(depth, files=12)
    disk.rate = lambda depth: FAST / 100
    disk.write(depth, files=12, more=False)
    assert depth.now == 8
    assert depth.rate == pytest.approx(FAST)
