"""Training by command: it goes on where it ended; its checkpoints can be listed and verified."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import gockpt
from gockpt import workloads
from gockpt.cli.main import call

TRAIN = "train --model gpt-tiny --device cpu --tokens 16 --interval 2"


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(before)


def run(line: str, capsys: pytest.CaptureFixture[str], *, code: int = 0) -> str:
    capsys.readouterr()
    assert call(line.split()) == code
    return capsys.readouterr().out


def document(line: str, capsys: pytest.CaptureFixture[str], *, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(f"{line} --json -", capsys, code=code))
    return found


def tensors(directory: str, step: int) -> dict[str, torch.Tensor]:
    return gockpt.open(directory, step).load()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4."""
    directory = tmp_path_factory.mktemp("trained") / "ckpt"
    assert call([*TRAIN.split(), "--steps", "4", "--dir", str(directory)]) == 0
    return directory


@pytest.fixture
def checkpoints(trained: Path, tmp_path: Path) -> Path:
    """A copy of them to damage."""
    return Path(shutil.copytree(trained, tmp_path / "ckpt"))


def image(checkpoints: Path, step: int) -> Path:
    return next(checkpoints.glob(f"step-{step:09d}-*/rank-00000.safetensors"))


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_never_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    whole = document(f"{TRAIN} --steps 6 --dir whole", capsys)
    first = document(f"{TRAIN} --steps 4 --dir parts", capsys)
    second = document(f"{TRAIN} --steps 6 --dir parts", capsys)
    assert (whole["restored_step"], whole["step"]) == (None, 6)
    assert (first["restored_step"], first["step"]) == (None, 4)
    assert (second["restored_step"], second["step"]) == (4, 6)
    assert second["loss"] == whole["loss"] != first["loss"]
    expected, found = tensors("whole", 6), tensors("parts", 6)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_nothing_is_left_to_do(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(f"{TRAIN} --steps 4 --dir {checkpoints}", capsys)
    assert "nothing to do: it is at step 4" in out


DIFFERING = {
    "--tokens 32": "has --tokens 16, not 32; give --tokens 16, or name another --dir",
    "--seed 7": "has --seed 0, not 7",
    "--precision bf16-master": "has --precision fp32, not bf16-master",
    "--device emulated:a100-pcie4": "on a device that is real, not emulated",
    "--data other.txt": "was trained on another text; give its --data again",
}


@pytest.mark.parametrize("option", DIFFERING)
def test_a_run_is_not_gone_on_with_by_other_options(
    option: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.txt").write_text("another text " * 1000)
    before = sorted(trained.iterdir())
    assert call(f"{TRAIN} {option} --steps 6 --dir {trained}".split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gockpt: the run to go on with ")
    assert DIFFERING[option] in said.err
    assert len(said.err.splitlines()) == 1
    assert sorted(trained.iterdir()) == before


def test_a_run_restored_from_its_tier_is_not_gone_on_with_by_other_options(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory is lost, so nothing can be compared before the start."""
    options = f"--seed 7 --steps 6 --dir new --tier {shutil.copytree(trained, tmp_path / 'tier')}"
    assert call(f"{TRAIN} {options}".split()) == 2
    assert "has --seed 0, not 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    ["--linger -1", "--grace nan", "--tier new/inside", "--volume a --volume a"],
)
def test_bad_options_are_told_before_anything_else_is_said(
    options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--device auto`` begins with a line that says what was chosen."""
    assert call(f"train --model gpt-tiny --steps 2 --dir new {options}".split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gockpt: ")
    assert len(said.err.splitlines()) == 1
    assert not Path("new").exists()


def test_told_to_stop_it_saves_ends_and_goes_on_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = document(f"{TRAIN} --steps 4 --dir whole", capsys)
    real = workloads.train_step

    def step(workload: Any, device: Any, step: int) -> Any:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(workload, device, step)

    monkeypatch.setattr(workloads, "train_step", step)
    out = run(f"{TRAIN} --steps 4 --dir parts", capsys, code=143)
    assert out.splitlines()[-1] == "stopped by SIGTERM at step 3, checkpoint committed"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.setattr(workloads, "train_step", real)
    again = document(f"{TRAIN} --steps 4 --dir parts", capsys)
    assert (again["restored_step"], again["step"], again["stopped"]) == (3, 4, False)
    assert again["loss"] == whole["loss"]
    expected, found = tensors("whole", 4), tensors("parts", 4)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_told_to_stop_without_time_it_says_what_stands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = workloads.train_step

    def step(workload: Any, device: Any, step: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(workload, device, step)

    monkeypatch.setattr(workloads, "train_step", step)
    out = run(f"{TRAIN} --steps 4 --strategy none --dir parts --grace 0", capsys, code=143)
    last = out.splitlines()[-1]
    assert last == "stopped by SIGTERM at step 1, which has no checkpoint; there is none"


def test_ls_of_good_checkpoints(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(f"ls {checkpoints}", capsys)["checkpoints"]
    assert [row["step"] for row in rows] == [4, 2]
    assert {row["proof"] for row in rows} == {"exact"}
    assert all(row["problem"] is None and row["finished"] for row in rows)
    assert rows[0]["bytes"] == image(checkpoints, 4).stat().st_size
    assert "gockpt" in run(f"ls {checkpoints}", capsys)


def test_ls_of_one_checkpoint(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(f"ls {image(checkpoints, 2).parent}", capsys)["checkpoints"]
    assert [row["step"] for row in rows] == [2]


def test_ls_of_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no checkpoints" in run(f"ls {tmp_path}", capsys)


def test_ls_tells_damage_from_what_was_never_finished(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(image(checkpoints, 4).parent, checkpoints / "step-000000006-s000009-00000000")
    manifest = checkpoints / "step-000000006-s000009-00000000" / "rank-00000.json"
    manifest.unlink()
    rows = document(f"ls {checkpoints}", capsys)["checkpoints"]
    assert [row["finished"] for row in rows] == [False, True, True]
    with image(checkpoints, 2).open("r+b") as file:
        file.truncate(100)
    rows = document(f"ls {checkpoints}", capsys, code=1)["checkpoints"]
    assert "100 bytes" in rows[-1]["problem"]


def test_verify_of_good_checkpoints(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(f"verify {checkpoints}", capsys)["checkpoints"]
    assert [(one["step"], one["problems"]) for one in found] == [(4, []), (2, [])]


def test_verify_finds_one_flipped_bit_and_says_where(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = image(checkpoints, 4)
    with path.open("r+b") as file:
        file.seek(5_000_000)
        byte = file.read(1)[0]
        file.seek(5_000_000)
        file.write(bytes([byte ^ 1]))
    good, bad = f"verify {checkpoints} --step 2", f"verify {checkpoints}"
    assert document(good, capsys)["checkpoints"][0]["problems"] == []
    damaged, whole = document(bad, capsys, code=1)["checkpoints"]
    assert whole["problems"] == []
    (problem,) = damaged["problems"]
    assert path.name in problem
    assert "optim.blocks.0" in problem
    out = run(bad, capsys, code=1)
    assert "DAMAGED" in out
    assert out.count(": good") == 1
    assert call(["verify", str(path.parent)]) == 1


def test_verify_of_a_damaged_manifest(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = image(checkpoints, 4).with_suffix(".json")
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":4', b'"step":5', 1))
    damaged, _ = document(f"verify {checkpoints}", capsys, code=1)["checkpoints"]
    assert damaged["problems"]


def test_verify_of_a_step_that_is_not_there(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["verify", str(checkpoints), "--step", "3"]) == 2
    assert "only of 2, 4" in capsys.readouterr().err
