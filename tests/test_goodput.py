"""Expected goodput: what failures and checkpoints leave of the time."""

from __future__ import annotations

import math

import pytest

from gockpt.goodput import best_interval, expected_goodput, goodput


def expected(mtbf: float = 3600.0, **more: float) -> float:
    given = {"interval_s": 100.0, "stall_s": 0.0, "lag_s": 0.0, "recovery_s": 0.0, **more}
    return expected_goodput(mtbf, **given)


def test_without_failures_only_the_stall_counts() -> None:
    assert expected(mtbf=1e15, stall_s=25.0) == pytest.approx(0.8)


def test_half_an_interval_and_what_was_not_durable_yet_are_lost() -> None:
    assert expected(mtbf=1000.0) == pytest.approx(goodput(1000.0, 50.0, 0.0))
    assert expected(mtbf=1000.0, lag_s=30.0) == pytest.approx(0.92)
    assert expected(mtbf=1000.0, recovery_s=50.0) == pytest.approx(950 / 1050)


def test_each_cost_lowers_it_and_it_stays_a_share() -> None:
    best = expected()
    for name in ("stall_s", "lag_s", "recovery_s"):
        assert 0 <= expected(**{name: 10.0}) < best <= 1
    assert expected(mtbf=10.0) == 0.0


def test_an_interval_of_nothing_loses_what_is_under_way() -> None:
    assert expected(interval_s=0.0, lag_s=60.0, mtbf=600.0) == pytest.approx(0.9)


def test_a_best_interval_is_where_young_says() -> None:
    """With a stall, the optimum is near sqrt(2 · stall · mtbf)."""
    mtbf, stall = 36000.0, 5.0
    intervals = [10.0 * 1.05**n for n in range(100)]
    best = max(intervals, key=lambda one: expected(mtbf=mtbf, interval_s=one, stall_s=stall))
    assert best == pytest.approx(math.sqrt(2 * stall * mtbf), rel=0.1)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"stall_s": 3.0, "lag_s": 0.0}, 57),  # √(2 · 3 · 600) = 60, less the stall
        ({"stall_s": 3.0, "lag_s": 216.0}, 45),  # √(2 · 3 · 384) = 48, less the stall
        ({"stall_s": 3.0, "lag_s": 0.0, "least_s": 70.0}, 70),
        ({"stall_s": 0.0, "lag_s": 9.0, "least_s": 7.5}, 8),
        ({"stall_s": 0.0, "lag_s": 9.0}, 1),
        ({"stall_s": 3.0, "lag_s": 700.0}, 1),
    ],
)
def test_the_best_interval_is_youngs_and_no_shorter_than_can_be_kept_up(
    given: dict[str, float], steps: int
) -> None:
    assert best_interval(600.0, step_s=1.0, **given) == steps


def test_no_interval_beside_the_best_is_better() -> None:
    for stall, lag in ((1.311, 7.0), (0.4, 5.0), (0.02, 6.5)):
        given = {"stall_s": stall, "lag_s": lag}
        best = best_interval(600.0, step_s=0.446, **given)
        shares = {
            n: expected_goodput(600.0, interval_s=n * 0.446, recovery_s=9.0, **given)
            for n in range(max(1, best - 3), best + 4)
        }
        assert max(shares, key=lambda n: shares[n]) == best
