"""Thinning: few points, every peak."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gockpt.dashboard.thinning import thin

series = st.lists(st.floats(allow_nan=True, allow_infinity=False, width=32), max_size=400)


@given(values=series, limit=st.integers(4, 60))
def test_nothing_is_hidden_and_nothing_made_up(values: list[float], limit: int) -> None:
    kept = thin(values, limit)
    assert len(kept) <= max(limit, 0) or len(kept) == len(values) <= limit
    assert list(kept) == sorted(set(kept))
    if not values:
        return
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    numbers = np.array(values)
    if not np.isnan(numbers).all():
        assert np.nanmax(numbers[kept]) == np.nanmax(numbers)
        assert np.nanmin(numbers[kept]) == np.nanmin(numbers)


def test_a_short_series_stays_as_it_is() -> None:
    assert list(thin([3.0, 1.0, 2.0, 1.0], 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("at", [0, 1, 777, 123_456, 999_998, 999_999])
def test_one_slow_step_in_a_million_is_seen(at: int) -> None:
    seconds = np.full(1_000_000, 0.25)
    seconds[at] = 9.0
    kept = thin(seconds, 1000)
    assert at in kept
    assert len(kept) <= 1000


def test_every_bucket_keeps_its_peak() -> None:
    """Of many hiccups none hides behind a larger one far away."""
    seconds = np.full(100_000, 0.25)
    peaks = np.arange(500, 100_000, 1000)
    seconds[peaks] = np.linspace(1, 2, len(peaks))
    assert set(peaks) <= set(thin(seconds, 1000))


def test_values_that_are_unknown_are_no_peaks() -> None:
    values = np.arange(1000.0)
    values[500] = np.nan
    assert 500 not in thin(values, 50)
    assert len(thin(np.full(1000, np.nan), 50)) <= 50


def test_a_million_points_take_no_time() -> None:
    values = np.random.default_rng(0).random(1_000_000)
    start = time.perf_counter()
    thin(values, 2000)
    assert time.perf_counter() - start < 2.0


def test_a_limit_that_cannot_hold_ends_and_extremes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        thin([1.0] * 10, 3)
