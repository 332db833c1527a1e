"""The proof has teeth: each way of making a wrong checkpoint ends in a ProofError, not in a commit.

Runs on the emulated device with a slow link, where a missing gate corrupts as it would on hardware.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from identity_kit import Bag, check, checkpointer, one_pass, open_device, run
from replay_kit import maker

import gockpt
from gockpt import faults
from gockpt.faults import Fault


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


def broken_run(path: Path, fault: Fault, *, windows: int, device: str = "emulated") -> None:
    """The second of three checkpoints is spoiled: only that one must be missing."""
    training = Bag()
    moments = {}
    with (
        open_device(device, slowness=200_000) as opened,
        checkpointer(training, path, every=4, windows=windows, device=opened) as ckpt,
    ):
        for step in range(1, 5):
            one_pass(ckpt, training, step)
            ckpt.step()
        ckpt.wait(30)
        faults.arm([fault])

        def spoiled() -> None:
            for step in range(5, 10):
                one_pass(ckpt, training, step)
                ckpt.step()
            ckpt.wait(30)

        with pytest.raises(gockpt.ProofError, match=r"step 8|'list"):
            spoiled()
        faults.disarm()
        assert ckpt.latest == 4
        for step in range(ckpt.current_step + 1, 13):
            one_pass(ckpt, training, step)
            moments[step] = {k: v.clone() for k, v in training.model.state_dict().items()}
            ckpt.step()
    assert ckpt.latest == 12
    with pytest.raises(gockpt.NoCheckpointError):
        gockpt.open(path, 8)
    saved = gockpt.open(path, 12)
    assert all(torch.equal(saved.tensor(f"model.{k}"), v) for k, v in moments[12].items())


@pytest.mark.parametrize("after", [0, 1, 2])
def test_without_the_gate(after: int, tmp_path: Path) -> None:
    fault = Fault(point="capture.skip-gate", action="mark", after=after)
    broken_run(tmp_path, fault, windows=3)


def test_without_the_gate_of_the_only_window(tmp_path: Path) -> None:
    broken_run(tmp_path, Fault(point="capture.skip-gate", action="mark"), windows=1)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_one_gradient_dropped(device: str, after: int, tmp_path: Path) -> None:
    fault = Fault(point="replay.drop-gradient", action="mark", after=after)
    broken_run(tmp_path, fault, windows=3, device=device)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_one_block_a_version_late(device: str, tmp_path: Path) -> None:
    broken_run(tmp_path, Fault(point="replay.late-block", action="mark"), windows=3, device=device)


@pytest.mark.parametrize("windows", [1, 4])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_one_word_flipped_in_the_slot(device: str, windows: int, tmp_path: Path) -> None:
    fault = Fault(point="slot.flip-word", action="mark")
    broken_run(tmp_path, fault, windows=windows, device=device)


def test_a_fault_armed_in_the_agents_process(tmp_path: Path) -> None:
    faults_of_agent = [Fault(point="slot.flip-word", action="mark")]
    with pytest.raises(gockpt.ProofError, match="step 2"):
        run(Bag(), tmp_path, steps=2, every=2, windows=2, agent="process", faults=faults_of_agent)
    assert not list(tmp_path.glob("step-*"))


def test_without_the_proof_the_same_fault_goes_unnoticed(tmp_path: Path) -> None:
    """What the tests above would see if the proof were removed."""
    fault = [Fault(point="slot.flip-word", action="mark")]
    ran = run(Bag(), tmp_path, steps=2, every=2, windows=2, proof=False, faults=fault)
    found = gockpt.open(tmp_path, 2)
    assert found.info.proof["outcome"] == "off"
    assert not torch.equal(found.tensor("model.list.0"), ran.moments[2].tensors["model.list.0"])
    with pytest.raises(AssertionError):
        check(ran, [2], None)


def test_a_write_that_torch_does_not_count(tmp_path: Path) -> None:
    """Through ``.data``: no version counter moves, only the proof can tell."""

    class Hidden(Bag):
        def between(self, step: int) -> None:
            if step == 7:  # its first elements were captured in the window that has closed
                self.bag.list[0].data[0] += 1

    with pytest.raises(gockpt.ProofError):
        run(Hidden(), tmp_path, steps=9, every=4, windows=3)
    assert gockpt.open(tmp_path).step == 4


def test_warn_goes_on_and_the_next_one_is_good(tmp_path: Path) -> None:
    fault = [Fault(point="slot.flip-word", action="mark")]
    ran = run(Bag(), tmp_path, steps=8, every=4, windows=3, faults=fault, on_error="warn")
    check(ran, [8], functools.partial(Bag, 5))
    assert ran.events["failed"] == 1
    with pytest.raises(gockpt.NoCheckpointError):
        gockpt.open(tmp_path, 4)


def test_a_proof_that_is_wrong_for_a_slow_optimizer(tmp_path: Path) -> None:
    fault = [Fault(point="replay.drop-gradient", action="mark")]
    with pytest.raises(gockpt.ProofError):
        run(Bag(make=maker("RMSprop")), tmp_path, steps=4, every=4, windows=3, faults=fault)
