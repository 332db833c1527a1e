"""Suites of benches: what they run, how they compare, what they refuse. None is really run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gockpt.cli import bench_run, bench_suite, bench_suite_paper, bench_suites
from gockpt.cli.bench_document import Outcome, Round, document, reference
from gockpt.cli.bench_job import Failed, Measured, SavedCheckpoint
from gockpt.cli.bench_run import Report, View
from gockpt.cli.bench_setup import Options, Setup
from gockpt.cli.bench_suite import Ran, Request
from gockpt.cli.bench_suite_figures import (
    interval_for,
    none_step_s,
    state_to_window,
    throughput_at,
    tokens_for,
    with_tokens,
)
from gockpt.cli.bench_suite_sheet import Sheet, markdown
from gockpt.cli.bench_suite_sweep import RATIOS
from gockpt.cli.main import call
from gockpt.cli.paper_figures import BESIDE, PAPER
from gockpt.cli.task import Task, resolve
from gockpt.errors import AgentError
from gockpt.results import Store
from gockpt.workloads import find_preset

STALLS = {"async": 0.30, "async-o": 0.16, "gockpt-paper": 0.06, "gockpt-o-paper": 0.02}
"""Seconds a checkpoint; nobody else stalls."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user-data"))


# -- benches that were not run ---------------------------------------------------------------------


def measured(setup: Setup, strategy: str, late_s: float = 0.0) -> Measured:
    """A strategy whose stall is known, on a device that does a step in 0.2 s."""
    targets = (
        [] if strategy == "none" else list(range(setup.interval, setup.steps + 1, setup.interval))
    )
    stall = STALLS.get(strategy, 0.0)
    counted = setup.steps + 1 - setup.warmup
    each = len([step for step in targets if step > setup.warmup])
    return Measured(
        steps=[(step, 0.2) for step in range(1, setup.steps + 2)],
        loop_s=0.2 * counted + stall * each,
        blocked_s=stall * each,
        drain_s=0.1,
        hook_s=0.001,
        checkpoints=[
            SavedCheckpoint(step=step, committed=True, windows=2, proof="exact", identical=True,
                            durable_s=1.0)
            for step in targets
        ],
        in_flight_max=1,
        state_bytes=1000 * len(targets),
        gradient_bytes=300 * len(targets),
        persisted_bytes=1100 * len(targets),
        predicted_bytes=3000,
        overruns=0,
        overrun_s=late_s,
        worst_overrun_s=late_s,
        events={},
        warnings=[],
        spans=[],
    )  # fmt: skip


def made_document(setup: Setup, run_id: str, late: str = "") -> dict[str, Any]:
    outcomes = [
        Outcome(
            strategy=strategy,
            result=measured(setup, strategy, late_s=9.0 if strategy == late else 0.0),
            trainer_bytes=500,
            agent_bytes=100,
        )
        for strategy in setup.strategies
    ]
    one = Round(outcomes=outcomes, against=reference(outcomes, idle_agent_bytes=50))
    return document(setup, [one], run_id=run_id, created="2026-01-01T00:00:00+00:00")


def request(**given: Any) -> Request:
    """As the command line makes it; ``only`` is not an option of a bench."""
    only = given.pop("only", None)
    fields: dict[str, Any] = {
        "model": "gpt-1.3b", "device": "auto", "strategies": None, "steps": 36, "interval": 12,
        "tokens": None, "windows": None, "precision": None, "seed": 0, "data": None,
        "directory": None, "profile_file": None,
    }  # fmt: skip
    return Request(options=Options(**{**fields, **given}), given=frozenset(given), only=only)


def ran(name: str, late: str = "", **given: Any) -> list[Ran]:
    prepared = bench_suites.prepare(name, request(**given))
    return [
        Ran(label=label, setup=setup, document=made_document(setup, f"run-{number}", late))
        for number, (label, setup) in enumerate(prepared.setups)
    ]


def task(model: str = "gpt-760m", device: str = "emulated:a100-pcie4") -> Task:
    return resolve(model=model, device=device, tokens=None, precision=None)[0]


# -- what is reckoned ------------------------------------------------------------------------------


def test_a_stall_tells_the_throughput_at_any_interval() -> None:
    assert throughput_at(50, 0.5, 0.2) == pytest.approx(10 / 10.5)
    assert throughput_at(200, 0.5, 0.2) == pytest.approx(40 / 40.5)
    assert throughput_at(50, None, 0.2) is None
    assert throughput_at(50, 0.5, None) is None


def test_the_step_of_none_is_of_rows_that_count() -> None:
    found = {
        "workload": {"tokens_per_step": 100},
        "results": [
            {"strategy": "none", "valid": True, "tokens_per_s": {"loop": 500.0}},
            {"strategy": "gockpt", "valid": True, "tokens_per_s": {"loop": 1.0}},
            {"strategy": "none", "valid": False, "tokens_per_s": {"loop": 10.0}},
        ],
    }
    assert none_step_s(found) == pytest.approx(0.2)
    found["results"] = []
    assert none_step_s(found) is None


@pytest.mark.parametrize("ratio", RATIOS)
def test_tokens_are_found_for_a_ratio(ratio: float) -> None:
    job = task()
    tokens = tokens_for(job, ratio)
    assert state_to_window(with_tokens(job, tokens)) == pytest.approx(ratio, rel=0.05)
    assert tokens % 64 == 0
    assert tokens < job.preset.context or tokens % job.preset.context == 0


def test_checkpoints_are_so_far_apart_that_the_disk_keeps_up() -> None:
    job = task("gpt-1.3b")
    step = 0.282  # docs/metrics.md: the default job; 18.4 GB take 3.07 s
    assert interval_for(job, least=3, steps=None) * step > 3.07
    assert interval_for(job, least=99, steps=None) == 99
    assert interval_for(job, least=3, steps=8) == 4
    assert interval_for(task("gpt-tiny", "cpu"), least=3, steps=None) == 12


# -- paper -----------------------------------------------------------------------------------------


def test_the_paper_is_run_as_it_was() -> None:
    setups = [setup for _, setup in bench_suites.prepare("paper", request()).setups]
    assert [setup.task.model for setup in setups] == list(PAPER)
    for setup in setups:
        assert setup.task.device == "emulated:v100s-pcie3"
        assert setup.task.calibrated
        assert setup.strategies == ("none", *BESIDE, "none")
        assert (setup.steps, setup.interval) == (100, 50)
        assert setup.task.profile is not None
        assert setup.task.model in setup.task.profile.models


@pytest.mark.parametrize(("steps", "interval"), [(150, 50), (50, 50), (49, 24), (1, 1)])
def test_fewer_steps_shorten_the_interval_that_is_run(steps: int, interval: int) -> None:
    ((_, setup),) = bench_suites.prepare("paper", request(steps=steps, only="opt-350m")).setups
    assert (setup.steps, setup.interval) == (steps, interval)


def test_our_figures_stand_beside_the_papers() -> None:
    rows = bench_suite_paper.rows(ran("paper", only="llama-3.2-1b"))
    assert [row["strategy"] for row in rows] == list(BESIDE)
    row = rows[1]
    assert row["paper"] == {"source": "arXiv 2511.07035", "strategy": "Async-O", "stall_s": 0.962}
    assert row["blocked_s"] == pytest.approx(0.16)
    assert row["difference_s"] == pytest.approx(0.16 - 0.962)
    at_50, at_200 = row["throughput"]
    assert (at_50["interval"], at_50["basis"]) == (50, "measured")
    assert at_50["relative"] == pytest.approx(99 * 0.2 / (99 * 0.2 + 2 * 0.16))
    assert at_50["paper_relative"] == pytest.approx(900 / 930)
    assert (at_200["interval"], at_200["basis"]) == (200, "derived")
    assert at_200["relative"] == pytest.approx(40 / 40.16)
    assert at_200["difference"] == pytest.approx(40 / 40.16 - 922 / 930)


def test_a_short_run_derives_what_it_did_not_measure() -> None:
    rows = bench_suite_paper.rows(ran("paper", only="opt-350m", steps=24))
    (only,) = rows[0]["throughput"]
    assert (only["interval"], only["basis"]) == (50, "derived")
    assert only["relative"] == pytest.approx(10 / 10.3)


def test_the_papers_order_is_checked() -> None:
    rows = bench_suite_paper.rows(ran("paper", only="opt-350m"))
    assert [one["holds"] for one in bench_suite_paper.checks(rows)] == [True] * 4
    rows[3]["blocked_s"] = 0.5  # gockpt-o-paper
    assert [one["holds"] for one in bench_suite_paper.checks(rows)] == [False, True, True, True]
    rows[3]["blocked_s"] = 0.02
    rows[4]["blocked_s"] = 0.006  # gockpt: 4 % of async-o, but 30 % of gockpt-o-paper
    assert [one["holds"] for one in bench_suite_paper.checks(rows)] == [True, True, False, True]
    rows[4]["throughput"][0]["relative"] = 0.997
    assert [one["holds"] for one in bench_suite_paper.checks(rows)] == [True, True, False, False]


def test_nothing_is_claimed_of_a_row_that_does_not_count() -> None:
    rows = bench_suite_paper.rows(ran("paper", late="async", only="opt-350m"))
    assert [one["holds"] for one in bench_suite_paper.checks(rows)] == [None] * 4
    assert [one["holds"] for one in bench_suite_paper.checks(rows[:2])] == [None] * 4


# -- sweep and scale -------------------------------------------------------------------------------


def test_the_sweep_varies_window_and_gradients() -> None:
    rows = bench_suites.SUITES["sweep"].rows(ran("sweep"))
    assert len(rows) == 2 * len(RATIOS) * 3
    ours = [row for row in rows if row["strategy"] == "gockpt"]
    for bits, half in ((16, ours[: len(RATIOS)]), (32, ours[len(RATIOS) :])):
        assert {row["gradient_bits"] for row in half} == {bits}
        assert [row["state_to_window"] for row in half] == pytest.approx(RATIOS, rel=0.05)
        predicted = [row["predicted_s"] for row in half]
        assert predicted == sorted(predicted)
        assert predicted[0] == 0 < predicted[-1]
    plain = [row["predicted_s"] for row in rows if row["strategy"] == "async"]
    assert plain == pytest.approx([760e6 * 12 / 25e9] * len(plain), rel=0.01)


def test_a_model_that_does_not_fit_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = bench_suites.prepare("scale", request())
    assert [label for label, _ in prepared.setups][-1] == "gpt-13b"
    assert prepared.left_out == []
    monkeypatch.setattr("gockpt.hostmemory.available", lambda: 1_000_000_000)
    prepared = bench_suites.prepare("scale", request())
    assert {one["label"] for one in prepared.left_out} >= {"gpt-13b"}
    assert all("of memory" in one["reason"] for one in prepared.left_out)


def test_a_model_too_large_for_the_device_says_so() -> None:
    suite = bench_suites.SUITES["scale"]
    rows = suite.rows(ran("scale", only="gpt-2.7b,gpt-13b"))
    (sheet,) = suite.sheets(rows)
    assert [row[0] for row in sheet.rows] == ["gpt-2.7b", "gpt-2.7b", "gpt-13b*", "gpt-13b*"]
    (remark,) = [note for note in sheet.notes if note.startswith("*")]
    assert "gpt-13b" in remark
    assert "80 GB" in remark
    assert rows[1]["full_memory_bytes_predicted"] > 2 * find_preset("gpt-2.7b").d_model
    assert rows[1]["memory_bytes"]["agent_added"] == 50


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--suite papers", "did you mean 'paper'?"),
        ("--suite paper --model gpt-1.3b", "--model: fixed by --suite paper"),
        ("--suite paper --interval 50 --tokens 8", "--interval, --tokens: fixed"),
        ("--suite paper --strategies gockpt", "--strategies: fixed"),
        ("--suite paper --profile-file x.toml", "--profile-file: fixed"),
        ("--suite sweep --windows 2", "--windows: fixed by --suite sweep"),
        ("--suite sweep --device cpu", "name emulated:PROFILE"),
        ("--suite scale --device auto", "name the device"),
        ("--suite scale --only gpt-13", "did you mean 'gpt-13b'?"),
        ("--suite paper --only ,", "choose from opt-350m"),
        ("--suite paper --seed -1", "--seed must not be negative"),
        ("--suite paper --dir nowhere", "--dir nowhere: no such directory"),
        ("--suite paper --steps 0", "--steps must be at least 1"),
        ("--suite paper --markdown no/such.md", "--markdown no/such.md: there is no directory"),
        ("--only opt-350m", "--only is of a suite"),
    ],
)
def test_refused_in_one_line(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(f"bench {line}".split()) == 2
    out, said = capsys.readouterr()
    assert says in said
    assert said.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


# -- from the command line -------------------------------------------------------------------------


def fake_runs(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Setup, str], dict[str, Any]]
) -> None:
    """Every bench is over at once, with a document that is made."""
    number = itertools.count(1)

    def run(setup: Setup, view: View) -> Report:
        return Report(document=make(setup, f"run-{next(number)}"))

    monkeypatch.setattr(bench_run, "run", run)


LINE = "bench --suite paper --only opt-350m,qwen3-0.6b --db r.db --json s.json --markdown s.md"


def test_a_suite_is_ordinary_benches_and_a_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runs(monkeypatch, made_document)
    assert call(LINE.split()) == 0
    out = capsys.readouterr().out
    found = json.loads(Path("s.json").read_text())
    assert (found["schema"], found["kind"], found["suite"]) == (1, "bench-suite", "paper")
    assert [one["run_id"] for one in found["runs"]] == ["run-1", "run-2"]
    assert {row["run_id"] for row in found["rows"]} == {"run-1", "run-2"}
    with Store(Path("r.db")) as store:
        assert [one.run_id for one in store.runs(kind="bench")] == ["run-1", "run-2"]
        assert store.document("run-2")["workload"]["model"] == "qwen3-0.6b"
        assert store.live() == []
    assert "2 benches, about" in out
    assert out.count("emulated") >= len(found["rows"])
    text = Path("s.md").read_text()
    assert "| opt-350m | gockpt | GoCkpt-O | emulated |" in text
    assert "Emulated by the profile v100s-pcie3" in text


def test_a_row_that_does_not_count_fails_the_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runs(monkeypatch, lambda setup, run_id: made_document(setup, run_id, late="gockpt"))
    assert call(LINE.split()) == 1
    found = json.loads(Path("s.json").read_text())
    assert [one["valid"] for one in found["runs"]] == [False, False]
    assert "gockpt (invalid)" in Path("s.md").read_text()


def test_a_bench_that_fails_does_not_end_the_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(setup: Setup, run_id: str) -> dict[str, Any]:
        if setup.task.model == "opt-350m":
            raise AgentError("the golden run failed: no reason")
        return made_document(setup, run_id)

    fake_runs(monkeypatch, make)
    assert call(LINE.split()) == 1
    found = json.loads(Path("s.json").read_text())
    assert found["failed"] == [{"label": "opt-350m", "reason": "the golden run failed: no reason"}]
    assert [one["label"] for one in found["runs"]] == ["qwen3-0.6b"]


@pytest.mark.parametrize("name", ["paper", "sweep", "scale"])
def test_a_strategy_that_failed_has_a_row_without_figures(name: str) -> None:
    """Its figures are unknown, none is zero, and nothing breaks on them."""
    suite = bench_suites.SUITES[name]
    (label, setup), *_ = bench_suites.prepare(name, request()).setups
    outcomes = [
        Outcome(strategy=strategy, result=Failed(kind="AgentError", reason="gone"),
                trainer_bytes=None, agent_bytes=None)
        for strategy in setup.strategies
    ]  # fmt: skip
    one = Round(outcomes=outcomes, against=reference(outcomes, idle_agent_bytes=None))
    made = document(setup, [one], run_id="run", created="2026-01-01T00:00:00+00:00")
    rows = suite.rows([Ran(label=label, setup=setup, document=made)])
    assert {row["blocked_s"] for row in rows} == {None}
    assert all(one["holds"] is None for one in suite.checks(rows))
    assert all(not any(sheet.valid) for sheet in suite.sheets(rows))


def test_interrupted_it_ends_as_a_bench_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(setup: Setup, run_id: str) -> dict[str, Any]:
        if run_id == "run-2":
            raise KeyboardInterrupt
        return made_document(setup, run_id)

    fake_runs(monkeypatch, make)
    assert call(LINE.split()) == 130
    with Store(Path("r.db")) as store:  # what was finished stays
        assert [one.run_id for one in store.runs()] == ["run-1"]
        assert store.live() == []
    assert not Path("s.json").exists()


def test_a_sheet_in_markdown() -> None:
    sheet = Sheet(
        title="A title",
        columns=("model", "strategy", "stall"),
        left=2,
        rows=[["a|b", "x", "1 s"], ["c", "y", "–"]],
        valid=[True, False],
        notes=["A note."],
    )
    assert markdown([sheet]) == (
        "**A title**\n\n| model | strategy | stall |\n| --- | --- | ---: |\n"
        "| a\\|b | x | 1 s |\n| c | y (invalid) | – |\n\nA note.\n"
    )


def test_every_suite_knows_its_name() -> None:
    assert {name: suite.name for name, suite in bench_suites.SUITES.items()} == {
        name: name for name in ("paper", "sweep", "scale")
    }
    assert bench_suite.ALWAYS.isdisjoint(
        name for suite in bench_suites.SUITES.values() for name in suite.takes
    )
