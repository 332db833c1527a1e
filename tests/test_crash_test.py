"""``gockpt crash-test``: what is drawn, what is refused, what passes, and that planted bugs do not.

The trials run with real trainers and agents; a few are enough here, as each takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gockpt.cli import crash_setup, crash_verdict
from gockpt.cli.crash_document import again
from gockpt.cli.crash_leftovers import VARIABLE
from gockpt.cli.crash_recorder import Op, read
from gockpt.cli.crash_sabotage import SABOTAGES
from gockpt.cli.crash_scenarios import POINTS, QUICK, SCENARIOS, chosen
from gockpt.cli.crash_setup import MARKER, Options, Setup, draw, prepare
from gockpt.cli.crash_trial import Facts
from gockpt.cli.main import call
from gockpt.errors import ConfigError
from gockpt.goodput import goodput
from gockpt.results import Store

ENDED = 60.0

PYTHONS_OWN = ("pymp-", "torchinductor")
"""What multiprocessing and torch keep in the directory of temporary files while a process runs."""


@pytest.fixture(autouse=True)
def elsewhere(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, temporary files and golden runs are the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user-data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "user-cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def tried(line: str) -> tuple[int, dict[str, Any]]:
    """Run it; the exit code and the document."""
    code = call(["crash-test", *line.split(), "--json", "out.json"])
    return code, json.loads(Path("out.json").read_text())


def marked(place: Path) -> list[int]:
    """Processes of crash tests in ``place`` that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            mine = VARIABLE in environ and environ.get("TMPDIR", "").startswith(str(place))
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


# -- what is drawn ---------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_trials() -> None:
    cases = chosen("all", None)
    assert draw(cases, ["gockpt"], 20, 7) == draw(cases, ["gockpt"], 20, 7)
    assert draw(cases, ["gockpt"], 20, 7) != draw(cases, ["gockpt"], 20, 8)


def test_without_a_number_each_case_is_tried_once() -> None:
    drawn = draw(chosen("all", None), ["gockpt", "sync"], None, 0)
    assert len(drawn) == 2 * sum(len(one.points) for one in SCENARIOS.values())
    assert len(set(drawn)) == len(drawn)


def test_further_rounds_have_further_seeds() -> None:
    cases = chosen("sigterm", "random,state-last")
    assert [one.seed for one in draw(cases, ["gockpt"], 5, 3)] == [3, 3, 4, 4, 5]


def test_a_trial_can_be_had_alone() -> None:
    some = draw(chosen("process,disk", None), ["gockpt"], 30, 5)[11]
    alone = draw(chosen(some.scenario.name, some.point), [some.strategy], 1, some.seed)
    assert alone == (some,)


def test_families_stand_for_their_scenarios() -> None:
    names = {one.name for one, _ in chosen("disk", None)}
    assert names == {one.name for one in SCENARIOS.values() if one.family == "disk"}


def test_every_point_that_is_used_is_described_and_the_quick_ones_exist() -> None:
    assert {point for one in SCENARIOS.values() for point in one.points} == set(POINTS)
    assert [case for case in QUICK if case[1] not in SCENARIOS[case[0]].points] == []
    planted = [case for one in SABOTAGES.values() for case in one.cases]
    assert [case for case in planted if case[1] not in SCENARIOS[case[0]].points] == []


def test_the_goodput_counts_what_is_lost_and_what_it_takes_to_come_back() -> None:
    assert goodput(600, 0, 0) == 1
    assert goodput(600, 60, 0) == pytest.approx(0.9)
    assert goodput(600, 0, 600) == pytest.approx(0.5)
    assert goodput(10, 20, 5) == 0


# -- what is refused -------------------------------------------------------------------------------

REFUSED = [
    ("--scenario kill-trainr", "did you mean 'kill-trainer'? there are all, process, power"),
    ("--scenario sigterm --point nowhere", "--point nowhere: unknown; there are random,"),
    ("--scenario exception --point manifest", "exception strikes at forward, backward, update"),
    ("--strategies async,gocpt", "did you mean 'gockpt'"),
    ("--strategies none", "cannot be tested"),
    ("--strategies ,", "names none"),
    ("--trials 0", "at least 1"),
    ("--mtbf soon", "not a time"),
    ("--sabotage skip-gatee", "did you mean 'skip-gate'"),
    ("--model gpt-nanoo", "did you mean 'gpt-nano'"),
    ("--result out.pt", "--command is missing"),
    ("--json nowhere/x.json", "nowhere"),
    ("--dir nowhere/below", "no such directory"),
]


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_wrong_use_is_one_line(
    line: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(["crash-test", *line.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("gockpt: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_data_is_refused_and_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("all of it")
    before = mine.stat().st_mtime_ns
    assert call(["crash-test", "--dir", str(mine)]) == 2
    assert "other data" in capsys.readouterr().err
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    assert (mine / "thesis.txt").read_text() == "all of it"
    assert mine.stat().st_mtime_ns >= before
    assert not (mine / MARKER).exists()


def test_the_list_names_every_scenario_and_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["crash-test", "--list"]) == 0
    out = capsys.readouterr().out
    assert [name for name in [*SCENARIOS, *POINTS] if name not in out] == []


def test_the_list_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["crash-test", "--list", "--json", "-"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert (document["schema"], document["kind"]) == (1, "crash-list")
    assert {one["scenario"]: tuple(one["points"]) for one in document["scenarios"]} == {
        name: one.points for name, one in SCENARIOS.items()
    }
    assert {one["point"]: one["when"] for one in document["points"]} == POINTS
    assert "kill-trainer" in said.err


@pytest.mark.parametrize("tokens", [None, 64, 128])
def test_the_command_line_of_one_trial_makes_the_same_job(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(
        scenario="sigterm", point="random", strategies="async", trials=1, seed=7, model="gpt-nano",
        device="cpu", tokens=tokens, quick=False, sabotage=None, directory=None,
    )  # fmt: skip
    setup = prepare(options)
    line = shlex.split(again(setup, setup.cases[0]))
    assert ("--tokens" in line) == (tokens is not None)
    made: list[Setup] = []

    def refuse(wanted: Options) -> Setup:
        made.append(prepare(wanted))
        raise ConfigError("enough is known")

    monkeypatch.setattr(crash_setup, "prepare", refuse)
    assert call(line[1:]) == 2
    assert (made[0].task, made[0].cases) == (setup.task, setup.cases)


# -- trials ----------------------------------------------------------------------------------------


def test_trials_that_pass_and_one_that_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = tried("--scenario kill-trainer --point state-middle --strategies gockpt,async")
    assert code == 0
    assert document["summary"]["trials"] == 2
    passed, skipped = document["trials"]
    assert passed["passed"], passed["detail"]
    assert passed["restored_step"] >= (passed["promised_step"] or 0)
    assert passed["lost_steps"] == passed["injected_at_step"] - (passed["restored_step"] or 0)
    assert passed["bit_identical"]
    assert passed["continued_identical"]
    assert passed["sabotage"] is None
    assert sum(passed["recovery"].values()) == pytest.approx(passed["recovery_s"])
    assert (skipped["passed"], skipped["restored_step"]) == (None, None)
    assert "in one window" in skipped["detail"]
    out = capsys.readouterr().out
    assert "1 passed, 0 failed, 1 skipped" in out
    assert "goodput" in out
    database = tmp_path / "user-data" / "gockpt" / "results.db"
    assert out.splitlines()[-1].split() == ["gockpt", "dashboard", "--db", str(database), "--open"]
    with Store(database) as store:
        assert store.document("latest") == document
    assert marked(tmp_path) == []
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(PYTHONS_OWN)}
    assert left == {"out.json", "user-data"}


def test_a_pass_whose_step_waits_for_its_checkpoint_when_the_trainer_dies_is_not_lost() -> None:
    """It was computed, and what is restored has it: once, it was missing in the history."""
    code, document = tried("--scenario kill-trainer --point half-written --strategies sync")
    assert code == 0
    (trial,) = document["trials"]
    assert trial["passed"], trial["detail"]
    assert trial["restored_step"] == trial["injected_at_step"] + 1
    assert (trial["lost_steps"], trial["lost_s"]) == (0, 0)


@pytest.mark.parametrize(
    ("restored", "failed", "wrong"), [(8, 1, False), (8, 2, True), (12, 1, True), (12, 0, False)]
)
def test_what_the_training_does_to_a_checkpoint_it_does_again_in_a_life_that_comes_past_it(
    restored: int, failed: int, wrong: bool
) -> None:
    first = SimpleNamespace(failed=1, ready=None)
    second = SimpleNamespace(failed=failed, ready=SimpleNamespace(restored=restored))
    facts = Facts(may_fail=True, recurs_at=12)
    trial: Any = SimpleNamespace(lives=[first, second], facts=facts)
    assert bool(crash_verdict._failures(trial)) is wrong
    facts.recurs_at = None
    assert bool(crash_verdict._failures(trial)) is (failed > 0)


def test_a_planted_bug_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = tried("--sabotage ignore-checksum")
    assert code == 1
    assert document["sabotage"] == "ignore-checksum"
    (trial,) = document["trials"]
    assert (trial["passed"], trial["sabotage"]) == (False, "ignore-checksum")
    assert trial["different_tensors"]
    assert "--sabotage ignore-checksum" in trial["command"]
    out = capsys.readouterr().out
    assert "to see it again" in out
    assert "was found" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SABOTAGES.keys() - {"ignore-checksum"}))
def test_every_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    code, document = tried(f"--sabotage {name}")
    assert code == 1
    assert document["summary"]["failed"] > 0, document["trials"]


@pytest.mark.slow
def test_saving_in_place_fails_where_it_is_known_to_and_decides_nothing() -> None:
    code, document = tried("--scenario kill-both --point half-written --strategies torch-save")
    assert code == 0
    (trial,) = document["trials"]
    assert trial["passed"] is False
    (summary,) = document["summary"]["strategies"]
    assert (summary["failed"], summary["decides"]) == (1, False)


def test_an_interrupt_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "gockpt", "crash-test", "--scenario", "reboot"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + ENDED
        while not any(tmp_path.glob("gockpt-crash-*/trial-*/life-*.log")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate(timeout=ENDED)
    assert process.returncode == 130
    assert said.decode().splitlines() == ["gockpt: interrupted"]
    assert marked(tmp_path) == []
    assert not list(tmp_path.glob("gockpt-crash-*"))


# -- parts -----------------------------------------------------------------------------------------


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from types import SimpleNamespace
from gockpt.cli import crash_recorder
from gockpt.storage import fs
root = Path({str(tmp_path)!r})
crash_recorder.record(root, root / "log")
fs.mkdir(root / "d")
fd = fs.create(root / "d" / "f")
fs.pwrite_all(fd, memoryview(b"abc"), 5, path=root / "d" / "f")
fs.fdatasync(fd, path=root / "d" / "f")
fs.rename(root / "d" / "f", root / "d" / "g")
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=ENDED)
    log = read(tmp_path / "log")
    assert [op.call for op in log] == ["mkdir", "create", "write", "fdatasync", "rename"]
    assert (log[2].data, log[2].offset, log[2].path) == (b"abc", 5, Path("d/f"))
    assert isinstance(log[4], Op)
    assert log[4].target == Path("d/g")
