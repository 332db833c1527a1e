"""``crash-test --table1``: the arithmetic by hand, which runs it takes, and what it says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gockpt.cli import crash_table1_find
from gockpt.cli.crash_scenarios import chosen
from gockpt.cli.crash_table1 import STRATEGIES, Taken, calibrated_restart_s, formula, lines
from gockpt.cli.main import app, call
from gockpt.cli.paper_figures import TABLE1_DEVICE, TABLE1_NAMES, TABLE1_TOKENS_PER_S
from gockpt.results import Store
from gockpt.strategies.policy import POLICIES

DB = "results.db"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user-data"))


# -- the arithmetic --------------------------------------------------------------------------------


def taken(**more: Any) -> dict[str, Taken]:
    """The same of every strategy."""
    given = {"stall_s": 0.0, "durable_s": 0.0, "windows": 1, "recovery_s": 0.0, "trials": 1}
    return dict.fromkeys(STRATEGIES, Taken(**{**given, **more}))


def test_without_a_stall_the_time_to_durable_decides() -> None:
    """24 steps of 0.5 s last 12 s. Lost: half of that and 12 − 4 · 0.5 = 10 s, of 600 s."""
    one = lines(taken(durable_s=12.0, windows=5, recovery_s=30.0), 0.5, 600.0)[0]
    assert (one.interval, one.lag_s) == (24, 10.0)
    assert one.tokens_per_s == pytest.approx(930 * (600 - 6 - 10) / (600 + 30))


def test_with_a_stall_it_is_at_youngs_interval() -> None:
    """√(2 · 3 · 600) = 60 s from one checkpoint to the next, 3 of them stall: 114 steps."""
    one = lines(taken(stall_s=3.0), 0.5, 600.0)[0]
    assert one.interval == 114
    assert one.tokens_per_s == pytest.approx(930 * 57 / 60 * 570 / 600)


def test_the_difference_is_to_the_papers_figure_with_the_papers_restart() -> None:
    one = lines(taken(recovery_s=5.0, durable_s=6.0), 0.5, 600.0)[0]
    restart = calibrated_restart_s()
    expected = one.tokens_per_s * (600 + 5) / (600 + restart)
    assert one.tokens_per_s_paper_restart == pytest.approx(expected)
    assert one.difference == pytest.approx(expected / 758.0 - 1)


def test_one_restart_explains_the_papers_table_by_its_stalls() -> None:
    """Async by hand: 5.77 s to durable (17.3 GB at 3 GB/s), so √(2 · 1.311 · 594.2) = 39.47 s."""
    assert formula("async", 0.0) == pytest.approx(
        930 * (1 - 1.311 / 39.47) * (600 - 39.47 / 2 - 5.77) / 600, rel=1e-4
    )
    restart = calibrated_restart_s()
    assert restart == pytest.approx(77.9, abs=0.1)
    off = {name: formula(name, restart) / TABLE1_TOKENS_PER_S[name] - 1 for name in TABLE1_NAMES}
    assert max(abs(one) for one in off.values()) < 0.01


def test_another_rate_of_crashes_has_no_figures_of_the_paper() -> None:
    for one in lines(taken(), 0.5, 3600.0):
        assert (one.paper_tokens_per_s, one.difference, one.formula_tokens_per_s) == (None,) * 3


# -- which runs ------------------------------------------------------------------------------------


def row(strategy: str, stall: float = 0.4) -> dict[str, Any]:
    saves = strategy != "none"
    return {
        "strategy": strategy,
        "valid": True,
        "step_s": {"median": 0.446, "p95": 0.5},
        "stall": {"excess_s_per_checkpoint": stall if saves else 0.0},
        "latency_s": {"durable": 7.0 if saves else None},
        "windows": 5 if strategy.startswith("gockpt") else 1,
    }


def bench(run_id: str = "b1", created: str = "2026-01-01") -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": "bench",
        "run_id": run_id,
        "created": created,
        "environment": {"device": TABLE1_DEVICE, "emulated": True},
        "workload": {"model": "llama-3.2-1b", "interval": 18, "windows": None},
        "results": [row("none"), *(row(name) for name in STRATEGIES), row("none")],
    }


def trial(strategy: str, **more: Any) -> dict[str, Any]:
    given = {"scenario": "reboot", "passed": True, "source": "ssd", "recovery_s": 2.0}
    return {"strategy": strategy, **given, **more}


def crash_test(run_id: str = "c1", created: str = "2026-01-01") -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": "crash-test",
        "run_id": run_id,
        "created": created,
        "sabotage": None,
        "environment": {"device": TABLE1_DEVICE, "emulated": True},
        "workload": {"model": "llama-3.2-1b"},
        "trials": [trial(name) for name in STRATEGIES],
    }


def test_the_recovery_is_the_mean_of_trials_that_passed_and_read_from_the_ssd() -> None:
    document = crash_test()
    document["trials"] += [
        trial("gockpt", recovery_s=4.0),
        trial("gockpt", recovery_s=90.0, passed=False),
        trial("gockpt", recovery_s=None, passed=None),
        trial("gockpt", recovery_s=0.1, source="memory"),
    ]
    found = crash_table1_find.found(bench(), document)
    assert (found.taken["gockpt"].recovery_s, found.taken["gockpt"].trials) == (3.0, 2)
    assert found.taken["async"].recovery_s == 2.0


def test_a_stall_below_nothing_is_noise() -> None:
    document = bench()
    document["results"][5] = row("gockpt", stall=-0.01)
    assert crash_table1_find.found(document, crash_test()).taken["gockpt"].stall_s == 0.0


def test_what_does_not_count_is_not_taken() -> None:
    """Another job, forced windows, an invalid or unknown row; a planted bug."""
    for change in (
        {"results": [{**one, "step_s": {"median": 0.6}} for one in bench()["results"]]},
        {"workload": {**bench()["workload"], "windows": 3}},
        {"results": [{**one, "valid": one["strategy"] != "async"} for one in bench()["results"]]},
        {"results": [one for one in bench()["results"] if one["strategy"] != "gockpt-paper"]},
        {"results": [{**one, "latency_s": {"durable": None}} for one in bench()["results"]]},
    ):
        assert crash_table1_find.rows({**bench(), **change}) is None
    assert crash_table1_find.rows(bench()) is not None
    assert crash_table1_find.recoveries({**crash_test(), "sabotage": "skip-gate"}) is None
    assert crash_table1_find.recoveries({**crash_test(), "trials": [trial("gockpt")]}) is None


# -- the command -----------------------------------------------------------------------------------


def test_it_shows_both_tables_and_says_what_is_assumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    later = copy.deepcopy(bench("b2", "2026-01-02"))
    later["results"][1]["valid"] = False  # so that the newest one that is whole is b1
    with Store(DB) as store:
        store.add_bench(bench())
        store.add_bench(later)
        store.add_crash_test(crash_test())
    assert call(["crash-test", "--table1", "--db", DB, "--json", "out.json"]) == 0
    out = capsys.readouterr().out
    for said in (
        "llama-3.2-1b on emulated:v100s-pcie3 (emulated), a crash every 600 s",
        "by bench b1; recovery by crash test c1",
        "The paper does not say what it takes there",
        "786.4",
        "DCP-Async 697.8",
    ):
        assert said in out
    document = json.loads(Path("out.json").read_text())
    assert (document["kind"], document["emulated"], document["bench"]) == ("table1", True, "b1")
    assert [one["strategy"] for one in document["rows"]] == list(STRATEGIES)
    by_name = {one["strategy"]: one for one in document["rows"]}
    assert by_name["gockpt"]["paper_tokens_per_s"] is None
    assert by_name["gockpt-o-paper"]["paper_tokens_per_s"] == 794.1


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert call(["crash-test", "--table1", *line.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gockpt: ")
    assert err.count("\n") == 1
    return err


def test_what_is_missing_is_said_with_the_command_that_makes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = refused(f"--db {DB}", capsys)
    assert not Path(DB).exists()
    assert f"`{crash_table1_find.BENCH} --db {DB}`" in both
    assert f"`{crash_table1_find.CRASH_TEST} --db {DB}`" in both
    with Store(DB) as store:
        store.add_crash_test(crash_test())
    only = refused(f"--db {DB}", capsys)
    assert crash_table1_find.BENCH in only
    assert crash_table1_find.CRASH_TEST not in only


@pytest.mark.parametrize("line", ["--quick", "--seed 3", "--strategies gockpt", "--model gpt-nano"])
def test_options_of_trials_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"leave out {line.split()[0]}" in refused(line, capsys)


def test_the_commands_that_it_names_can_be_run() -> None:
    """No option, scenario or strategy in them is unknown; nothing is run."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for line in (crash_table1_find.BENCH, crash_table1_find.CRASH_TEST):
        _, name, *words = line.split()
        given = commands[name].make_context(name, words).params
        strategies = given["strategies"]
        assert set(STRATEGIES) <= set(strategies.split(",") if strategies else POLICIES)
    assert chosen(given["scenario"], given["point"])
