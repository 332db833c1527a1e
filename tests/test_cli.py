"""The commands: their options, what they say when something is wrong, and their documents."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import typer.main

import gockpt
from gockpt import hostmemory
from gockpt.cli.main import app, call

OPTIONS = {
    "bench": "--model --device --strategies --peers --steps --interval --tokens --repeats "
    "--windows --precision --seed --data --dir --db --suite --only --json --markdown "
    "--profile-file",
    "gate": "run --baseline --config --strategies --metric --max-regression --limit --absolute "
    "--strict --junit --markdown --db --json",
    "baseline": "",
    "crash-test": "--scenario --point --strategies --trials --seed --model --device --tokens "
    "--quick --mtbf --table1 --sabotage --command --result --first-kill-after --step-regex "
    "--timeout --list --dir --db --json",
    "plan": "--model --device --interval --tokens --windows --precision --window-s --update-s "
    "--link-gb-s --json --profile-file",
    "doctor": "--dir --megabytes --json",
    "dashboard": "--db --host --port --token-file --allow-host --open",
    "report": "run --out --db --force",
    "train": "--dir --model --device --steps --interval --strategy --keep --keep-every "
    "--tier --volume --tokens --windows --precision --seed --data --grace --linger --json "
    "--profile-file",
    "agents": "--stop --json",
    "ls": "path --volume --json",
    "inspect": "path --step --tensor --volume --json",
    "verify": "path --step --all --volume --json",
    "export": "path out --to --step --only --max-shard-size --force --volume --json",
    "pin": "path step --volume",
    "unpin": "path step",
    "models": "--json",
    "devices": "--json",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command of a test finds, or leaves, anything but in its own directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user-data"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


# -- options ---------------------------------------------------------------------------------------


def test_commands_and_options_are_these_and_no_others() -> None:
    """A script that somebody wrote must go on working: change this table on purpose only."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: " ".join(param.opts[0] for param in command.params if param.name != "help")
        for name, command in commands.items()
    }
    assert found == OPTIONS


def test_the_default_job_needs_only_a_model() -> None:
    """docs/metrics.md says why these."""
    params = typer.main.get_command(app).commands["bench"].params  # type: ignore[attr-defined]
    defaults = {param.name: param.default for param in params}
    assert defaults["device"] == "auto"
    assert (defaults["steps"], defaults["interval"], defaults["seed"]) == (36, 12, 0)
    assert defaults["strategies"] is defaults["tokens"] is defaults["precision"] is None


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from gockpt.cli.main import call; code = call(['--help']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in OPTIONS:
        assert name.encode() in done.stdout


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in OPTIONS:
        assert call([name, "--help"]) == 0
        assert f"gockpt {name}" in capsys.readouterr().out


def test_module_and_program_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"]) == 0
    here = capsys.readouterr().out
    there = subprocess.run(
        [sys.executable, "-m", "gockpt", "--version"],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert there.stdout == here == f"gockpt {gockpt.__version__}\n"


# -- bad input -------------------------------------------------------------------------------------

WRONG = [
    ("bogus", "bogus"),
    ("agents --stop nobody", "--stop nobody: no agent has this pid or directory"),
    ("bench --stepz 4", "--stepz"),
    ("bench --steps many", "--steps"),
    ("bench --model gpt-1.3", "did you mean 'gpt-1.3b'"),
    ("bench --model gpt-tiny --device cudo", "did you mean 'cuda'"),
    ("bench --device emulated:a100-pcie", "did you mean 'a100-pcie4'"),
    ("bench --model gpt-tiny --strategies async,gocpt", "did you mean 'gockpt'"),
    ("bench --strategies ,", "--strategies"),
    ("bench --precision bf16", "did you mean 'bf16-master'"),
    ("bench --steps 0", "--steps must be at least 1"),
    ("bench --steps -4", "--steps must be at least 1"),
    ("bench --interval 0", "--interval must be at least 1"),
    ("bench --interval -8", "--interval must be at least 1"),
    ("bench --steps 4 --interval 8", "longer than --steps"),
    ("bench --tokens 0", "--tokens must be at least 1"),
    ("bench --tokens 3000", "3000 tokens"),
    ("bench --windows 0", "--windows must be at least 1"),
    ("bench --seed -1", "--seed"),
    ("bench --model gpt-tiny --data missing.txt", "missing.txt"),
    ("bench --model gpt-tiny --data empty.txt", "empty"),
    ("bench --model gpt-tiny --data short.txt", "longer text"),
    ("bench --model gpt-tiny --dir nowhere", "no such directory"),
    ("bench --model gpt-tiny --dir empty.txt", "no such directory"),
    ("bench --model gpt-tiny --json nowhere/x.json", "nowhere"),
    ("bench --model gpt-tiny --json .", "a directory"),
    ("bench --model gpt-tiny --db .", "a directory"),
    ("bench --profile-file missing.toml", "missing.toml"),
    ("bench --device cpu --profile-file missing.toml", "--profile-file"),
    ("train --steps 0", "--steps must be at least 1"),
    ("train --interval 0", "--interval must be at least 1"),
    ("train --keep 0", "--keep must be at least 1"),
    ("train --keep-every 0", "--keep-every must be at least 1"),
    ("train --strategy gockptt", "did you mean 'gockpt'"),
    ("train --dir empty.txt", "empty.txt"),
    ("plan --device cpu", "profile"),
    ("plan --window-s -1", "--window-s"),
    ("ls nowhere", "no such directory"),
    ("verify nowhere", "no such directory"),
    ("verify .", "no checkpoints"),
    ("doctor --megabytes 0", "--megabytes"),
    ("doctor --dir nowhere", "no such directory"),
]


@pytest.mark.parametrize(("line", "says"), WRONG, ids=[line for line, _ in WRONG])
def test_wrong_use_is_told_in_one_line(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    assert says in refused(line, capsys, tmp_path, besides={"empty.txt", "short.txt"})


def refused(
    line: str,
    capsys: pytest.CaptureFixture[str],
    directory: Path,
    *,
    besides: set[str] = frozenset(),  # type: ignore[assignment]
) -> str:
    """Run a command that must be refused, and leave nothing behind; returns what it said."""
    assert call(line.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("gockpt: ")
    assert said.count("\n") == 1
    assert {path.name for path in directory.iterdir()} == besides
    return said


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is what nobody can write to")
def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("bench --model gpt-tiny --dir /proc", capsys, tmp_path)
    assert "cannot be written" in said


def test_too_little_room_is_refused_with_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(2e9, 1.9e9, 100_000_000))
        said = refused("bench --model gpt-tiny --steps 6 --interval 2", capsys, tmp_path)
    assert "389 MB" in said  # 3 checkpoints of 10.8 M parameters at 12 bytes
    assert "100 MB are free" in said
    monkeypatch.setattr(hostmemory, "available", lambda: 500_000_000)
    said = refused("bench --model gpt-tiny", capsys, tmp_path)
    assert "1.19 GB of memory" in said
    assert "500 MB are available" in said


def test_an_error_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    from gockpt.cli.errors import complain

    complain("something\n  is wrong")
    assert capsys.readouterr().err == "gockpt: something is wrong\n"


# -- documents -------------------------------------------------------------------------------------


def document(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a command writes to stdout with ``--json -``: the document and nothing else."""
    assert call([*line.split(), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err.strip(), "people are told nothing"
    found: dict[str, Any] = json.loads(out)
    assert (found["schema"], found["kind"]) == (1, line.split()[0])
    return found


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in document("models", capsys)["models"]}
    assert rows["gpt-1.3b"]["params"] == 1_315_723_264
    assert rows["gpt-1.3b"]["state_bytes"] == 14 * 1_315_723_264
    assert rows["gpt-1.3b"]["emulated_params"] < rows["gpt-1.3b"]["params"] / 200
    assert rows["gpt-tiny"]["emulated_params"] == rows["gpt-tiny"]["params"]


def test_devices_give_each_figure_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    found = document("devices", capsys)
    assert found["real"][0]["device"] == "cpu"
    emulated = {row["device"]: row["figures"] for row in found["emulated"]}
    assert emulated["emulated:a100-pcie4"]["link_alone"]["value"] == 25e9
    assert all(figure["source"] for row in emulated.values() for figure in row.values())


def test_plan_of_the_default_job(capsys: pytest.CaptureFixture[str]) -> None:
    found = document("plan --model gpt-1.3b", capsys)
    made = found["plan"]
    assert found["emulated"] is True
    assert made["windows"] == len(made["budgets"]) >= 2
    assert sum(made["budgets"]) == found["workload"]["params"]
    assert made["stall_s"] == 0
    assert found["one_window_stall_s"] == pytest.approx(0.43, abs=0.03)


def test_plan_with_figures_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A fast link and a long window: one window hides it all."""
    found = document("plan --window-s 2 --update-s 0.1 --link-gb-s 40", capsys)
    assert found["plan"]["windows"] == 1
    assert found["one_window_stall_s"] == 0
    assert document("plan --windows 3 --interval 50", capsys)["plan"]["windows"] == 3


def test_doctor_compares_with_the_raw_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document("doctor --megabytes 16", capsys)
    assert [row["name"] for row in found["rates"]] == ["write", "read", "replay", "copy"]
    for row in found["rates"]:
        assert row["ratio"] == pytest.approx(row["rate"] / row["raw_rate"])
    assert all(check["ok"] for check in found["checks"])
    assert list(tmp_path.glob("gockpt*")) == []


def test_a_document_can_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["models", "--json", "models.json"]) == 0
    assert "gpt-1.3b" in capsys.readouterr().out
    assert json.loads((tmp_path / "models.json").read_text())["kind"] == "models"
