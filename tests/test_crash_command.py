"""``gockpt crash-test --command``: programs of tests/trainers, killed at known places.

The programs wait, when told so, at a place until somebody kills them (tests/trainers/handshake.py);
the kill looks for the sign that they have come there. So no test depends on how fast anything is.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from gockpt.cli import crash_command, crash_command_lives, crash_command_log
from gockpt.cli.crash_command_document import Golden
from gockpt.cli.crash_command_files import compare
from gockpt.cli.crash_command_lives import Kill, Launch
from gockpt.cli.main import call

TRAINERS = Path(__file__).parent / "trainers"
STEP = r"step.(\d+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAt(Kill):
    """When the program says that it has come to a place, and some file is there."""

    after: float = 0.0
    everything: bool = False
    place: str
    file: str = "*"

    def due(self, seconds: float, directory: Path) -> bool:
        return (directory / f"reached-{self.place}").exists() and any(directory.glob(self.file))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call of the command came to."""

    code: int
    document: dict[str, Any]
    out: str

    @property
    def trial(self) -> dict[str, Any]:
        """The first one."""
        found: dict[str, Any] = self.document["trials"][0]
        return found


class Bench:
    """Calls the command, and looks that nothing is left."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.root, self.patch, self.capsys = root, patch, capsys
        self.kills: list[Kill] = []
        patch.chdir(root)
        patch.setenv("XDG_DATA_HOME", str(root / "user-data"))
        patch.setenv("TMPDIR", str(root / "tmp"))
        patch.setattr("tempfile.tempdir", None)
        (root / "tmp").mkdir()

    def kill_at(self, *kills: KillAt) -> None:
        """In every trial."""
        self.patch.setenv("TRAINER_WAITS_AT", ",".join(one.place for one in kills))
        self.patch.setattr(crash_command, "draw_kills", lambda *_: list(kills))

    def __call__(self, program: str, *results: str, more: str = "--trials 1") -> Outcome:
        code = self.call(program, *results, more=f"{more} --db {self.root}/r.db --json out.json")
        document = json.loads((self.root / "out.json").read_text())
        return Outcome(code=code, document=document, out=self.capsys.readouterr().out)

    def call(self, program: str, *results: str, more: str = "") -> int:
        command = f"{sys.executable} {TRAINERS}/{program}"
        given = [word for one in results for word in ("--result", one)]
        try:
            return call(["crash-test", "--command", command, *given, *more.split()])
        finally:
            assert list((self.root / "tmp").iterdir()) == []
            assert left_behind(self.root) == []

    def refused(self, program: str, *results: str, more: str = "") -> str:
        """What it says, in a line, when it refuses."""
        assert self.call(program, *results, more=more) == 2
        said: str = self.capsys.readouterr().err
        assert said.startswith("gockpt: ")
        assert said.count("\n") == 1
        return said


def left_behind(root: Path) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter():
        try:
            where = one.environ().get("GOCKPT_TRIAL_DIR", "")
        except psutil.Error:
            continue
        if where.startswith(str(root)) and one.status() != psutil.STATUS_ZOMBIE:
            found.append(one)
    return found


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    return Bench(tmp_path, monkeypatch, capsys)


# -- three trainers --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trainer_on_gockpt(bench: Bench) -> None:
    """Killed two steps behind a checkpoint that is durable."""
    committed = "checkpoints/step-000000004-*/rank-00000.json"
    bench.kill_at(KillAt(place="6", file=committed, everything=True))
    done = bench("on_gockpt.py {dir}", "final.safetensors", "{dir}/final.json",
                 more=f"--trials 1 --step-regex {STEP}")  # fmt: skip
    assert done.code == 0, done.out
    trial = done.trial
    assert trial["passed"] is trial["continued_identical"] is True
    assert [one["compared_as"] for one in trial["files"]] == ["safetensors", "JSON"]
    assert (trial["injected_at_step"], trial["restored_step"], trial["lost_steps"]) == (6, 4, 2)
    assert trial["recovery_s"] > 0


@pytest.mark.slow
def test_a_trainer_that_saves_by_itself_and_well(bench: Bench) -> None:
    bench.kill_at(KillAt(place="6"))
    done = bench("torch_save.py", "final.pt", more=f"--trials 1 --step-regex {STEP}")
    assert done.code == 0, done.out
    assert done.trial["files"] == [
        {"name": "final.pt", "compared_as": "torch.save", "differences": [], "count": 0}
    ]
    assert [one["killed"] for one in done.trial["launches"]] == [True, False]
    assert done.trial["lost_steps"] == 2
    assert "1 of 1 trials ended as the golden run did" in done.out
    last = done.out.splitlines()[-1].split()
    assert last == ["gockpt", "dashboard", "--db", f"{bench.root}/r.db", "--open"]


@pytest.mark.slow
def test_a_forgotten_schedule_is_found(bench: Bench) -> None:
    # That a program repeats is looked at in a test of its own, with one that is quicker to start.
    bench.patch.setattr(crash_command, "_check_repeats", lambda *_: None)
    bench.kill_at(KillAt(place="6"))
    done = bench("torch_save.py --forget scheduler", "final.pt")
    assert done.code == 1
    assert done.trial["passed"] is done.trial["continued_identical"] is False
    first = done.trial["files"][0]["differences"][0]
    assert first.startswith("model.0.weight: ")
    assert "of 1024 elements differ, by at most" in first
    assert any(".lr: " in one for one in done.trial["files"][0]["differences"])
    logs = Path(done.trial["logs"])
    assert logs.is_relative_to(bench.root)
    assert "step 6" in (logs / "launch-1.log").read_text()
    assert "FAILED" in done.out


# -- what can come of a trial ----------------------------------------------------------------------


def test_nothing_is_lost_where_every_step_is_saved(bench: Bench) -> None:
    bench.kill_at(KillAt(place="2"), KillAt(place="half-5"))
    done = bench("counter.py", "result.json", more=f"--trials 2 --step-regex {STEP}")
    assert done.code == 0, done.out
    assert [one["lost_steps"] for one in done.document["trials"]] == [0, 0]
    assert done.document["summary"] == {"trials": 2, "passed": 2, "failed": 0, "skipped": 0}


def test_half_of_a_checkpoint_is_found(bench: Bench) -> None:
    """Written in place: no launch after the kill can read it."""
    bench.patch.setattr(crash_command_lives, "PAUSE", 0.0)
    bench.kill_at(KillAt(place="half-3"))
    done = bench("counter.py in-place", "result.json")
    assert done.code == 1
    assert len(done.trial["launches"]) == 2 + crash_command_lives.RESTARTS
    assert "exit code 1" in done.trial["detail"]
    assert "JSONDecodeError" in done.trial["detail"]
    assert len(list(Path(done.trial["logs"]).iterdir())) == len(done.trial["launches"])


@pytest.mark.parametrize("everything", [False, True])
def test_what_leaves_its_session_is_ended_with_the_trial(bench: Bench, everything: bool) -> None:
    """The fixture looks for processes; the helper lives through a kill of the group only."""
    alive: list[int] = []

    class Look(KillAt):
        __slots__ = ()

        def due(self, seconds: float, directory: Path) -> bool:
            if self.place == "4" and KillAt.due(self, seconds, directory):
                alive.append(len(left_behind(bench.root)))
            return KillAt.due(self, seconds, directory)

    bench.kill_at(KillAt(place="2", everything=everything), Look(place="4"))
    assert bench("counter.py helper", "result.json").code == 0
    # The program itself, its helper, and the helper of the launch before.
    assert alive == [2 if everything else 3]


def test_a_program_that_ends_before_its_kill_is_skipped(bench: Bench) -> None:
    bench.patch.setattr(
        crash_command, "draw_kills", lambda *_: [Kill(after=1000, everything=False)]
    )
    assert "could be killed" in bench.refused("counter.py", "result.json", more="--trials 1")


def test_one_skipped_trial_is_not_a_passed_one(bench: Bench) -> None:
    never = Kill(after=1000, everything=False)
    plans = iter([[KillAt(place="2")], [never]])
    bench.kill_at(KillAt(place="2"))
    bench.patch.setattr(crash_command, "draw_kills", lambda *_: next(plans))
    waits = iter(["2", ""])
    live = crash_command.live

    def with_waits(*args: Any, **named: Any) -> list[Launch]:
        bench.patch.setenv("TRAINER_WAITS_AT", next(waits))
        return live(*args, **named)

    bench.patch.setattr(crash_command, "live", with_waits)
    done = bench("counter.py", "result.json", more="--trials 2")
    assert done.document["summary"] == {"trials": 2, "passed": 1, "failed": 0, "skipped": 1}
    assert done.document["trials"][1]["passed"] is None
    assert "1 of 1 trials ended as the golden run did, 1 skipped" in done.out


def test_a_program_that_hangs_after_a_kill_is_stopped(bench: Bench) -> None:
    bench.patch.setattr("gockpt.cli.crash_command_document.LEAST_DEADLINE", 2.0)
    bench.patch.setattr("gockpt.cli.crash_command_document.DEADLINE_FACTOR", 0.0)
    bench.patch.setenv("TRAINER_WAITS_AT", "2,4")
    bench.patch.setattr(crash_command, "draw_kills", lambda *_: [KillAt(place="2")])
    done = bench("counter.py", "result.json")
    assert done.code == 1
    assert "did not end within" in done.trial["detail"]


def test_ctrl_c_leaves_nothing(bench: Bench) -> None:
    """The fixture looks for files and processes."""

    class CtrlC(KillAt):
        __slots__ = ()

        def due(self, seconds: float, directory: Path) -> bool:
            if KillAt.due(self, seconds, directory):
                raise KeyboardInterrupt
            return False

    bench.kill_at(CtrlC(place="3"))
    assert bench.call("counter.py helper", "result.json", more="--db r.db") == 130


def test_trials_are_in_the_database(bench: Bench) -> None:
    from gockpt.results import Store

    bench.kill_at(KillAt(place="2"))
    done = bench("counter.py", "result.json")
    with Store(bench.root / "r.db") as store:
        assert store.document() == done.document
        assert [one.scenario for one in store.trials(done.document["run_id"])] == ["command"]


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "results", "more", "says"),
    [
        ("counter.py fails", ["result.json"], "", "exit code 1 with nobody killing it"),
        ("counter.py fails", ["result.json"], "", "no money left"),
        ("counter.py hangs", ["result.json"], "--timeout 1", "longer --timeout"),
        ("counter.py", ["other.json"], "", "made no such file in its directory"),
        ("counter.py", [], "", "needs a --result"),
        ("counter.py", ["/etc/passwd"], "", "must lie in the directory"),
        ("counter.py", ["a/../../b"], "", "must lie in the directory"),
        ("counter.py 'open", ["result.json"], "", "close the quotation"),
        ("counter.py", ["result.json"], "--trials 0", "--trials must be at least 1"),
        ("counter.py", ["result.json"], "--step-regex step", "has no group"),
        ("counter.py", ["result.json"], "--step-regex (", "--step-regex"),
        ("counter.py", ["result.json"], "--first-kill-after 1000", "takes only"),
        ("counter.py", ["result.json"], "--timeout 0", "--timeout must be above 0"),
    ],
)
def test_wrong_use(bench: Bench, program: str, results: list[str], more: str, says: str) -> None:
    assert says in bench.refused(program, *results, more=f"{more} --db r.db")


def test_a_program_that_does_not_repeat_is_refused_not_judged(bench: Bench) -> None:
    bench.kill_at(KillAt(place="2"))
    said = bench.refused("counter.py clock", "result.json", more="--trials 1")
    assert "two runs that nobody killed end differently (result.json: clock: " in said


def test_a_command_that_is_not_there(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["crash-test", "--command", "no-such-program", "--result", "x"]) == 2
    assert "'no-such-program' cannot be run" in capsys.readouterr().err
    assert call(["crash-test", "--result", "x"]) == 2
    assert "--command is missing" in capsys.readouterr().err


# -- when it is killed -----------------------------------------------------------------------------


def golden(seconds: float, ready: float, tmp_path: Path) -> Golden:
    launch = Launch(seconds=seconds, code=0, killed=None, ready_s=ready, steps=(), log=tmp_path,
                    last_lines="")  # fmt: skip
    return Golden(directory=tmp_path, launch=launch)


def test_the_same_seed_gives_the_same_kills(tmp_path: Path) -> None:
    run = golden(10.0, 2.0, tmp_path)
    plans = [crash_command.draw_kills(random.Random(f"0/{n}"), run, 2.0) for n in range(200)]
    assert plans == [
        crash_command.draw_kills(random.Random(f"0/{n}"), run, 2.0) for n in range(200)
    ]
    firsts = [plan[0].after for plan in plans]
    assert 2.0 <= min(firsts) < 2.5
    assert 9.0 < max(firsts) <= 9.5
    assert {len(plan) for plan in plans} == {1, 2, 3}
    assert {kill.everything for plan in plans for kill in plan} == {True, False}


def test_the_output_that_is_kept_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_command_log, "LIMIT", 1000)
    source = tmp_path / "source"
    source.write_bytes(b"first\n" + b"step 1\r" * 1000 + b"last\n")
    log = crash_command_log.Log(source.open("rb"), tmp_path / "log", None)
    log.join(10)
    kept = (tmp_path / "log").read_text()
    assert kept.startswith("first\n")
    assert kept.endswith("last\n")
    assert "bytes left out" in kept
    assert len(kept) < 1050


# -- comparing -------------------------------------------------------------------------------------


def differences(tmp_path: Path, name: str, make: Any) -> list[str]:
    """Of two files, written by ``make(path, 0)`` and ``make(path, 1)``."""
    for side in (0, 1):
        (tmp_path / str(side)).mkdir()
        make(tmp_path / str(side) / name, side)
    (found,) = compare(tmp_path / "0", tmp_path / "1", [name])
    return list(found.differences)


NAN, MINUS_ZERO = float("nan"), -0.0


@pytest.mark.parametrize(
    ("golden", "other", "says"),
    [
        (torch.zeros(3), torch.zeros(3), None),
        (torch.tensor(NAN), torch.tensor(NAN), None),
        (torch.empty(0, 5), torch.empty(0, 5), None),
        (torch.tensor(0.0), torch.tensor(MINUS_ZERO), "x: 1 of 1 elements differ, by at most 0"),
        (torch.ones(4), torch.tensor([1, 1, 1.5, 3]), "x: 2 of 4 elements differ, by at most 2"),
        (torch.zeros(2), torch.zeros(3), "x: float32[2] → float32[3]"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), "x: float32[2] → bfloat16[2]"),
    ],
)
def test_tensors(tmp_path: Path, golden: torch.Tensor, other: torch.Tensor, says: str) -> None:
    expected = [] if says is None else [says]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder, name, save in (
        ("a", "f.safetensors", lambda value, path: save_file({"x": value}, path)),
        ("b", "f.bin", lambda value, path: torch.save({"x": value}, path)),
    ):
        found = differences(
            tmp_path / folder, name, lambda path, side, save=save: save([golden, other][side], path)
        )
        assert found == expected


@pytest.mark.parametrize(
    ("golden", "other", "says"),
    [
        ({"a": [1, {"b": NAN}]}, {"a": [1, {"b": NAN}]}, []),
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 3.0}]}, ["a[1].b: 2.0 → 3.0"]),
        ({"a": 1}, {"a": 1.0}, ["a: 1 → 1.0"]),
        ({"a": 1}, {"b": 1}, ["a: is missing", "b: is there, and not after the golden run"]),
        ([1, 2], [1], ["the whole: 2 entries → 1 entries"]),
    ],
)
def test_json(tmp_path: Path, golden: Any, other: Any, says: list[str]) -> None:
    def make(path: Path, side: int) -> None:
        path.write_text(json.dumps([golden, other][side]))

    assert differences(tmp_path, "x.json", make) == says


def test_other_files_by_bytes(tmp_path: Path) -> None:
    texts = ("some text", "some next")
    found = differences(tmp_path, "x.txt", lambda path, side: path.write_text(texts[side]))
    assert found == ["byte 5: 0x74 → 0x6e"]


def test_a_damaged_file_is_a_difference(tmp_path: Path) -> None:
    def make(path: Path, side: int) -> None:
        torch.save({"x": torch.zeros(9)}, path)
        if side:
            path.write_bytes(path.read_bytes()[:-40])

    (said,) = differences(tmp_path, "x.pt", make)
    assert said.startswith("it cannot be read: ")


def test_what_only_pickle_can_read_is_compared_by_bytes_and_says_so(tmp_path: Path) -> None:
    for side in ("0", "1"):
        (tmp_path / side).mkdir()
        torch.save({"x": np.random.RandomState(0)}, tmp_path / side / "x.pt")
    (found,) = compare(tmp_path / "0", tmp_path / "1", ["x.pt"])
    assert found.kind.startswith("bytes, as it cannot be read as torch.save")
    assert found.differences == ()


def test_directories_are_compared_file_by_file(tmp_path: Path) -> None:
    for side, names in (("0", ["a.txt", "b.txt"]), ("1", ["b.txt", "c.txt"])):
        (tmp_path / side / "out").mkdir(parents=True)
        for name in names:
            (tmp_path / side / "out" / name).write_text(name)
    found = compare(tmp_path / "0", tmp_path / "1", ["out"])
    assert [(one.name, one.differences) for one in found] == [
        ("out/a.txt", ("the file is missing",)),
        ("out/b.txt", ()),
        ("out/c.txt", ("the file is there, and not after the golden run",)),
    ]
