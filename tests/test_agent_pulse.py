"""The agent's sign of life: a process that is stuck is replaced, one whose disk is stuck is not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from identity_kit import Bag, checkpointer, one_pass
from test_agent import DEADLINE, agent_pid, client_of, committed, gone, until

import gockpt
from gockpt import faults
from gockpt.agent import diskwatch, pulse
from gockpt.agent import inbox as inbox_module
from gockpt.agent.diskwatch import DiskWatch
from gockpt.agent.protocol import Alive
from gockpt.agent.pulse import Pulse
from gockpt.faults import Fault
from gockpt.storage import fs, underway

SILENCE = 2.5
"""Seconds; a sign of life comes every second, if it comes."""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(inbox_module, "SILENCE", SILENCE)
    monkeypatch.setattr(diskwatch, "PATIENCE", 0.5)
    caplog.set_level(logging.INFO, logger="gockpt")


def trained(path: Path, fault: Fault, steps: int) -> tuple[gockpt.Checkpointer, Bag]:
    ckpt = checkpointer(
        training := Bag(),
        path,
        every=4,
        windows=2,
        agent="process",
        when_busy="skip",
        faults=[fault],
    )
    for step in range(1, steps + 1):
        one_pass(ckpt, training, step)
        ckpt.step()
    return ckpt, training


def test_an_agent_whose_disk_hangs_is_not_replaced_and_the_disk_is_named(
    tmp_path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory of a checkpoint is made by the agent's loop itself."""
    hang = Fault(point="fs.mkdir", action=f"delay:{2 * SILENCE}", match="*/step-*")
    ckpt, _ = trained(tmp_path, hang, 5)
    with ckpt:
        first, began = agent_pid(tmp_path), time.monotonic()
        ckpt.wait(DEADLINE)
        assert time.monotonic() - began > SILENCE + inbox_module.LOOK
        assert (agent_pid(tmp_path), client_of(ckpt).generation) == (first, 1)
        until(lambda: "answers again" in caplog.text, "the good news")
    assert committed(tmp_path) == {4}
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    (made,) = tmp_path.glob("step-*")
    assert f"the disk does not answer: a call on {made} was begun" in warning


def test_an_agent_whose_loop_hangs_elsewhere_is_replaced(
    tmp_path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt, training = trained(tmp_path, Fault(point="replay.update", action="delay:600"), 5)
    with ckpt:
        first = agent_pid(tmp_path)
        until(lambda: client_of(ckpt).ready and client_of(ckpt).generation == 2, "a new agent")
        assert gone(first)
        for step in range(6, 9):
            one_pass(ckpt, training, step)
            ckpt.step()
    assert committed(tmp_path) == {8}
    assert "no sign of life" in caplog.text
    assert "the disk does not answer" not in caplog.text


# -- the pulse by itself ---------------------------------------------------------------------------


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> list[Alive]:
    monkeypatch.setattr(pulse, "EVERY", 0.02)
    return []


def comes(signs: list[Alive]) -> bool:
    """Whether there are signs of life just now."""
    before = len(signs)
    time.sleep(0.3)
    return len(signs) > before + 1


def test_it_beats_while_the_loop_comes_round(signs: list[Alive]) -> None:
    with Pulse(signs.append) as beats:
        for _ in range(20):
            beats.turn()
            time.sleep(0.02)
        assert len(signs) > 2
        time.sleep(0.05)
        assert not comes(signs)  # the loop does not come round, and is in no file call
        before = len(signs)
        beats.turn()
        until(lambda: len(signs) > before, "its return")
    assert not [one for one in threading.enumerate() if one.name == "gockpt-agent-pulse"]
    assert all(one.path is None for one in signs)


def test_it_beats_while_the_loop_is_in_a_file_call_and_names_it(
    signs: list[Alive], tmp_path: Path
) -> None:
    faults.arm([Fault(point="fs.mkdir", action="delay:0.5")])
    with Pulse(signs.append):
        fs.mkdir(tmp_path / "slow")
        assert len(signs) > 5
        time.sleep(0.05)
        assert not comes(signs)
    named = [one for one in signs if one.path is not None]
    assert {one.path for one in named} == {str(tmp_path / "slow")}
    assert max(one.seconds for one in named) > 0.3


def test_another_threads_file_call_is_named_but_is_no_sign_of_life(
    signs: list[Alive], tmp_path: Path
) -> None:
    faults.arm([Fault(point="fs.mkdir", action="delay:1")])
    other = threading.Thread(target=fs.mkdir, args=(tmp_path / "slow",))
    with Pulse(signs.append) as beats:
        other.start()
        time.sleep(0.1)
        assert not comes(signs)
        beats.turn()
        until(lambda: bool(signs) and signs[-1].path is not None, "its name")
        other.join()
    assert underway.oldest() is None


def test_a_call_that_fails_is_no_longer_under_way(tmp_path: Path) -> None:
    with pytest.raises(gockpt.StorageError):
        fs.mkdir(tmp_path / "none" / "there")
    assert underway.oldest() is None


def test_each_path_is_told_once_until_the_disk_answers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gockpt")
    watch = DiskWatch()
    late = diskwatch.PATIENCE + 1
    for path, seconds in (("/a", 1.0), ("/a", late), ("/a", late + 1), ("/b", late)):
        watch.note(Alive(path=path, seconds=seconds))
    assert [one.args[0] for one in caplog.records if one.args] == ["/a", "/b"]
    watch.note(Alive())
    watch.note(Alive(path="/a", seconds=1.0))
    assert caplog.text.count("answers again (/a, /b)") == 1
    watch.note(Alive(path="/a", seconds=late))
    assert caplog.text.count("does not answer") == 3
