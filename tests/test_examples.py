"""The examples do what they say: run as a user runs them, each in processes of its own.

Nearly all of the time goes into importing torch, so independent runs are started side by side. All
histories of ``resume.py`` must tell the same story: one that was never stopped, and one that was
stopped, killed with SIGKILL in the middle of a step, and started again.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import gockpt

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextlib.contextmanager
def started(name: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """An example that is running; it does not outlive the body."""
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=EXAMPLES.parent
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str], code: int = 0) -> list[str]:
    """The lines that it printed, once it has ended with this exit code."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out.splitlines()


def run(name: str, *arguments: object, code: int = 0) -> list[str]:
    with started(name, *arguments) as process:
        return finish(process, code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What the examples printed, and the directories that they wrote to."""

    root: Path
    plain: list[str]
    scaler: list[str]
    unbroken: list[str]
    stopped: list[str]
    killed: list[str]
    resumed: list[str]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    root = tmp_path_factory.mktemp("examples")
    with (
        started("plain_loop.py", root / "plain") as plain,
        started("accumulation_with_scaler.py", root / "scaler") as scaler,
        started("resume.py", root / "unbroken") as unbroken,
    ):
        stopped = run("resume.py", root / "broken", "--stop-at", 12)
        killed = run("resume.py", root / "broken", "--kill-at", 28, code=-signal.SIGKILL)
        resumed = run("resume.py", root / "broken")
        return Outputs(
            root=root,
            plain=finish(plain),
            scaler=finish(scaler),
            unbroken=finish(unbroken),
            stopped=stopped,
            killed=killed,
            resumed=resumed,
        )


def test_plain_loop_saves_on_time_and_keeps_two(outputs: Outputs) -> None:
    assert outputs.plain[0] == "start 0"
    assert "newest 30 proof exact" in outputs.plain
    assert "problems []" in outputs.plain
    tensors = next(line for line in outputs.plain if line.startswith("tensors")).split()
    assert {"model.0.weight", "model.2.bias", "optim.0.weight.exp_avg_sq"} <= set(tensors)
    assert [path.name[:22] for path in sorted((outputs.root / "plain").glob("step-*"))] == [
        "step-000000020-s000002",
        "step-000000030-s000003",
    ]


def test_a_skipped_update_is_counted_and_replayed_as_nothing(outputs: Outputs) -> None:
    # Micro-batches are no steps: 48 of them are 12 steps.
    assert [line for line in outputs.scaler if line.startswith("step")] == [
        f"step {step} scale {1024.0 if step < 5 else 512.0}" for step in range(1, 13)
    ]
    # Step 6 is the sixth step but holds five updates: the fifth was skipped, inside the windows.
    assert outputs.scaler[-2:] == [
        "checkpoint 6: windows 3, fallback None, proof exact, updates 5, identical True",
        "checkpoint 12: windows 3, fallback None, proof exact, updates 11, identical True",
    ]
    assert gockpt.open(outputs.root / "scaler", 6).verify() == []


def steps(lines: list[str]) -> dict[int, str]:
    """What each step printed: loss, learning rate and samples."""
    found = (line.split(" ", 2) for line in lines if line.startswith("step "))
    return {int(number): rest for _, number, rest in found}


def first_step(lines: list[str]) -> int:
    return int(lines[0].removeprefix("start "))


def test_a_stopped_run_goes_on_from_its_last_checkpoint(outputs: Outputs) -> None:
    assert first_step(outputs.stopped) == 0
    assert first_step(outputs.killed) == 10
    assert list(steps(outputs.killed)) == list(range(11, 28))


def test_a_killed_run_goes_on_from_a_checkpoint_before_the_crash(outputs: Outputs) -> None:
    # Two slots: step 25 cannot be captured before step 15 is durable.
    assert first_step(outputs.resumed) in {15, 20, 25}
    assert max(steps(outputs.resumed)) == 40


def test_every_step_is_as_if_nothing_had_happened(outputs: Outputs) -> None:
    """Loss (weights, dropout), learning rate (schedule) and samples (data position), to the bit."""
    true = steps(outputs.unbroken)
    assert list(true) == list(range(1, 41))
    for lines in (outputs.stopped, outputs.killed, outputs.resumed):
        begin = first_step(lines) + 1
        found = steps(lines)
        assert list(found) == list(range(begin, begin + len(found)))
        assert found == {step: true[step] for step in found}


def test_the_final_weights_are_those_of_the_unbroken_run(outputs: Outputs) -> None:
    assert outputs.unbroken[-1].startswith("weights ")
    assert outputs.resumed[-1] == outputs.unbroken[-1]


def test_sequence_numbers_grow_over_restarts(outputs: Outputs) -> None:
    found = sorted((outputs.root / "broken").glob("step-*"))
    numbers = [(int(path.name[5:14]), int(path.name[16:22])) for path in found]
    assert numbers[-1][0] == 40
    assert [sequence for _, sequence in numbers] == sorted({s for _, s in numbers})
