"""The bench: one short real run on the CPU, one emulated, and the rules for rows and tables."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from rich.console import Console

from gockpt.cli import bench_run, bench_table
from gockpt.cli.bench_document import (
    Outcome,
    Reference,
    decided,
    percentile,
    problems_of,
    reference,
    row,
)
from gockpt.cli.bench_golden import tensor_hash
from gockpt.cli.bench_job import Failed, Golden, Job, Measured, Progress, SavedCheckpoint
from gockpt.cli.bench_repeats import SAMPLES, merged
from gockpt.cli.bench_setup import Setup, order_strategies
from gockpt.cli.main import call
from gockpt.cli.task import Task
from gockpt.events import Span
from gockpt.results import Store
from gockpt.strategies import POLICIES

ROW = {
    "strategy", "valid", "problems", "attempts", "relative_throughput", "tokens_per_s", "step_s",
    "stall", "loop_s", "drain_s", "wall_s", "checkpoints", "windows", "fallbacks", "bytes",
    "latency_s", "work_s", "memory_bytes", "emulation", "samples",
}  # fmt: skip
PARTS = {
    "tokens_per_s": {"loop", "wall"},
    "step_s": {"median", "p95"},
    "stall": {"blocked_s_per_checkpoint", "excess_s_per_checkpoint"},
    "checkpoints": {"requested", "committed", "verified", "identical", "in_flight_max"},
    "bytes": {"state", "gradients", "persisted"},
    "latency_s": {"consistent", "durable"},
    "work_s": {"copy", "replay", "hook"},
    "memory_bytes": {"trainer_added", "agent_added", "predicted"},
    "emulation": {"overruns", "worst_s"},
    "samples": set(SAMPLES),
}


@dataclass(frozen=True)
class Run:
    """A bench that was run."""

    code: int
    document: dict[str, Any]
    out: str
    store: Path
    directory: Path

    def row(self, strategy: str) -> dict[str, Any]:
        found: dict[str, Any] = next(
            one for one in self.document["results"] if one["strategy"] == strategy
        )
        return found


def bench(directory: Path, line: str, capsys: pytest.CaptureFixture[str]) -> Run:
    (directory / "work").mkdir()
    where = f"--dir {directory}/work --db {directory}/results.db --json {directory}/bench.json"
    code = call(f"bench {line} {where}".split())
    document = json.loads((directory / "bench.json").read_text())
    out = capsys.readouterr().out
    return Run(code, document, out, directory / "results.db", directory / "work")


# -- a real run ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several strategies, forced into two windows; everything that a row promises."""
    run = bench(
        tmp_path,
        "--model gpt-tiny --device cpu --tokens 32 --steps 6 --interval 3 --windows 2 "
        "--strategies sync,gockpt",
        capsys,
    )
    assert run.code == 0, run.out
    rows = run.document["results"]
    assert [one["strategy"] for one in rows] == ["none", "sync", "gockpt", "none"]
    for one in rows:
        assert set(one) == ROW
        assert {name: set(one[name]) for name in PARTS} == PARTS
        assert one["valid"], one["problems"]
    for name, windows in (("sync", 1), ("gockpt", 2)):
        one = run.row(name)
        counts = one["checkpoints"]
        assert counts["requested"] == counts["committed"] == counts["identical"] == 2
        assert one["windows"] == windows
        assert one["fallbacks"] == []
        assert one["bytes"]["persisted"] >= 2 * run.document["workload"]["state_bytes"]
        assert one["latency_s"]["consistent"] <= one["latency_s"]["durable"]
        assert one["memory_bytes"]["predicted"] >= 2 * run.document["workload"]["state_bytes"]
    assert run.row("sync")["bytes"]["gradients"] == 0
    assert run.row("gockpt")["bytes"]["gradients"] > 0
    assert run.document["environment"]["emulated"] is False
    assert run.document["workload"]["tokens_per_step"] == 32
    _check_stored(run)
    assert list(run.directory.iterdir()) == []


def _check_stored(run: Run) -> None:
    run_id = run.document["run_id"]
    assert run_id in run.out
    with Store(run.store) as store:
        assert store.document(run_id) == run.document
        results = store.results(run_id)
        assert [one.strategy for one in results] == ["none", "sync", "gockpt", "none"]
        for result in results:
            assert result.id is not None
            assert [one.step for one in store.steps(result.id)] == list(range(1, 8))
        ours = results[2].id
        assert ours is not None
        assert [one.step for one in store.checkpoints(ours)] == [3, 6]
        lanes = {span.lane for span in store.spans(ours)}
        assert {"compute", "state", "gradients", "replay", "write"} <= lanes


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="the agent is a process only on Linux")
def test_an_emulated_run_says_so_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "ATTEMPTS", 1)  # times are not judged here
    run = bench(
        tmp_path,
        "--model gpt-125m --device emulated:a100-pcie4 --steps 4 --interval 2 --strategies gockpt",
        capsys,
    )
    environment = run.document["environment"]
    assert environment["emulated"] is True
    assert (environment["profile"], environment["shrink"]) == ("a100-pcie4", 16)
    assert run.document["workload"]["params"] > 200 * run.document["workload"]["device_params"]
    ours = run.row("gockpt")
    assert ours["checkpoints"]["identical"] == 2
    assert ours["emulation"]["overruns"] is not None
    assert run.out.count("emulated") >= len(run.document["results"]) + 1
    busy = [one for one in run.document["results"] if not one["valid"]]
    assert run.code == (1 if busy else 0)  # a busy machine may spoil the times, and then says so
    for one in busy:
        assert all("too busy" in problem for problem in one["problems"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_in_the_middle_it_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    line = "bench --model gpt-tiny --tokens 8 --steps 200 --interval 2 --strategies gockpt"
    work = tmp_path / "work"
    work.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "gockpt", *line.split(), "--dir", str(work), "--db",
         str(tmp_path / "results.db")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        started = _wait_for_workers(process, deadline=time.monotonic() + 120)
        process.send_signal(number)
        _, said = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in said
    assert list(work.iterdir()) == []
    assert [one.pid for one in started if one.is_running()] == []


def _wait_for_workers(process: subprocess.Popen[str], deadline: float) -> list[psutil.Process]:
    """A worker and an agent (of the golden run: it comes first)."""
    while time.monotonic() < deadline and process.poll() is None:
        found = psutil.Process(process.pid).children(recursive=True)
        if len(found) >= 2:
            return found
        time.sleep(0.1)
    raise AssertionError("no worker and agent were started")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_worker_leaves_when_its_parent_is_gone() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "gockpt.cli.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with worker:
        job = msgspec.json.encode({**_task_fields(), **_job_fields("/nowhere/at/all")})
        assert worker.stdin is not None
        worker.stdin.write(job + b"\n")
        worker.stdin.close()
        assert worker.wait(60) == 1


def _task_fields() -> dict[str, Any]:
    return msgspec.to_builtins(TASK)  # type: ignore[no-any-return]


def _job_fields(directory: str) -> dict[str, Any]:
    return {
        "strategy": "none", "measured_tokens": 8, "steps": 100_000, "interval": 8, "windows": None,
        "warmup": 2, "directory": directory, "golden": "",
    }  # fmt: skip


# -- rows ------------------------------------------------------------------------------------------

TASK = Task(
    model="gpt-tiny",
    device="cpu",
    profile_file=None,
    precision="fp32",
    seed=0,
    data=None,
    tokens=512,
    calibrated=True,
)
SETUP = Setup(
    task=TASK,
    note="",
    strategies=("none", "gockpt", "none"),
    steps=8,
    interval=4,
    windows=None,
    directory=Path(),
)

AGAINST = Reference(loop_s=7.0, spread=0.0, trainer_bytes=None, idle_agent_bytes=None)


def measured(**changes: Any) -> Measured:
    saved = [
        SavedCheckpoint(step=step, committed=True, windows=3, proof="exact", identical=True,
                        blocked_s=0.1, consistent_s=0.5, durable_s=1.0)
        for step in (4, 8)
    ]  # fmt: skip
    standard = Measured(
        steps=[(step, 1.0) for step in range(1, 10)],
        loop_s=7.0,
        blocked_s=0.2,
        drain_s=0.5,
        hook_s=0.001,
        checkpoints=saved,
        in_flight_max=2,
        state_bytes=1000,
        gradient_bytes=200,
        persisted_bytes=2200,
        predicted_bytes=3000,
        overruns=0,
        overrun_s=0.0,
        worst_overrun_s=0.0,
        events={},
        warnings=[],
        spans=[],
    )
    return msgspec.structs.replace(standard, **changes)


def outcome(
    strategy: str, result: Measured | Failed, trainer: int = 500, agent: int = 0
) -> Outcome:
    return Outcome(strategy=strategy, result=result, trainer_bytes=trainer, agent_bytes=agent)


def none(loop_s: float, trainer: int = 500) -> Outcome:
    return outcome("none", measured(checkpoints=[], loop_s=loop_s, drain_s=0.0), trainer)


def test_a_row_is_compared_with_the_mean_of_both_none() -> None:
    against = reference([none(6.9, 400), none(7.1, 600)], idle_agent_bytes=50)
    assert against.loop_s == pytest.approx(7.0)
    found = row(SETUP, outcome("gockpt", measured(loop_s=7.7), 900, 250), against)
    assert found["relative_throughput"] == pytest.approx(7.0 / 7.7)
    assert found["stall"]["excess_s_per_checkpoint"] == pytest.approx(0.35)
    assert found["stall"]["blocked_s_per_checkpoint"] == pytest.approx(0.1)
    assert found["memory_bytes"] == {"trainer_added": 400, "agent_added": 200, "predicted": 3000}
    assert found["tokens_per_s"]["loop"] == pytest.approx(512 * 7 / 7.7)  # two steps are warm-up
    assert found["wall_s"] == pytest.approx(8.2)


def test_only_what_exceeds_the_noise_is_decided() -> None:
    against = reference([none(6.965), none(7.035)], idle_agent_bytes=None)  # 1 % apart
    assert decided(0.95, against)
    assert not decided(0.97, against)
    assert not decided(0.95, reference([none(7.0)], idle_agent_bytes=None))  # no noise known yet


def test_checkpoints_of_the_warm_up_do_not_share_the_stall() -> None:
    """An interval of 1 has targets in the warm-up, whose stall is not counted either."""
    saved = [SavedCheckpoint(step=step, committed=True, identical=True) for step in range(1, 9)]
    found = row(SETUP, outcome("async", measured(checkpoints=saved)), AGAINST)
    assert found["stall"]["blocked_s_per_checkpoint"] == pytest.approx(0.2 / 6)
    assert found["checkpoints"]["requested"] == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"overruns": 3, "overrun_s": 0.0071}, "too busy"),
        ({"checkpoints": [SavedCheckpoint(step=4, committed=False)]}, "step 4 was not committed"),
        (
            {"checkpoints": [SavedCheckpoint(step=4, committed=True, proof="exact",
                                             identical=False, difference="'model.x' differs")]},
            "not identical: 'model.x' differs",
        ),
        (
            {"checkpoints": [SavedCheckpoint(step=4, committed=True, proof="exact",
                                             difference="damaged")]},
            "not identical: damaged",
        ),
    ],
)  # fmt: skip
def test_what_makes_a_row_invalid(changes: dict[str, Any], says: str) -> None:
    (problem,) = problems_of(measured(**changes))
    assert says in problem


def test_small_overruns_and_close_proofs_are_no_problem() -> None:
    close = SavedCheckpoint(step=4, committed=True, proof="close", identical=False)
    assert problems_of(measured(overruns=1, overrun_s=0.0069, checkpoints=[close])) == []


def test_a_strategy_that_failed_has_a_row_without_figures() -> None:
    failed = outcome("gockpt", Failed(kind="AgentError", reason="it was lost"))
    found = row(SETUP, failed, AGAINST)
    assert set(found) == ROW
    assert {name: set(found[name]) for name in PARTS} == PARTS
    assert not found["valid"]
    assert found["problems"] == ["AgentError: it was lost"]
    assert found["loop_s"] is None


def test_rounds_become_one_row_of_medians_and_all_samples() -> None:
    rounds = [
        row(SETUP, outcome("gockpt", measured(loop_s=loop, drain_s=drain)), AGAINST)
        for loop, drain in ((7.7, 0.5), (7.5, 0.9), (7.6, 0.7))
    ]
    found = merged(rounds)
    assert set(found) == ROW
    assert (found["loop_s"], found["drain_s"]) == (7.6, 0.7)
    assert found["samples"]["drain_s"] == [0.5, 0.9, 0.7]
    assert found["checkpoints"]["identical"] == found["checkpoints"]["requested"] == 6
    assert found["checkpoints"]["in_flight_max"] == 2
    assert (found["valid"], found["attempts"], found["windows"]) == (True, 3, 3)


def test_a_round_that_does_not_count_keeps_its_place_among_the_samples() -> None:
    rounds = [
        row(SETUP, outcome("gockpt", one), AGAINST)
        for one in (
            measured(drain_s=0.5),
            Failed(kind="AgentError", reason="it was lost"),
            measured(drain_s=9.0, overruns=5, overrun_s=1.0),
            measured(drain_s=0.7),
        )
    ]
    found = merged(rounds)
    assert found["samples"]["drain_s"] == [0.5, None, None, 0.7]
    assert not found["valid"]
    assert found["problems"][0] == "round 2: AgentError: it was lost"
    assert found["problems"][1].startswith("round 3: the machine was too busy")


def test_rounds_go_through_all_strategies_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def measure(job: Job, position: int, view: bench_run.View) -> Outcome:
        ran.append(job.strategy or "")
        return outcome(job.strategy or "", measured(drain_s=float(len(ran))))

    golden = Golden(real_tokens=8, real_s=None, modelled_s=None, idle_agent_bytes=None)
    monkeypatch.setattr(bench_run, "_golden", lambda *_: golden)
    monkeypatch.setattr(bench_run, "_measure", measure)
    setup = dataclasses.replace(SETUP, directory=tmp_path, repeats=2)
    report = bench_run.run(setup, _Silent())
    assert ran == ["none", "gockpt", "none"] * 2
    ours = report.document["results"][1]
    assert ours["samples"]["drain_s"] == [2.0, 5.0]
    assert [(one.result, one.repeat) for one in report.traces] == [
        (result, repeat) for repeat in (0, 1) for result in (0, 1, 2)
    ]
    with Store(tmp_path / "results.db") as store:
        store.add_bench(report.document, report.traces)
        result = store.results(report.document["run_id"])[1]
        assert result.id is not None
        assert len(store.steps(result.id, repeat=1)) == 9
        assert store.samples(result.id, "drain_s") == [2.0, 5.0]


def test_the_work_of_a_checkpoint_is_the_median_of_those_behind_the_warm_up() -> None:
    def span(lane: str, step: int, start: float, seconds: float) -> Span:
        return Span(lane=lane, name=lane, start=start, end=start + seconds, step=step)

    spans = [
        span("state", 3, 1.0, 0.1), span("gradients", 4, 2.0, 0.2), span("replay", 4, 2.2, 0.5),
        span("state", 5, 3.0, 0.4), span("state", 8, 4.0, 0.1), span("replay", 7, 4.0, 0.7),
        span("write", 8, 4.0, 9.0), span("state", 9, 5.0, 9.0),
    ]  # fmt: skip
    found = row(SETUP, outcome("gockpt", measured(spans=spans)), AGAINST)["work_s"]
    assert found["copy"] == pytest.approx(0.4)
    assert found["replay"] == pytest.approx(0.6)
    assert found["hook"] == 0.001


def test_a_late_wake_up_between_two_turns_is_no_pause() -> None:
    def turns(gap: float) -> float:
        found = [
            Span(lane="replay", name="replay", start=s, end=e, step=step)
            for step in (4, 8)
            for s, e in ((step, step + 0.01), (step + 0.01 + gap, step + 0.02))
        ]
        made = row(SETUP, outcome("gockpt", measured(spans=found)), AGAINST)
        return float(made["work_s"]["replay"])

    assert turns(0.004) == pytest.approx(0.02)
    assert turns(0.006) == pytest.approx(0.014)


@pytest.mark.parametrize(("busy", "attempts"), [(0, 1), (2, 3), (9, bench_run.ATTEMPTS)])
def test_a_run_on_a_busy_machine_is_made_again(
    busy: int, attempts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter([measured(overruns=5, overrun_s=1.0)] * busy + [measured()])
    monkeypatch.setattr(
        bench_run, "_measure", lambda job, position, view: outcome("gockpt", next(results))
    )
    fields = {**_task_fields(), **_job_fields(str(tmp_path / "work"))}
    job = msgspec.convert(fields, Job)
    found = bench_run._measure_quietly(job, 0, _Silent())
    assert found.attempts == attempts
    assert isinstance(found.result, Measured)
    assert bool(problems_of(found.result)) == (busy >= bench_run.ATTEMPTS)


class _Silent:
    """A view that shows nothing."""

    def progress(self, position: int | None, progress: Progress) -> None: ...
    def finished(self, outcomes: list[Outcome], against: Reference) -> None: ...
    def note(self, line: str) -> None: ...
    def tick(self) -> None: ...


def test_none_runs_first_and_last_and_once_each() -> None:
    assert order_strategies("gockpt, none,gockpt") == ("none", "gockpt", "none")
    assert order_strategies("none") == ("none", "none")
    assert len(order_strategies(None)) == 8


def test_percentile() -> None:
    assert percentile([1.0], 0.95) == 1.0
    assert percentile(list(map(float, range(100))), 0.95) == 95.0


def test_warm_up_leaves_a_checkpoint_to_count() -> None:
    assert SETUP.warmup == 2
    assert Setup(
        task=TASK, note="", strategies=("none", "none"), steps=2, interval=2, windows=None,
        directory=Path(),
    ).warmup == 1  # fmt: skip


def test_a_hash_sees_dtype_shape_and_every_bit() -> None:
    plain = torch.arange(6.0)
    hashes = {
        tensor_hash(one)
        for one in (
            plain,
            plain.view(2, 3),
            plain.view(2, 3).t(),
            plain.double(),
            -plain,  # -0.0 is not 0.0
            torch.empty(0, 5),
            torch.tensor(1.0),
        )
    }
    assert len(hashes) == 7
    assert tensor_hash(plain.view(2, 3).t()) == tensor_hash(plain.view(2, 3).t().contiguous())


# -- tables ----------------------------------------------------------------------------------------


def shown(emulated: bool, outcomes: list[Outcome], width: int = 120) -> str:
    against = reference(outcomes, idle_agent_bytes=0)
    document = {
        "environment": {
            "device": "emulated:a100-pcie4" if emulated else "cpu",
            "emulated": emulated,
            "profile": "a100-pcie4" if emulated else None,
        },
        "workload": {
            "model": "gpt-1.3b", "precision": "bf16-master", "tokens_per_step": 4096, "steps": 24,
            "interval": 8,
        },
        "results": [row(SETUP, one, against) for one in outcomes],
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=width)
    bench_table.show(document, [("gockpt", "a warning")], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_table_of_an_emulated_bench_never_calls_it_measured() -> None:
    outcomes = [none(7.0), outcome("gockpt", measured()), none(7.0)]
    text = shown(True, outcomes)
    assert "emulated:a100-pcie4" in text.splitlines()[0]
    assert sum("emulated" in line for line in text.splitlines() if "%" in line) == 3
    assert "not measured on it" in " ".join(text.split())
    assert "emulated" not in shown(False, outcomes)


def test_the_table_shows_what_is_wrong_and_what_is_undecided() -> None:
    text = shown(False, [
        none(6.9),
        outcome("async", measured(loop_s=7.1)),
        outcome("async-o", measured(loop_s=9.0)),
        outcome("sync", Failed(kind="AgentError", reason="it was lost")),
        outcome("gockpt", measured(overruns=9, overrun_s=1.0)),
        none(7.1),
    ])  # fmt: skip
    lines = {line.split()[0]: line for line in text.splitlines() if "measured" in line}
    assert "(98.59 %)" in lines["async"]
    assert "77.78 %" in lines["async-o"]
    assert "(77.78 %)" not in lines["async-o"]
    assert "failed" in lines["sync"]
    assert "invalid" in lines["gockpt"]
    assert "it was lost" in text
    assert "too busy" in text
    assert "a warning" in text


@pytest.mark.parametrize("width", [80, 120])
def test_every_strategy_has_one_line_in_a_usual_terminal(width: int) -> None:
    names = [name for name in POLICIES if name != "none"]
    rest = [outcome(name, measured(drain_s=123.45, loop_s=9.87)) for name in names]
    text = shown(True, [none(7.0), *rest, none(7.0)], width=width)
    for name in names:
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        for part in ("70.92 %", "0.100 s", "123.45 s", "2 of 2", "emulated"):
            assert part in line
        assert ("1.20×" in line) == (width == 120)
