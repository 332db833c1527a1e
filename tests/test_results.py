"""Results go in whole, come back as they were, and a file that is not ours is left alone."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import SQLModel

from gockpt.errors import ConfigError, CorruptError, GockptError, StorageError
from gockpt.events import Span
from gockpt.results import SCHEMA_VERSION, CheckpointRecord, Store, Trace
from gockpt.results import database as database_module
from gockpt.results.models import Base


def bench(run_id: str = "b1", created: str = "2025-01-02T03:04:05+00:00") -> dict[str, Any]:
    def row(strategy: str, relative: float | None, blocked: float) -> dict[str, Any]:
        return {
            "strategy": strategy,
            "valid": True,
            "relative_throughput": relative,
            "tokens_per_s": {"loop": 16384.5, "wall": 15000.25},
            "stall": {"blocked_s_per_checkpoint": blocked, "excess_s_per_checkpoint": 0.1},
            "loop_s": 6.5,
            "drain_s": 0.25,
            "windows": None if strategy == "none" else 5,
            "fallbacks": [],
            "emulation": {"overruns": 0, "worst_s": 0.0},
            "samples": {
                "relative_throughput": [relative, relative],
                "blocked_s_per_checkpoint": [blocked, blocked + 1],
                "drain_s": [],
            },
        }

    return {
        "schema": 1,
        "kind": "bench",
        "run_id": run_id,
        "created": created,
        "environment": {"git_sha": "abc", "device": "emulated:a100-pcie4", "emulated": True},
        "workload": {"model": "gpt-1.3b", "steps": 24, "seed": 0},
        "results": [row("none", None, 0.0), row("gockpt", 0.999, 0.001), row("none", 1.0, 0.0)],
    }


def crash_test(run_id: str = "c1") -> dict[str, Any]:
    def trial(scenario: str, passed: bool | None) -> dict[str, Any]:
        return {
            "scenario": scenario,
            "point": "fs.rename",
            "strategy": "gockpt",
            "injected_at_step": 17,
            "restored_step": 16,
            "passed": passed,
            "detail": "",
        }

    return {
        "schema": 1,
        "kind": "crash-test",
        "run_id": run_id,
        "seed": 3,
        "sabotage": None,
        "trials": [trial("kill", True), trial("enospc", False), trial("cuda", None)],
        "summary": {"trials": 3, "passed": 1, "failed": 1, "skipped": 1},
    }


def trace(result: int, repeat: int = 0) -> Trace:
    return Trace(
        result=result,
        repeat=repeat,
        steps=[(1, 0.25), (2, 0.3 + repeat)],
        spans=[Span(lane="compute", name="forward", start=1.0, end=1.5, step=1)],
        checkpoints=[
            CheckpointRecord(step=8, strategy="gockpt", windows=5, proof="exact", identical=True)
        ],
    )


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store(tmp_path / "data" / "results.db") as store:
        yield store


def test_documents_come_back_as_they_were_added(store: Store) -> None:
    store.add_bench(bench())
    store.add_crash_test(crash_test())
    store.close()
    with Store(store.path) as again:
        assert again.document("b1") == bench()
        assert again.document("c1") == crash_test()


def test_rows_are_in_the_documents_order_with_the_columns_that_are_searched(store: Store) -> None:
    store.add_bench(bench())
    run, rows = store.run("b1"), store.results("b1")
    assert (run.model, run.device, run.emulated) == ("gpt-1.3b", "emulated:a100-pcie4", True)
    assert [row.strategy for row in rows] == ["none", "gockpt", "none"]
    assert rows[1].blocked_s_per_checkpoint == 0.001
    assert rows[1].windows == 5
    assert rows[1].row == bench()["results"][1]


def test_samples_keep_their_repeats(store: Store) -> None:
    store.add_bench(bench())
    none, gockpt, _ = (row.id for row in store.results("b1"))
    assert store.samples(gockpt, "blocked_s_per_checkpoint") == [0.001, 1.001]
    assert store.samples(gockpt, "drain_s") == []
    assert store.samples(none, "relative_throughput") == []  # null in the document


def test_traces_belong_to_their_row_and_repeat(store: Store) -> None:
    store.add_bench(bench(), [trace(1), trace(1, repeat=1), trace(2)])
    none, gockpt, last = (row.id for row in store.results("b1"))
    assert [(s.step, s.seconds) for s in store.steps(gockpt, repeat=1)] == [(1, 0.25), (2, 1.3)]
    assert len(store.steps(gockpt)) == 4
    assert [len(store.spans(r)) for r in (none, gockpt, last)] == [0, 2, 1]
    span = store.spans(last)[0]
    assert (span.lane, span.name, span.start, span.end, span.step) == (
        *("compute", "forward", 1.0, 1.5, 1),
    )
    (checkpoint,) = store.checkpoints(last)
    assert (checkpoint.step, checkpoint.windows, checkpoint.proof) == (8, 5, "exact")
    assert checkpoint.identical is True
    assert checkpoint.durable_s is None


def test_many_spans_go_in_at_once(store: Store) -> None:
    spans = [Span(lane="l", name="n", start=i, end=i + 1, step=i) for i in range(20_000)]
    store.add_bench(bench(), [Trace(result=0, spans=spans)])
    (first, *_) = store.results("b1")
    assert [row.step for row in store.spans(first.id)] == list(range(20_000))


def test_a_run_is_there_entirely_or_not_at_all(store: Store) -> None:
    with pytest.raises(ConfigError, match="trace of result 3, but there are 3"):
        store.add_bench(bench(), [trace(1), trace(3)])
    assert store.runs() == []
    store.add_bench(bench(), [trace(1)])
    assert len(store.steps(store.results("b1")[1].id)) == 2


def test_trials_keep_what_was_skipped(store: Store) -> None:
    store.add_crash_test(crash_test())
    assert [(t.scenario, t.passed) for t in store.trials("c1")] == [
        *(("kill", True), ("enospc", False), ("cuda", None)),
    ]


def test_runs_are_newest_first_and_found_by_the_beginning_of_their_id(store: Store) -> None:
    for run_id, day in (("aa11", 1), ("aa22", 3), ("bb%_", 2)):
        store.add_bench(bench(run_id, f"2025-01-0{day}T00:00:00+00:00"))
    assert [run.run_id for run in store.runs()] == ["aa22", "bb%_", "aa11"]
    assert [run.run_id for run in store.runs(limit=1)] == ["aa22"]
    assert store.runs(kind="crash-test") == []
    assert store.runs(kind="bench", model="no such") == store.runs(device="no such") == []
    assert store.run().run_id == "aa22"
    assert store.run("aa1").run_id == "aa11"
    assert store.run("bb%").run_id == "bb%_"
    with pytest.raises(ConfigError, match="more than one run begins with 'aa'"):
        store.run("aa")
    with pytest.raises(ConfigError, match="no run 'aa112'; did you mean 'aa11'"):
        store.run("aa112")
    with pytest.raises(ConfigError, match="no run '%'"):
        store.run("%")


def test_no_results_yet(store: Store) -> None:
    with pytest.raises(ConfigError, match="no results yet; run `gockpt bench` first"):
        store.document()


def test_a_known_run_is_refused(store: Store) -> None:
    store.add_bench(bench())
    for add, document in (
        (store.add_bench, bench()),
        (store.add_crash_test, crash_test("b1")),
    ):
        with pytest.raises(ConfigError, match="b1 is among the results already"):
            add(document)
    assert store.document() == bench()


@pytest.mark.parametrize(
    "change", [{"kind": "crash-test"}, {"results": None}, {"schema": 2}, {"run_id": 7}], ids=str
)
def test_other_documents_are_refused(store: Store, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"bench document"):
        store.add_bench({**bench(), **change})
    assert store.runs() == []


def test_deleting_a_run_takes_all_that_belongs_to_it(store: Store) -> None:
    store.add_bench(bench("b1"), [trace(1)])
    store.add_bench(bench("b2"), [trace(1)])
    store.add_crash_test(crash_test())
    store.keep_baseline("main", store.document("b1"))
    store.delete("b1")
    store.delete("c1")
    assert [run.run_id for run in store.runs()] == ["b2"]
    assert store.baseline("main").document == bench("b1")
    with sqlite3.connect(store.path) as raw:
        for table in ("results", "steps", "spans", "checkpoints", "samples", "trials"):
            orphans = f"SELECT count(*) FROM {table} WHERE "
            orphans += (
                "run_id != 'b2'"
                if table in ("results", "trials")
                else "result_id NOT IN (SELECT id FROM results)"
            )
            assert raw.execute(orphans).fetchone() == (0,), table
    raw.close()


def test_baselines_are_replaced_and_listed(store: Store) -> None:
    store.add_bench(bench("b1"))
    store.keep_baseline("main", store.document("latest"))
    store.add_bench(bench("b2", "2026-01-01T00:00:00+00:00"))
    store.keep_baseline("main", store.document("latest"))
    store.keep_baseline("old", store.document("b1"))
    assert [(b.name, b.run_id) for b in store.baselines()] == [("main", "b2"), ("old", "b1")]
    assert store.baseline("main").document == bench("b2", "2026-01-01T00:00:00+00:00")
    with pytest.raises(ConfigError, match="no baseline 'mian'; did you mean 'main'"):
        store.baseline("mian")


# ── The file ──────────────────────────────────────────────────────────────────────────────────────


def test_the_journal_is_a_write_ahead_log(store: Store) -> None:
    with sqlite3.connect(store.path) as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    raw.close()


def test_a_newer_schema_is_refused_and_left_alone(store: Store) -> None:
    store.add_bench(bench())
    store.close()
    with sqlite3.connect(store.path) as raw:
        raw.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    raw.close()
    with pytest.raises(
        ConfigError, match=f"version 99, this gockpt reads version {SCHEMA_VERSION}"
    ):
        Store(store.path)


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE meta (x)")
    raw.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="database of another program"):
        Store(path)
    assert path.read_bytes() == before


def test_a_path_may_have_any_characters(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=ro#%41.db"
    with Store(path) as store:
        store.add_bench(bench())
    assert path.exists()


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    with pytest.raises(
        CorruptError, match=r"notes\.txt: no readable results.*move it away"
    ) as info:
        Store(path)
    assert info.value.path == path
    assert path.read_text() == "not a database\n" * 100


def test_a_damaged_database_is_an_error_of_ours(store: Store) -> None:
    store.add_bench(bench(), [Trace(result=0, steps=[(i, 0.1) for i in range(5000)])])
    store.close()
    size = store.path.stat().st_size
    with open(store.path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with pytest.raises(GockptError, match="results"), Store(store.path) as damaged:
        damaged.steps(damaged.results("b1")[0].id)


def test_a_place_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make the directory"):
        Store(tmp_path / "file" / "results.db")
    with pytest.raises(StorageError, match="cannot be read or written"):
        Store(tmp_path)  # a directory


def test_waiting_for_another_writer_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.01)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="another process holds the results"):
        Store(store.path)
    other.execute("ROLLBACK")
    other.close()
    Store(store.path).close()


def test_opening_and_writing_from_several_threads(tmp_path: Path) -> None:
    def work(index: int) -> None:
        with Store(tmp_path / "results.db") as store:
            store.add_bench(bench(f"run{index}"), [trace(0)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    with Store(tmp_path / "results.db") as store:
        assert len(store.runs()) == 4


def test_the_tables_are_not_in_the_users_metadata() -> None:
    assert "runs" in Base.metadata.tables
    assert not set(Base.metadata.tables) & set(SQLModel.metadata.tables)


# -- gates -----------------------------------------------------------------------------------------


def gate() -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": "gate",
        "run_id": "b1",
        "baseline": "b0",
        "verdict": "worse",
        "warnings": [],
        "absolute": False,
        "thresholds": {},
        "checks": [{"strategy": "gockpt", "metric": "copy", "outcome": "worse", "detail": ""}],
    }


def test_a_gate_is_kept_and_is_never_taken_for_what_was_measured(store: Store) -> None:
    store.add_bench(bench("b1"))
    name = store.add_gate(gate(), bench("b1"))
    kept = store.run(name)
    assert (kept.kind, kept.model, kept.config) == ("gate", store.run("b1").model, gate())
    assert store.document(name) == gate()
    assert store.run(name[:6]).run_id == name
    assert store.run().run_id == "b1"
    assert store.document()["kind"] == "bench"
    assert [one.run_id for one in store.runs(kind="gate")] == [name]
    assert [one.run_id for one in store.runs(kind="bench")] == ["b1"]
    with pytest.raises(ConfigError, match=r"there are b1$"):
        store.run("nothing like it")
    store.delete(name)
    assert [one.run_id for one in store.runs()] == ["b1"]


def test_only_a_gate_is_kept_as_one(store: Store) -> None:
    for document in (bench(), gate() | {"schema": 2}, gate() | {"checks": "many"}):
        with pytest.raises(ConfigError):
            store.add_gate(document, bench())
    assert store.runs() == []
    store.add_gate(gate(), {})
    with pytest.raises(ConfigError, match="no results yet"):
        store.run()
