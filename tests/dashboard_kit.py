"""A results database for tests of the dashboard: two benches and a crash test, never run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from gockpt.events import Span
from gockpt.results import CheckpointRecord, Store, Trace

STALLS = {"none": 0.0, "async-o": 0.4, "gockpt": 0.01, "none again": 0.0}


def row(strategy: str, *, loop_s: float = 10.0, blocked: float = 0.0) -> dict[str, Any]:
    """One of a bench's results."""
    saves = strategy != "none"
    total = loop_s + 3 * blocked
    return {
        "strategy": strategy,
        "valid": True,
        "problems": [],
        "attempts": 1,
        "relative_throughput": 10.0 / total,
        "tokens_per_s": {"loop": 4000.0, "wall": 3900.0},
        "step_s": {"median": 0.25, "p95": 0.3},
        "stall": {"blocked_s_per_checkpoint": blocked, "excess_s_per_checkpoint": blocked * 1.1},
        "loop_s": total,
        "drain_s": 0.5 if saves else 0.0,
        "wall_s": total + 0.5 * saves,
        "checkpoints": {
            "requested": 3 * saves,
            "committed": 3 * saves,
            "verified": 3 * saves,
            "identical": 3 * saves,
            "in_flight_max": 1,
        },
        "windows": {"none": None, "gockpt": 5}.get(strategy, 1),
        "fallbacks": [],
        "bytes": {"state": 1000 * saves, "gradients": 310 * (strategy == "gockpt"), "persisted": 1},
        "latency_s": {"consistent": 1.5 if saves else None, "durable": 5.4 if saves else None},
        "memory_bytes": {
            "trainer_added": 2_000_000,
            "agent_added": 1_000_000,
            "predicted": 3_100_000,
        },
        "emulation": {"overruns": 0, "worst_s": 0.0},
        "samples": {
            "relative_throughput": [10.0 / total],
            "blocked_s_per_checkpoint": [blocked],
            "drain_s": [0.5],
        },
    }


def bench(run_id: str = "b1", *, created: str = "2026-01-02T03:04:05+00:00",
          profile: str | None = "a100-pcie4", scale: float = 1.0) -> dict[str, Any]:  # fmt: skip
    """A document of ``bench --json``."""
    device = f"emulated:{profile}" if profile else "cpu"
    results = [
        row("none"),
        row("async-o", blocked=0.4 * scale),
        row("gockpt", blocked=0.01 * scale),
        row("none", loop_s=10.01),
    ]
    if profile is None:
        for one in results:
            one["emulation"] = {"overruns": None, "worst_s": None}
    return {
        "schema": 1,
        "kind": "bench",
        "run_id": run_id,
        "created": created,
        "environment": {
            "git_sha": "0123456789abcdef",
            "host": "testhost",
            "python": "3.11",
            "torch": "2.13.0",
            "device": device,
            "emulated": profile is not None,
            "profile": profile,
            "shrink": 20,
        },
        "workload": {
            "model": "gpt-1.3b",
            "precision": "bf16-master",
            "tokens_per_step": 4096,
            "steps": 36,
            "interval": 12,
            "seed": 0,
            "windows": None,
        },
        "results": results,
    }


def traces() -> list[Trace]:
    """What the processes of :func:`bench` recorded: steps, spans, checkpoints."""
    made = []
    for result, (strategy, stall) in enumerate(STALLS.items()):
        if strategy.startswith("none"):
            made.append(Trace(result=result, steps=[(n, 0.25) for n in range(1, 38)]))
            continue
        windows = 5 if strategy == "gockpt" else 1
        steps = [(n, 0.25 + stall * (n % 12 == 0)) for n in range(1, 38)]
        saved = [
            CheckpointRecord(
                step=step, strategy=strategy, windows=windows, proof="exact", identical=True,
                blocked_s=stall, consistent_s=1.5, durable_s=5.4,
            )
            for step in (12, 24, 36)
        ]  # fmt: skip
        made.append(
            Trace(result=result, steps=steps, spans=list(_spans(windows)), checkpoints=saved)
        )
    return made


def _spans(windows: int) -> list[Span]:
    spans = []
    for step in range(1, 38):
        at = 100 + 0.28 * step
        for name, begin, end in (
            ("forward", 0, 0.08),
            ("backward", 0.08, 0.25),
            ("update", 0.25, 0.28),
        ):
            spans.append(Span(lane="compute", name=name, start=at + begin, end=at + end, step=step))
    for target in (12, 24, 36):
        for step in range(target - windows + 1, target + 1):
            at = 100 + 0.28 * (step + 1)
            spans.append(Span(lane="state", name="state", start=at, end=at + 0.2, step=step))
        done = 100 + 0.28 * (target + 2)
        for lane, begin, end in (
            ("stall", -0.3, -0.28),
            ("replay", 0, 0.1),
            ("proof", 0.1, 0.2),
            ("write", 0.2, 3.0),
            ("commit", 3.0, 3.1),
        ):
            spans.append(
                Span(lane=lane, name=lane, start=done + begin, end=done + end, step=target)
            )
    return spans


def crash_test(run_id: str = "c1", created: str = "2026-01-03T00:00:00+00:00") -> dict[str, Any]:
    """A document of ``crash-test --json``: one passed, one failed, one skipped, one of sync."""

    def trial(scenario: str, passed: bool | None, strategy: str = "gockpt") -> dict[str, Any]:
        return {
            "scenario": scenario,
            "point": "random",
            "strategy": strategy,
            "injected_at_step": 17,
            "restored_step": 16,
            "lost_steps": 1,
            "lost_s": 0.4,
            "source": "ssd",
            "recovery_s": None if passed is None else 2.5,
            "recovery": {"detect": 0.1, "start": 1.0, "open": 0.4, "read": 0.5, "to_device": 0.2,
                         "first_step": 0.3},
            "bit_identical": passed,
            "continued_identical": passed,
            "passed": passed,
            "detail": {True: "", False: "the weights differ", None: "not struck"}[passed],
            "command": "gockpt crash-test --scenario x",
        }  # fmt: skip

    trials = [trial("kill-trainer", True), trial("bit-flip", False), trial("sigterm", None),
              trial("kill-trainer", True, "sync")]  # fmt: skip
    return {
        "schema": 1,
        "kind": "crash-test",
        "run_id": run_id,
        "created": created,
        "seed": 3,
        "sabotage": None,
        "environment": {"host": "testhost", "device": "cpu", "emulated": False},
        "workload": {"model": "gpt-nano", "steps": 24, "interval": 4},
        "trials": trials,
        "summary": {"trials": 4, "passed": 2, "failed": 1, "skipped": 1},
    }


def gate(verdict: str = "worse", **changes: Any) -> dict[str, Any]:
    """A document of ``gate --json``: b1 against b0, one check worse, one good, one limit."""
    check = {"strategy": "gockpt", "detail": "", "interval": [-0.01, 0.02], "rounds": [5, 5]}
    return {
        "schema": 1,
        "kind": "gate",
        "run_id": "b1",
        "baseline": "b0",
        "verdict": verdict,
        "warnings": ["torch is 2.13.0, and was 2.12.0 in the baseline"],
        "absolute": False,
        "thresholds": {"throughput": {"max_regression": 0.02, "floor": 0.0, "sign": -1}},
        "checks": [
            {**check, "metric": "stall", "outcome": verdict, "baseline": 0.5, "current": 0.6,
             "worse_by": 0.1, "interval": [0.09, 0.11], "allowed": 0.05},
            {**check, "metric": "throughput", "outcome": "good", "baseline": 0.95, "current": 0.95,
             "worse_by": 0.0, "allowed": 0.0285},
            {"strategy": "gockpt", "metric": "identical == verified", "outcome": "good",
             "detail": "3 against 3"},
        ],
        **changes,
    }  # fmt: skip


def fill(path: Path) -> Path:
    """A database with two benches, a crash test and a baseline."""
    with Store(path) as store:
        older = bench("b0", created="2026-01-01T00:00:00+00:00", profile=None, scale=3.0)
        store.add_bench(older, traces())
        store.add_bench(bench(), traces())
        store.add_crash_test(crash_test())
        store.keep_baseline("main", store.document("b0"))
    return path


def hostile(text: str) -> dict[str, Any]:
    """A bench in which every name is this text."""
    made = copy.deepcopy(bench("hostile", created="2026-02-01T00:00:00+00:00"))
    made["run_id"] = text
    made["workload"]["model"] = text
    made["environment"].update(device=f"emulated:{text}", profile=text, host=text, git_sha=text)
    for one in made["results"][1:3]:
        one["problems"] = [text]
        one["fallbacks"] = [text]
    made["results"][1]["strategy"] = text
    return made
