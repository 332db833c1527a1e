"""Fault points: they act when they are due, as often as they should, and otherwise not at all."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from gockpt import faults
from gockpt.faults import Fault


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    faults.disarm()
    yield
    faults.disarm()


def fails(name: str, path: Path | None = None) -> bool:
    """Pass through a point once; whether it raised."""
    try:
        faults.point(name, path)
    except OSError:
        return True
    return False


def test_nothing_happens_at_a_point_that_is_not_armed() -> None:
    faults.point("fs.pwrite")
    faults.arm([Fault(point="fs.rename", action="errno:EIO")])
    faults.point("fs.pwrite")
    assert not faults.armed("fs.pwrite")


def test_an_error_is_the_systems_own_and_names_the_point() -> None:
    faults.arm([Fault(point="fs.pwrite", action="errno:ENOSPC")])
    with pytest.raises(OSError, match=r"fs\.pwrite") as caught:
        faults.point("fs.pwrite")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("after", "times", "expected"),
    [
        (0, 1, [True, False, False, False, False]),
        (2, 1, [False, False, True, False, False]),
        (1, 2, [False, True, True, False, False]),
        (1, 0, [False, True, True, True, True]),
    ],
)
def test_it_acts_after_some_passes_and_so_many_times(
    after: int, times: int, expected: list[bool]
) -> None:
    faults.arm([Fault(point="p", action="errno:EIO", after=after, times=times)])
    assert [fails("p") for _ in range(5)] == expected


def test_a_mark_is_for_the_code_around_the_point() -> None:
    faults.arm([Fault(point="slot.flip-word", action="mark", after=1)])
    assert [faults.armed("slot.flip-word") for _ in range(3)] == [False, True, False]


def test_passing_a_marked_point_does_nothing_but_count() -> None:
    faults.arm([Fault(point="p", action="mark", after=1)])
    faults.point("p")
    faults.point("p")
    assert not faults.armed("p")


def test_kill_is_a_signal_that_nothing_can_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: sent.append((pid, number)))
    faults.arm([Fault(point="output.written", action="kill")])
    faults.point("output.written")
    assert sent == [(os.getpid(), signal.SIGKILL)]


def test_delay_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    faults.arm([Fault(point="p", action="delay:0.25")])
    faults.point("p")
    assert slept == [0.25]


def test_arming_again_replaces_the_fault_of_the_same_point_only() -> None:
    faults.arm(
        [Fault(point="p", action="errno:EIO", times=0), Fault(point="q", action="errno:EIO")]
    )
    faults.arm([Fault(point="p", action="errno:EIO", after=1)])
    assert [fails("p") for _ in range(3)] == [False, True, False]
    assert fails("q")


def test_disarm_forgets_all() -> None:
    faults.arm([Fault(point="p", action="errno:EIO", times=0)])
    faults.disarm()
    assert not fails("p")


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ("*/volume-1/*", [False, True, False, True]),
        ("*.json", [False, False, True, False]),
        ("/a/volume-0/x", [True, False, False, False]),
        ("*/volume-?/*", [True, True, False, True]),
        ("x", [False, False, False, False]),
    ],
)
def test_a_glob_chooses_one_of_several_paths(match: str, expected: list[bool]) -> None:
    faults.arm([Fault(point="p", action="errno:EIO", times=0, match=match)])
    paths = ["/a/volume-0/x", "/a/volume-1/x", "/a/rank.json", "/a/volume-1/y/z"]
    assert [fails("p", Path(path)) for path in paths] == expected
    assert not fails("p")  # without a path, nothing matches


def test_only_passes_that_match_are_counted() -> None:
    faults.arm([Fault(point="p", action="errno:EIO", after=1, match="*b")])
    assert [fails("p", Path(path)) for path in ("/a", "/b", "/a", "/b", "/b")] == [
        *(False, False, False, True, False)
    ]


def test_faults_of_one_point_for_several_paths_are_apart() -> None:
    faults.arm(
        [
            Fault(point="p", action="errno:EIO", times=0, match="*a"),
            Fault(point="p", action="errno:EIO", after=1, match="*b"),
            Fault(point="p", action="mark", after=5),
        ]
    )
    faults.arm([Fault(point="p", action="errno:EIO", times=0, match="*c")])
    assert [fails("p", Path(f"/{name}")) for name in "abcb"] == [True, False, True, True]


def test_each_strike_goes_to_one_of_many_threads() -> None:
    faults.arm([Fault(point="p", action="errno:EIO", after=50, times=100)])
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: fails("p"), range(400))) == 100


def test_faults_can_be_handed_to_another_process() -> None:
    fault = Fault(point="fs.fsync", action="errno:EIO", after=3, times=2, match="*/x")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fault), type=Fault) == fault


def test_a_process_can_be_made_to_stand_still_at_a_point() -> None:
    child = os.fork()
    if child == 0:
        faults.arm([Fault(point="p", action="stop")])
        faults.point("p")
        os._exit(7)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
