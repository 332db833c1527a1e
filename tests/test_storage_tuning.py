"""How a disk is written: found by rates that a simulated one has, never by a real one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gockpt.storage.tuning import FIRST, MOST, Tuning

MIB = 1 << 20
FAST = 4e9

RateOf = Callable[[int], float]


class Disk:
    """Files of 64 extents, written at the rate that so many writes in flight have."""

    def __init__(self, rate: RateOf, straight: float = 1.0) -> None:
        """``straight``: the rate of writes that do not go through a stage, as a ratio."""
        self.rate, self.straight = rate, straight
        self.now = 1000.0
        self.most = 0

    def write(self, tuning: Tuning, *, files: int = 1, more: bool = True) -> None:
        for left in list(range(63, -1, -1)) * files:
            self.most = max(self.most, tuning.depth)
            rate = self.rate(tuning.depth) * (1.0 if tuning.staged else self.straight)
            self.now += 16 * MIB / rate
            tuning.ended(16 * MIB, self.now, more=more and left > 0)


def saturating(at: int) -> RateOf:
    return lambda depth: FAST * min(depth, at) / at


@pytest.mark.parametrize("best", [2, 4, 8, 16])
def test_it_climbs_as_far_as_the_rate_grows_and_no_further(best: int) -> None:
    tuning = Tuning()
    Disk(saturating(best)).write(tuning, files=12)
    assert tuning.depth == best
    assert tuning.rate == pytest.approx(FAST)


def test_a_disk_that_does_not_care_gets_few_writes() -> None:
    disk, tuning = Disk(lambda depth: 3e8), Tuning()
    disk.write(tuning, files=6)
    assert tuning.depth == FIRST
    assert disk.most == 2 * FIRST  # one step up was tried


def test_a_disk_that_more_writes_slow_down_gets_few_too() -> None:
    tuning = Tuning()
    Disk(lambda depth: FAST / depth).write(tuning, files=6)
    assert tuning.depth == FIRST


def test_there_is_a_limit() -> None:
    disk, tuning = Disk(lambda depth: 1e8 * depth), Tuning()
    disk.write(tuning, files=40)
    assert tuning.depth == disk.most == MOST


def test_a_number_that_was_given_never_changes() -> None:
    disk, tuning = Disk(saturating(8)), Tuning(3, 3)
    disk.write(tuning, files=6)
    disk.rate = saturating(2)
    disk.write(tuning, files=6)
    assert tuning.depth == disk.most == 3


def test_what_one_file_taught_serves_the_next_one() -> None:
    """Fast files are too short to learn all at once, so the search goes on in the next one."""
    disk, tuning = Disk(saturating(8)), Tuning()
    disk.write(tuning)
    assert tuning.rate is None
    assert tuning.depth > FIRST
    disk.write(tuning, files=4)
    assert tuning.rate is not None
    assert tuning.depth == 8


@pytest.mark.parametrize("after", [0.2, 3.0])
def test_it_is_measured_again_when_the_disk_has_changed(after: float) -> None:
    disk, tuning = Disk(saturating(8)), Tuning()
    disk.write(tuning, files=12)
    assert tuning.depth == 8
    disk.rate = lambda depth: after * FAST  # whatever the number
    disk.write(tuning, files=12)
    assert tuning.depth == FIRST
    assert tuning.rate == pytest.approx(after * FAST)


def test_a_passing_trouble_changes_nothing() -> None:
    disk, tuning = Disk(saturating(8)), Tuning()
    disk.write(tuning, files=12)
    disk.now += 2.0  # between two files: no part of a sample
    disk.write(tuning, files=2)
    for _ in range(5):
        disk.write(tuning)
        tuning.ended(MIB, disk.now, more=True)
        disk.now += 1.0  # a write that took long: one sample is spoiled
        disk.write(tuning, files=2)
        assert tuning.depth == 8
        assert tuning.rate == pytest.approx(FAST)


def test_a_slot_that_fills_slowly_is_not_taken_for_a_slow_disk() -> None:
    disk, tuning = Disk(saturating(8)), Tuning()
    disk.write(tuning, files=12)
    disk.rate = lambda depth: FAST / 100
    disk.write(tuning, files=12, more=False)
    assert tuning.depth == 8
    assert tuning.rate == pytest.approx(FAST)


@pytest.mark.parametrize(
    ("straight", "staged"), [(0.6, True), (1.0, True), (1.05, True), (1.2, False)]
)
def test_the_way_of_writing_is_measured_too(straight: float, staged: bool) -> None:
    """With the number that was found best; the first way stays if the other is hardly better."""
    disk, tuning = Disk(saturating(8), straight), Tuning()
    disk.write(tuning, files=12)
    assert tuning.staged is staged
    assert tuning.depth == 8
    assert tuning.rate == pytest.approx(FAST * (1.0 if staged else straight))


def test_the_way_is_measured_again_when_the_disk_has_changed() -> None:
    disk, tuning = Disk(saturating(2), straight=1.2), Tuning()
    disk.write(tuning, files=12)
    assert not tuning.staged
    disk.rate, disk.straight = lambda depth: FAST / 4, 0.6
    disk.write(tuning, files=12)
    assert tuning.staged
    assert tuning.rate == pytest.approx(FAST / 4)
