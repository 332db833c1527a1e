"""Fewer points of a long series, with every peak still in it.

Pure; runs on the server before a figure is sent. What always holds: the smallest and the largest
value of every bucket are kept, and with them the largest and smallest of the whole; the first and
last point too; what is kept keeps its order, and nothing is made up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def thin(values: ArrayLike, limit: int) -> NDArray[np.int64]:
    """Which points of a series to draw, by the smallest and largest of each bucket.

    Args:
        values: the series, in the order in which it is drawn; NaN never wins, unless a bucket has
            nothing else.
        limit: most points to keep, at least 4.

    Returns:
        Their indices, increasing: all of them if there are no more than ``limit``.

    Raises:
        ValueError: ``limit`` is below 4.
    """
    if limit < 4:
        raise ValueError("limit must be at least 4")
    series = np.asarray(values, dtype=np.float64)
    count = len(series)
    if count <= limit:
        return np.arange(count, dtype=np.int64)
    buckets = (limit - 2) // 2
    starts = np.linspace(0, count, buckets, endpoint=False).astype(np.int64)
    low = _extreme(np.where(np.isnan(series), np.inf, series), starts, np.minimum)
    high = _extreme(np.where(np.isnan(series), -np.inf, series), starts, np.maximum)
    return np.unique(np.concatenate(([0, count - 1], low, high))).astype(np.int64)


def _extreme(
    series: NDArray[np.float64], starts: NDArray[np.int64], best: np.ufunc
) -> NDArray[np.int64]:
    """Index of the first point of each bucket that has its best value."""
    owner = np.repeat(np.arange(len(starts)), np.diff([*starts, len(series)]))
    hits = np.flatnonzero(series == best.reduceat(series, starts)[owner])
    _, first = np.unique(owner[hits], return_index=True)
    return hits[first]
