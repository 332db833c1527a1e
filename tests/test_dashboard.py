"""What the dashboard shows, without a server: queries, verdicts, sentences, commands, CSV."""

from __future__ import annotations

import csv
import io
import shlex
import sqlite3
from pathlib import Path

import pytest
from dashboard_kit import bench, crash_test, fill, gate, row, traces

from gockpt.dashboard import (
    asking,
    commands,
    csv_export,
    headlines,
    limits,
    live,
    queries,
    recovery,
)
from gockpt.dashboard.comparing import Side, compare
from gockpt.dashboard.metrics import METRICS
from gockpt.dashboard.opening import Problem, opened
from gockpt.dashboard.planning import Wishes, outlook
from gockpt.results import Baseline, Run, Store, Trace, ratios
from gockpt.results.documents import result_row
from gockpt.results.verdicts import report_of


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return fill(tmp_path / "results.db")


def side(run_id: str, *rows: dict[str, object]) -> Side:
    run = Run(run_id=run_id, kind="bench", created="", environment={}, config={})
    return Side(run=run, results=[result_row(run_id, i, one) for i, one in enumerate(rows)])


# -- opening ---------------------------------------------------------------------------------------


def complaint(path: Path) -> Problem:
    with pytest.raises(Problem) as info, opened(path) as store:
        store.runs()
    return info.value


def test_nothing_is_made_where_there_is_nothing(tmp_path: Path) -> None:
    found = complaint(tmp_path / "no" / "results.db")
    assert (found.status, found.command) == (404, "gockpt bench --model gpt-tiny")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_stays_empty(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    path.touch()
    assert complaint(path).status == 404
    assert path.read_bytes() == b""


def test_other_files_are_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    found = complaint(path)
    assert (found.status, found.title) == (500, "The results are damaged")
    assert "notes.txt" in found.message
    assert path.read_text() == "not a database\n" * 100


def test_results_of_another_version_are_refused(database: Path) -> None:
    with sqlite3.connect(database) as raw:
        raw.execute("UPDATE meta SET value = '99'")
    raw.close()
    found = complaint(database)
    assert found.status == 409
    assert "schema version 99" in found.message


def test_a_locked_database_is_given_up_in_time(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gockpt.dashboard.opening.BUSY_SECONDS", 0.01)
    with Store(database):
        pass  # the log of changes is gone, so that an exclusive lock is possible
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    other.execute("UPDATE meta SET value = value")
    assert complaint(database).status == 503
    other.execute("ROLLBACK")
    other.close()


def test_a_place_that_cannot_be_written_can_be_read(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    before = sorted(database.parent.iterdir())
    with opened(database) as store:
        assert len(store.runs()) == 3
    assert sorted(database.parent.iterdir()) == before


def test_reading_cannot_write(database: Path) -> None:
    with pytest.raises(Problem), opened(database) as store:
        store.delete("b1")
    with opened(database) as store:
        assert store.run("b1")


# -- queries ---------------------------------------------------------------------------------------


def test_runs_come_newest_first_in_pages(database: Path) -> None:
    with opened(database) as store:
        assert [one.run_id for one in queries.runs(store)] == ["c1", "b1", "b0"]
        assert [one.run_id for one in queries.runs(store, limit=1, offset=1)] == ["b1"]
        assert [one.run_id for one in queries.runs(store, kind="crash-test")] == ["c1"]
        assert queries.kinds(store) == {"bench": 2, "crash-test": 1}
        assert queries.trial_counts(store, ["c1"])["c1"] == {True: 2, False: 1, None: 1}


def test_the_spans_of_a_checkpoint_are_those_of_its_time(database: Path) -> None:
    with opened(database) as store:
        ours = next(one for one in store.results("b1") if one.strategy == "gockpt")
        saved = queries.checkpoints(store, [ours.id or 0])
        found = queries.checkpoint_spans(store, saved[1])
    assert not found.cut
    assert {one.lane for one in found.spans} == {
        "compute", "state", "stall", "replay", "proof", "write", "commit"
    }  # fmt: skip
    assert {one.step for one in found.spans if one.lane == "state"} >= {20, 21, 22, 23, 24}
    assert {one.step for one in found.spans if one.lane == "commit"} == {12, 24}  # 12: still on


def test_a_long_run_is_thinned_without_losing_a_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MOST_STEPS", 100)
    times = [(n, 0.25) for n in range(1, 5001)]
    times[3210] = (3211, 9.0)
    times[1234] = (1235, 0.01)
    with Store(tmp_path / "results.db") as store:
        store.add_bench(bench(), [Trace(result=0, steps=times)])
    with opened(tmp_path / "results.db") as store:
        found = queries.steps(store, store.results("b1")[0].id or 0)
    assert len(found) <= 110
    assert (3211, 9.0) in [(one.step, one.seconds) for one in found]
    assert (1235, 0.01) in [(one.step, one.seconds) for one in found]
    assert [one.step for one in found] == sorted(one.step for one in found)


def test_a_trend_is_oldest_first(database: Path) -> None:
    with opened(database) as store:
        past = queries.past(store, strategy="gockpt", model=None, device=None)
        emulated = queries.past(store, strategy="gockpt", model=None, device="cpu")
    assert [one.run.run_id for one in past] == ["b0", "b1"]
    assert [one.run.run_id for one in emulated] == ["b0"]


def test_a_run_is_compared_with_the_one_before_it_rather_one_that_is_alike(database: Path) -> None:
    def previous() -> str:
        with opened(database) as store:
            return ", ".join(one.run.run_id for one in asking.sides(store, None))

    assert previous() == "b0, b1"  # another device, but there is no other
    with Store(database) as store:
        store.add_bench(bench("b2", created="2026-01-02T10:00:00+00:00", profile=None))
    assert previous() == "b0, b2"  # measured, as b2 is
    with opened(database) as store:
        assert [one.run.run_id for one in asking.sides(store, ["b1"])] == ["b0", "b1"]


# -- figures and verdicts --------------------------------------------------------------------------


def test_figures_that_are_missing_are_dashes() -> None:
    for metric in METRICS.values():
        assert metric.read({}) is None
        assert metric.show(metric.read({"stall": 3, "bytes": None, "loop_s": "x"})) == "–"
    assert METRICS["throughput"].show(float("nan")) == "–"
    assert METRICS["traffic"].show(METRICS["traffic"].read(row("gockpt"))) == "1.31 ×"
    assert METRICS["memory"].show(METRICS["memory"].read(row("gockpt"))) == "3 MB"


def test_what_the_noise_could_do_is_not_decided() -> None:
    def loops(first: float, second: float, blocked: float) -> Side:
        return side("x", row("none", loop_s=first), row("gockpt", blocked=blocked),
                    row("none", loop_s=second))  # fmt: skip

    def verdict(quiet: bool) -> str:
        second = 10.01 if quiet else 11.0
        lines = compare([loops(10, second, 0.01), loops(10, second, 0.4)])["gockpt"]
        return next(one.cells[1].verdict for one in lines if one.metric.key == "throughput")

    assert verdict(quiet=True) == "worse"
    assert verdict(quiet=False) == "not decided"


def test_repeats_decide_where_there_are_several() -> None:
    def repeated(*blocked: float) -> Side:
        one = row("gockpt", blocked=sum(blocked) / len(blocked))
        one["samples"]["blocked_s_per_checkpoint"] = list(blocked)
        return side("x", one)

    def verdict(*sides: Side) -> str:
        lines = compare(sides)["gockpt"]
        return next(one.cells[1].verdict for one in lines if one.metric.key == "blocked")

    assert verdict(repeated(0.3, 0.31, 0.32), repeated(0.1, 0.11, 0.12)) == "better"
    assert verdict(repeated(0.1, 0.3, 0.5), repeated(0.2, 0.3, 0.39)) == "not decided"
    assert verdict(repeated(0.3), repeated(0.1)) == "unknown"


def test_the_headlines_say_what_a_newcomer_asks() -> None:
    rows = side("x", row("none"), row("async-o", blocked=0.4), row("gockpt", blocked=0.01),
                row("none", loop_s=10.001)).results  # fmt: skip
    told = {one.value: one.words for one in headlines.of_bench(rows)}
    assert "kept with gockpt" in told["99.70 %"]
    assert "less waiting for a checkpoint than with async-o" in told["40.0 ×"]
    assert "bit for bit" in told["3 of 3"]
    assert headlines.of_bench(rows[:2]) == []


def test_a_headline_does_not_claim_what_the_noise_could_do() -> None:
    rows = side("x", row("none"), row("gockpt", blocked=0.01), row("none", loop_s=10.5)).results
    assert "noise is larger" in headlines.of_bench(rows)[0].words


def test_a_run_can_be_typed_again(database: Path) -> None:
    with opened(database) as store:
        line = commands.again(store.run("b1"), [one.strategy for one in store.results("b1")])
        crash = commands.again(store.run("c1"), ["gockpt", "sync"], store.trials("c1"))
    assert line == (
        "gockpt bench --model gpt-1.3b --device emulated:a100-pcie4 --strategies async-o,gockpt "
        "--steps 36 --interval 12 --tokens 4096 --precision bf16-master --seed 0"
    )
    assert "--scenario kill-trainer,bit-flip,sigterm" in crash
    assert "--trials 4" in crash


def test_a_command_of_a_hostile_run_is_one_word_each() -> None:
    run = Run(run_id="x", kind="bench", created="", environment={}, config={},
              model="; rm -rf /", device="cpu")  # fmt: skip
    run.config = {"workload": {"model": "; rm -rf /"}}
    assert shlex.split(commands.again(run, []))[:4] == ["gockpt", "bench", "--model", "; rm -rf /"]


def test_the_matrix_counts_trials(database: Path) -> None:
    with opened(database) as store:
        trials = store.trials("c1")
    found = recovery.matrix(trials)
    assert found.strategies == ["gockpt", "sync"]
    assert found.rows["bit-flip"]["gockpt"].state == "failed"
    assert found.rows["sigterm"]["gockpt"].state == "skipped"
    assert [one.trials for one in recovery.costs(trials)] == [2, 1]


def test_a_plan_says_what_each_method_costs() -> None:
    made = outlook(Wishes(model="gpt-1.3b", profile="a100-pcie4", interval=12))
    by_name = {one.strategy: one for one in made.predictions}
    assert by_name["gockpt"].windows == 5
    assert by_name["gockpt"].stall_s == 0
    assert by_name["async-o"].stall_s == pytest.approx(0.43, abs=0.01)
    stalls = [by_name[name].stall_s for name in ("sync", "async", "async-o", "gockpt")]
    assert stalls == sorted(stalls, reverse=True)
    assert all(0 < one.goodput < 1 for one in made.predictions)
    slow = outlook(Wishes(model="gpt-1.3b", profile="a100-pcie4", interval=12, link_gb_s=5))
    assert slow.predictions[2].stall_s > by_name["async-o"].stall_s


# -- CSV -------------------------------------------------------------------------------------------


def table(store: Store, name: csv_export.Table, run: str | None = None) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO("".join(csv_export.lines(store, name, run)))))


def test_every_table_comes_as_csv(database: Path) -> None:
    with opened(database) as store:
        assert [one["run_id"] for one in table(store, "runs")] == ["c1", "b1", "b0"]
        results = table(store, "results", "b1")
        assert results[2]["stall.blocked_s_per_checkpoint"] == "0.01"
        assert len(table(store, "steps", "b1")) == 4 * 37
        assert len(table(store, "steps")) == 2 * 4 * 37
        spans = table(store, "spans", "b1")
        assert {one["strategy"] for one in spans} == {"async-o", "gockpt"}
        assert len(table(store, "trials")) == 4
        assert len(table(store, "samples", "b1")) == 12
        assert [one["step"] for one in table(store, "checkpoints", "b1")][:3] == ["12", "24", "36"]


def test_an_empty_table_has_its_head(tmp_path: Path) -> None:
    Store(tmp_path / "results.db").close()
    with opened(tmp_path / "results.db") as store:
        assert (
            "".join(csv_export.lines(store, "steps", None))
            == "run_id,strategy,repeat,step,seconds\r\n"
        )


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    made = bench("=1+1")
    made["workload"]["model"] = "@SUM(A1)"
    made["results"][1]["strategy"] = "-2+3"
    made["results"][1]["=cmd"] = ["+9", "x"]
    with Store(tmp_path / "results.db") as store:
        store.add_bench(made)
    with opened(tmp_path / "results.db") as store:
        text = [
            line for name in ("runs", "results") for line in csv_export.lines(store, name, None)
        ]
    cells = [cell for one in text for line in csv.reader(io.StringIO(one)) for cell in line]
    assert "'=1+1" in cells
    assert "'=cmd" in cells
    assert [one for one in cells if one.startswith(("=", "@", "+"))] == []
    assert [one for one in cells if one.startswith("-") and not one[1:2].isdigit()] == []
    assert "'-2+3" in cells


# -- gates -----------------------------------------------------------------------------------------


def test_the_checks_of_gates_come_as_csv(database: Path) -> None:
    with Store(database) as store:
        name = store.add_gate(gate(), bench("b1"))
        store.add_gate(gate(), bench("b1"))
    with opened(database) as store:
        assert len(table(store, "checks")) == 6
        found = table(store, "checks", name)
        assert [one["outcome"] for one in found] == ["worse", "good", "good"]
        assert {(one["gate"], one["run_id"]) for one in found} == {(name, "b1")}
        assert (found[0]["allowed"], found[0]["interval"]) == ("0.05", "0.09; 0.11")
        assert table(store, "checks", "b1") == []
        (kept,) = table(store, "runs", name)
        assert (kept["kind"], kept["config.verdict"]) == ("gate", "worse")
        assert "config.checks" not in kept
        assert next(csv_export.lines(store, "checks", "b1")).startswith("gate,run_id,strategy,")


def test_a_gate_is_listed_and_is_no_run_of_its_own_kind(database: Path) -> None:
    with Store(database) as store:
        name = store.add_gate(gate(), bench("b1"))
    with opened(database) as store:
        assert queries.kinds(store) == {"bench": 2, "crash-test": 1, "gate": 1}
        assert [one.run_id for one in queries.runs(store, kind="gate")] == [name]
        assert asking.find(store, "latest", "bench").run_id == "b1"
        assert asking.find(store, "latest", "crash-test").run_id == "c1"
        assert [one.run.run_id for one in asking.sides(store, None)] == ["b0", "b1"]
        assert queries.known(store, ["b0", "b9", None, name]) == {"b0", name}
        past = queries.past(store, strategy="gockpt", model=None, device=None)
        assert [one.run.run_id for one in past] == ["b0", "b1"]
        with pytest.raises(Problem, match="is a gate"):
            asking.find(store, name, "bench")


@pytest.mark.parametrize(
    ("changes", "tone", "words"),
    [
        ({"verdict": "good"}, "good", "No figure has become worse"),
        ({"verdict": "good", "baseline": None}, "good", "Every limit holds"),
        ({"verdict": "worse"}, "bad", "worse than the baseline"),
        ({"verdict": "limit broken"}, "bad", "limit"),
        ({"verdict": "missing"}, "bad", "not in the run"),
        ({"verdict": "not enough evidence"}, "plain", "Nothing failed"),
    ],
)
def test_a_verdict_in_plain_words(changes: dict[str, str], tone: str, words: str) -> None:
    found = headlines.of_gate(report_of(gate() | changes))
    assert (found.value, found.tone) == (changes["verdict"], tone)
    assert words in found.words


def limit_of(key: str, strategy: str = "gockpt", *gates: dict[str, object]) -> list[float | None]:
    kept = Baseline(name="main", created="", run_id="b1", document=bench())
    rules = limits.rules(map(report_of, gates))
    return [one.limit for one in limits.bounds(METRICS[key], strategy, [kept], rules)]


def test_the_limit_of_a_trend_is_where_the_gate_would_fail() -> None:
    ours = next(one for one in bench()["results"] if one["strategy"] == "gockpt")
    assert limit_of("throughput") == [pytest.approx(ours["relative_throughput"] * 0.97)]
    assert limit_of("durable") == [pytest.approx(5.4 * 1.10)]
    # 0.01 s are 0.04 steps of 0.25 s: the floor of 0.05 steps allows more than 5 % of them.
    assert limit_of("blocked") == [pytest.approx(0.01 + 0.05 * 0.25)]
    assert limit_of("drain") == limit_of("memory") == [None]  # only when named; never
    assert limit_of("throughput", "async-o") == [None]  # gockpt alone is looked at
    assert limit_of("throughput", "sync") == []


def test_the_newest_gate_says_what_is_looked_at() -> None:
    (default,) = limit_of("throughput")
    assert limit_of("throughput", "gockpt", gate()) == [pytest.approx((default or 0) / 0.97 * 0.98)]
    assert limit_of("durable", "gockpt", gate()) == [None]
    assert limit_of("throughput", "gockpt", gate(baseline=None)) == [default]
    assert limit_of("throughput", "gockpt", gate(baseline=None), gate()) != [default]
    others = [{**one, "strategy": "async-o"} for one in gate()["checks"]]
    assert limit_of("throughput", "gockpt", gate(checks=others)) == [None]
    (seconds,) = limit_of("throughput", "async-o", gate(checks=others))
    assert seconds is not None
    floor = {"stall": {"max_regression": 0.05, "floor": 0.3, "sign": 1}}
    assert limit_of("blocked", "gockpt", gate(absolute=True, thresholds=floor)) == [0.31]


@pytest.mark.parametrize("key", limits.GATED)
def test_the_dashboard_and_the_gate_mean_the_same_figure(key: str) -> None:
    of_gate = ratios.METRICS[limits.GATED[key]]
    value: object = row("gockpt", blocked=0.25)
    for name in of_gate.place:
        assert isinstance(value, dict)
        value = value[name]
    assert METRICS[key].read(row("gockpt", blocked=0.25)) == value
    assert (METRICS[key].better == "lower") == (of_gate.sign == 1)


def test_only_baselines_of_the_same_job_set_limits(database: Path) -> None:
    with Store(database) as store:
        store.keep_baseline("emulated", store.document("b1"))
        store.add_gate(gate(), store.document("b1"))
    with opened(database) as store:
        for device, thresholds in (
            ("cpu", {"main": 0.97}),  # its gate was of the other device, so by default
            ("emulated:a100-pcie4", {"emulated": 0.98}),
            (None, {"emulated": 0.98, "main": 0.98}),
        ):
            found = asking.bounds(store, METRICS["throughput"], "gockpt", "gpt-1.3b", device)
            assert {one.baseline: one.limit and one.limit / one.value for one in found} == (
                pytest.approx(thresholds)
            )
        assert asking.bounds(store, METRICS["throughput"], "gockpt", "gpt-nano", None) == []


# -- live ------------------------------------------------------------------------------------------


def test_a_run_is_seen_while_it_is_made_and_by_nothing_else(database: Path) -> None:
    document = {
        **bench("live-1"), "of": "bench", "strategies": ["none", "async-o", "gockpt", "none"],
        "progress": {"strategy": "async-o", "stage": "training", "step": 3, "of": 37},
    }  # fmt: skip
    document["results"] = document["results"][:1]
    with Store(database) as store:
        store.show_live(document)
        assert len(store.runs()) == 3
        assert store.run("latest").run_id == "c1"
    now = live.snapshot(database)
    assert [row.state for row in now.runs[0].rows] == ["done", "running", "waiting", "waiting"]
    assert (now.runs[0].done, now.runs[0].total, now.runs[0].step) == (1, 4, 3)
    assert now.runs[0].profile == "a100-pcie4"
    with Store(database) as store:
        store.end_live("live-1")
    assert live.snapshot(database).runs == []


def test_live_says_so_where_there_is_no_database(tmp_path: Path) -> None:
    now = live.snapshot(tmp_path / "no.db")
    assert now.runs == []
    assert "gockpt bench" in (now.problem or "")


def test_traces_belong_to_the_documents() -> None:
    assert len(traces()) == len(bench()["results"])
    assert crash_test()["summary"]["trials"] == len(crash_test()["trials"])
