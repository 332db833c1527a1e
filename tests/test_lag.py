"""With an agent that lags behind the training: what it still has to do must stay as it was.

An agent with a core of its own is done with each message before the next one comes, and hides what
the trainer does too early. Here each one waits, in the agent, for a few passes of the training.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from identity_kit import Bag, check, run
from test_breaks import BREAKS, Meddling

from gockpt import faults
from gockpt.faults import Fault
from gockpt.strategies import POLICIES


@pytest.fixture(autouse=True)
def late() -> None:
    faults.arm([Fault(point="agent.message", action="delay:0.01", times=0)])


@pytest.mark.parametrize("strategy", sorted(set(POLICIES) - {"none"}))
def test_every_strategy(strategy: str, tmp_path: Path) -> None:
    ran = run(Bag(), tmp_path, steps=12, every=4, windows=None, strategy=strategy)
    check(ran, [4, 8, 12], lambda: Bag(3))


@pytest.mark.parametrize("windows", [1, 2, 4])
def test_checkpoints_one_behind_the_other(windows: int, tmp_path: Path) -> None:
    """Each takes the slot of the one before the last as soon as that is free."""
    ran = run(Bag(), tmp_path, steps=16, every=4, windows=windows)
    check(ran, [4, 8, 12, 16], lambda: Bag(3))


@pytest.mark.parametrize("at", [7, 8])
@pytest.mark.parametrize("what", BREAKS)
def test_what_breaks_a_capture(what: str, at: int, tmp_path: Path) -> None:
    """The state may grow, and its memory be made anew, while the agent is not yet there."""
    ran = run(Meddling(at=at, what=what), tmp_path, steps=16, every=8, windows=4, on_error="warn")
    check(ran, [16], None)
    if "failed" not in ran.events:
        check(ran, [8], None)
