"""What figures of a bench read from its rows: which to draw, their labels, values and spread.

Pure functions over :class:`gockpt.results.Result`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gockpt.dashboard.figures.look import text
from gockpt.results import Result
from gockpt.results.noise import least, spread_of


def drawn(results: Iterable[Result], *, ideal: bool = False) -> list[Result]:
    """The rows that were measured, in their order; ``none`` only if asked for."""
    return [one for one in results if one.loop_s and (ideal or one.strategy != "none")]


def label(result: Result) -> str:
    """The strategy's name, and whether the row counts."""
    name = text(result.strategy)
    return name if result.valid else f"{name}<br>(invalid)"


def labels(results: Iterable[Result]) -> list[str]:
    return [label(one) for one in results]


def get(result: Result, *path: str) -> Any:
    """What lies at a path of the row's document, None if anything on the way is missing."""
    here: Any = result.row
    for key in path:
        here = here.get(key) if isinstance(here, dict) else None
    return here


def samples(result: Result, metric: str) -> list[float]:
    """One value a repeat."""
    return [float(value) for value in get(result, "samples", metric) or () if value is not None]


def spread(middle: Sequence[float | None], values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Error bars from the smallest to the largest repeat; none where there was one repeat."""
    pairs = [(0.0 if one is None else one, v) for one, v in zip(middle, values, strict=True)]
    up = [max(v) - m if len(v) > 1 else 0.0 for m, v in pairs]
    down = [m - min(v) if len(v) > 1 else 0.0 for m, v in pairs]
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(0.0, one) for one in up],
        "arrayminus": [max(0.0, one) for one in down],
        "visible": any(len(v) > 1 for _, v in pairs),
        "thickness": 1.5,
    }


def noise(results: Iterable[Result]) -> float | None:
    """Share of the throughput by which a row must differ from ``none`` to be told from it.

    None where there are not two rows of ``none``.
    """
    found = spread_of(results)
    return None if found is None else least(found)


def profile_of(results: Iterable[Result], emulated: str | None) -> str | None:
    """The profile to name, also where only the rows themselves say that they were emulated."""
    if emulated is not None:
        return emulated
    counted = (get(one, "emulation", "overruns") for one in results)
    return "a profile" if any(one is not None for one in counted) else None
