"""Killed and resumed: the same losses and the same weights, bit for bit, as if never stopped.

Dropout, shuffling and a schedule are on. The killed launch is a process of its own with its own
agent; those that go on run here.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import resume_kit
import torch
from resume_kit import BATCH, EVERY, SAMPLES, STEPS, Run

import gockpt
from gockpt.storage.lock import holder

DEADLINE = 200.0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One that was never stopped, and saved nothing."""
    run = Run()
    run.train(tmp_path_factory.mktemp("unbroken"), strategy="none")
    assert [entry["step"] for entry in run.history] == list(range(1, STEPS + 1))
    return run


def start(path: Path, step: int, point: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, resume_kit.__file__, path, step, point, torch.get_num_threads()]
    return subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE)


def killed(process: subprocess.Popen[bytes], path: Path) -> list[dict[str, Any]]:
    """The history of a launch that has killed itself, once its agent has left too."""
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == -signal.SIGKILL, err.decode()
    pid = holder(path / ".gockpt" / "rank-00000.lock")["pid"]
    assert isinstance(pid, int)
    deadline = time.monotonic() + DEADLINE
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the agent outlived its trainer"
        time.sleep(0.02)
    return [json.loads(line) for line in path.with_suffix(".log").read_text().splitlines()]


def resumed(path: Path, **arguments: Any) -> Run:
    """Go on with a launch that knows nothing of the others but the directory."""
    run = Run(seed=99)
    torch.rand(5)
    run.train(path, agent="thread", **arguments)
    return run


def expect_the_same(run: Run, history: list[dict[str, Any]], unbroken: Run) -> None:
    """All steps were made once, as the unbroken run made them, and the end is the same."""
    assert [entry["step"] for entry in history] == list(range(1, STEPS + 1))
    assert history == unbroken.history
    for (name, value), other in zip(
        run.model.state_dict().items(), unbroken.model.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name
    for one, two in zip(
        run.optimizer.state.values(), unbroken.optimizer.state.values(), strict=True
    ):
        assert all(torch.equal(one[key], two[key]) for key in two)
    assert run.scheduler.state_dict() == unbroken.scheduler.state_dict()


def joined(first: list[dict[str, Any]], run: Run) -> list[dict[str, Any]]:
    assert run.restored is not None
    return [entry for entry in first if entry["step"] <= run.restored.step] + run.history


KILLS = [(14, "update"), (20, "end")]
"""Inside the windows of step 15, and when the last window of step 20 has just been opened."""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    """Launches that killed themselves (side by side, as most of it is importing torch)."""
    root = tmp_path_factory.mktemp("crashed")
    processes = [(root / point, start(root / point, step, point)) for step, point in KILLS]
    return {path.name: (path, killed(process, path)) for path, process in processes}


@pytest.mark.parametrize(("step", "point"), KILLS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    step: int, point: str, crashed: dict[str, tuple[Path, list[Any]]], unbroken: Run
) -> None:
    path, first = crashed[point]
    assert first == unbroken.history[: len(first)]
    assert len(first) in (step - 1, step)
    run = resumed(path)
    assert run.restored is not None
    # How many were durable depends on the disk; whatever is there is whole.
    assert run.restored.step % EVERY == 0
    assert run.restored.step <= len(first)
    assert run.restored.problems == ()
    expect_the_same(run, joined(first, run), unbroken)
    assert all(gockpt.open(one).verify() == [] for one in path.glob("step-*"))


class Stopped(Exception):
    """Ends a launch."""


def test_each_sample_is_seen_exactly_once_in_each_epoch(tmp_path: Path, unbroken: Run) -> None:
    """Stopped three times, at every kind of place, resumed each time by a new launch."""
    history: list[dict[str, Any]] = []
    for stop in (7, 16, 23, None):

        def at(step: int, point: str, stop: int | None = stop) -> None:
            if step == stop and point == "update":
                raise Stopped

        run = Run(seed=len(history))
        with contextlib.suppress(Stopped):
            run.train(tmp_path, agent="thread", at=at)
        begun = 0 if run.restored is None else run.restored.step
        history = [entry for entry in history if entry["step"] <= begun] + run.history
    expect_the_same(run, history, unbroken)
    for epoch in range(STEPS * BATCH // SAMPLES):
        seen = [s for entry in history if entry["epoch"] == epoch for s in entry["batch"]]
        assert sorted(seen) == list(range(SAMPLES))


def flip(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def truncate(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])


def empty_manifest(path: Path) -> None:
    (path / "rank-00000.json").write_bytes(b"")


def no_data(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run that has ended."""
    path = tmp_path_factory.mktemp("whole")
    Run().train(path, agent="thread")
    return path


@pytest.mark.parametrize("damage", [flip, truncate, empty_manifest, no_data])
def test_a_damaged_newest_one_is_told_and_the_older_one_used(
    damage: Any,
    whole: Path,
    tmp_path: Path,
    unbroken: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for one in sorted(whole.glob("step-*"))[:4]:  # of steps 5 to 20
        (tmp_path / one.name).mkdir()
        for file in one.iterdir():
            (tmp_path / one.name / file.name).write_bytes(file.read_bytes())
    newest = max(tmp_path.glob("step-*"))
    damage(newest)
    run = resumed(tmp_path)
    assert run.restored is not None
    assert run.restored.step == 15
    assert [newest.name in problem for problem in run.restored.problems] == [True]
    assert newest.name in caplog.text
    history = [entry for entry in unbroken.history if entry["step"] <= 15] + run.history
    expect_the_same(run, history, unbroken)
    assert (
        gockpt.open(tmp_path, 20).verify() == []
    )  # step 20 was saved again, beside the damaged one


def test_a_run_that_has_ended_has_nothing_left_to_do(whole: Path, unbroken: Run) -> None:
    run = resumed(whole)
    assert run.history == []
    expect_the_same(run, unbroken.history, unbroken)
