"""What the engine believes of the link: a short or belated copy must not make it believe more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gockpt.agent.ledger import Totals
from gockpt.strategies.capture import MEASURABLE_S, Capture
from gockpt.strategies.engine import Engine


def measured(
    nbytes: int, seconds: float | None, *, done: bool = True, efficiency: float = 1.0
) -> float | None:
    copied = SimpleNamespace(seconds=seconds, done=lambda: done)
    capture: Any = SimpleNamespace(
        block_copies=[copied],
        window_bytes=nbytes,
        _policy=SimpleNamespace(piece_efficiency=efficiency),
    )
    return Capture.link_rate(capture)


def test_a_copy_of_a_window_tells_the_rate() -> None:
    assert measured(10_000_000, 0.2) == pytest.approx(50e6)


def test_a_copy_that_is_too_short_tells_nothing() -> None:
    assert measured(100_000, 0.9 * MEASURABLE_S) is None


def test_a_window_that_was_withdrawn_tells_nothing() -> None:
    """Nobody counts what went before it was: a rate of nothing would be learnt as one."""
    assert measured(0, 0.2) is None


def test_what_pieces_lose_is_not_taken_for_a_slower_link() -> None:
    """The plan takes it off itself: twice would be too many windows."""
    assert measured(8_000_000, 0.2, efficiency=0.8) == pytest.approx(50e6)


def test_one_that_has_not_ended_tells_nothing() -> None:
    assert measured(10_000_000, None, done=False) is None


def test_no_window_is_taken_to_be_faster_than_the_link_alone() -> None:
    """A copy that was held up catches up: for a moment it looks faster than it can be."""
    alone = 25e9
    believed: list[float] = []
    engine: Any = SimpleNamespace(
        _meter=SimpleNamespace(link=SimpleNamespace(add=believed.append)),
        _device=SimpleNamespace(link_rate=lambda *, computing: alone),
        _client=SimpleNamespace(totals=Totals()),
    )
    for rate in (20e9, 6 * alone):
        capture: Any = SimpleNamespace(link_rate=lambda rate=rate: rate, proof_seconds=lambda: None)
        Engine._learn(engine, capture)
    assert believed == [20e9, alone]
