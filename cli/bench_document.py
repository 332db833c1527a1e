"""The document of ``bench --json`` from what the workers measured. Pure functions; docs/metrics.md
says what each figure means."""

from __future__ import annotations

import dataclasses
import math
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gockpt
from gockpt.cli import bench_repeats
from gockpt.cli.bench_job import Failed, Measured
from gockpt.cli.bench_setup import Setup
from gockpt.cli.peers import catalog
from gockpt.cli.task import Task
from gockpt.pace import Pacer
from gockpt.results import noise
from gockpt.results.documents import DOCUMENT_SCHEMA
from gockpt.results.noise import mean_and_spread
from gockpt.workloads import param_count

OVERRUN_LIMIT = 0.001
"""Share of the loop that emulated phases may be late by in all."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one strategy."""

    strategy: str
    result: Measured | Failed
    trainer_bytes: int | None
    """At the peak; None where it can't be known."""
    agent_bytes: int | None
    attempts: int = 1
    """Runs that it took until the machine was quiet enough for the emulation, or was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the rows are compared with: the two ``none``."""

    loop_s: float | None
    """Mean; None before there is any."""
    spread: float | None
    """Their difference, as a share of the mean; None where there is only one."""
    trainer_bytes: float | None
    idle_agent_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All strategies once, and what they are compared with."""

    outcomes: Sequence[Outcome]
    against: Reference


def reference(outcomes: Sequence[Outcome], idle_agent_bytes: int | None) -> Reference:
    """Of the ``none`` among these outcomes."""
    loops = [
        one.result.loop_s
        for one in outcomes
        if one.strategy == "none" and isinstance(one.result, Measured)
    ]
    sizes = [
        one.trainer_bytes
        for one in outcomes
        if one.strategy == "none" and one.trainer_bytes is not None
    ]
    mean, spread = mean_and_spread(loops)
    return Reference(
        loop_s=mean,
        spread=spread,
        trainer_bytes=statistics.fmean(sizes) if sizes else None,
        idle_agent_bytes=idle_agent_bytes,
    )


def reference_of(bench: Mapping[str, Any]) -> Reference:
    """The reference of a finished document, as far as its rows tell."""
    loops = [
        one["loop_s"]
        for one in bench["results"]
        if one["strategy"] == "none" and one["loop_s"] is not None
    ]
    mean, spread = mean_and_spread(loops)
    return Reference(loop_s=mean, spread=spread, trainer_bytes=None, idle_agent_bytes=None)


def decided(relative: float | None, against: Reference) -> bool:
    """Whether a relative throughput differs from 1 by more than the machine's noise."""
    return noise.decided(relative, against.spread)


def document(
    setup: Setup,
    rounds: Sequence[Round],
    *,
    run_id: str,
    created: str,
) -> Json:
    """The whole document: a row for each strategy, of all rounds together."""
    rows = [[row(setup, outcome, one.against) for outcome in one.outcomes] for one in rounds]
    return {
        "schema": DOCUMENT_SCHEMA,
        "kind": "bench",
        "run_id": run_id,
        "created": created,
        "environment": environment(setup.task),
        "workload": workload(setup),
        "results": [bench_repeats.merged(repeats) for repeats in zip(*rows, strict=True)],
        **peers(setup),
    }


def peers(setup: Setup) -> Json:
    """What there is to say once other people's engines were asked for; else nothing."""
    ran = [name for name in setup.strategies if catalog.find(name) is not None]
    if not ran and not setup.not_run:
        return {}
    return {
        "engines": [
            {"strategy": name, "version": version, **dataclasses.asdict(durability)}
            for name, (version, durability) in catalog.stated(setup.strategies).items()
        ],
        "not_run": [{"strategy": name, "reason": reason} for name, reason in setup.not_run],
    }


def environment(task: Task) -> Json:
    """Where the bench runs."""
    profile = task.profile
    return {
        "git_sha": _git_sha(),
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": task.device,
        "emulated": profile is not None,
        "profile": None if profile is None else profile.name,
        "shrink": task.shrink,
    }


def workload(setup: Setup) -> Json:
    """What it trains."""
    task, number = setup.task, setup.task.number_format
    real = param_count(task.real_preset)
    return {
        "model": task.model,
        "precision": task.precision,
        "params": param_count(task.preset),
        "device_params": real,
        "tokens_per_step": task.tokens,
        "steps": setup.steps,
        "interval": setup.interval,
        "seed": task.seed,
        "windows": setup.windows,
        "state_bytes": real * number.state_bytes,
        "grad_bytes": real * number.grad_bytes,
    }


def row(setup: Setup, outcome: Outcome, against: Reference) -> Json:
    """One row of the results."""
    result = outcome.result
    if isinstance(result, Failed):
        return _empty_row(outcome.strategy, [f"{result.kind}: {result.reason}"])
    problems = problems_of(result)
    counted = [seconds for step, seconds in result.steps if step > setup.warmup]
    tokens = setup.task.tokens * len(counted)
    relative = None if against.loop_s is None else against.loop_s / result.loop_s
    saved = [one for one in result.checkpoints if one.committed]
    later = [one for one in saved if one.step > setup.warmup]
    number = max(1, len([one for one in result.checkpoints if one.step > setup.warmup]))
    work = _work(setup, result)
    latency = _median([one.durable_s for one in later])
    excess = None if against.loop_s is None else (result.loop_s - against.loop_s) / number
    return {
        "strategy": outcome.strategy,
        "valid": not problems,
        "problems": problems,
        "attempts": outcome.attempts,
        "relative_throughput": relative,
        "tokens_per_s": {
            "loop": tokens / result.loop_s,
            "wall": tokens / (result.loop_s + result.drain_s),
        },
        "step_s": {"median": statistics.median(counted), "p95": percentile(counted, 0.95)},
        "stall": {
            "blocked_s_per_checkpoint": result.blocked_s / number,
            "excess_s_per_checkpoint": excess if outcome.strategy != "none" else 0.0,
        },
        "loop_s": result.loop_s,
        "drain_s": result.drain_s,
        "wall_s": result.loop_s + result.drain_s,
        "checkpoints": {
            "requested": len(result.checkpoints),
            "committed": len(saved),
            "verified": sum(one.identical is not None for one in saved),
            "identical": sum(one.identical is True for one in saved),
            "in_flight_max": result.in_flight_max,
        },
        "windows": max((one.windows for one in later), default=None),
        "fallbacks": [one.fallback for one in later if one.fallback is not None],
        "bytes": {
            "state": result.state_bytes,
            "gradients": result.gradient_bytes,
            "persisted": result.persisted_bytes,
        },
        "latency_s": {
            "consistent": _median([one.consistent_s for one in later]),
            "durable": latency,
        },
        "work_s": work,
        "memory_bytes": {
            "trainer_added": _added(outcome.trainer_bytes, against.trainer_bytes),
            "agent_added": _agent_added(outcome, against),
            "predicted": result.predicted_bytes,
        },
        "emulation": {
            "overruns": result.overruns,
            "worst_s": None if result.overruns is None else result.worst_overrun_s,
        },
        "samples": bench_repeats.samples(
            valid=not problems,
            relative_throughput=relative,
            blocked_s_per_checkpoint=result.blocked_s / number,
            drain_s=result.drain_s,
            step_s=statistics.median(counted),
            durable_s=latency,
            copy_s=work["copy"],
            replay_s=work["replay"],
            hook_s=work["hook"],
        ),
    }


def _work(setup: Setup, result: Measured) -> Json:
    """What a checkpoint costs in work, hidden or not, and the hooks of a pass. Seconds."""
    return {
        "copy": _each_checkpoint(setup, result, "state", "gradients"),
        "replay": _each_checkpoint(setup, result, "replay"),
        "hook": result.hook_s,
    }


def _each_checkpoint(setup: Setup, result: Measured, *lanes: str) -> float | None:
    """Seconds of these lanes in one checkpoint: the median of those behind the warm-up.

    A stream that keeps a pace makes up for a late wake-up in its next turn, which is then recorded
    as shorter; so a gap that is no longer than one (``Pacer.LATE``) counts as work.
    """
    spent = {one.step: 0.0 for one in result.checkpoints if one.step > setup.warmup}
    reached = -math.inf
    for span in sorted(result.spans, key=lambda span: span.start):
        if span.lane in lanes:
            target = -(-span.step // setup.interval) * setup.interval
            began = reached if span.start <= reached + Pacer.LATE else span.start
            if target in spent:
                spent[target] += max(0.0, span.end - began)
            reached = max(reached, span.end)
    return _median(list(spent.values()))


def too_busy(result: Measured) -> str | None:
    """Why the emulation did not keep its times, or None if it did."""
    late = result.overrun_s / result.loop_s
    if late <= OVERRUN_LIMIT:
        return None
    return (
        "the machine was too busy, or the engine itself kept it so: "
        f"{result.overruns} emulated phases ran over, by {late:.2%} of the loop "
        f"(limit {OVERRUN_LIMIT:.1%})"
    )


def problems_of(result: Measured) -> list[str]:
    """Why a row does not count; empty if it does."""
    busy = too_busy(result)
    found = [] if busy is None else [busy]
    found += [
        f"step {one.step} was not committed" for one in result.checkpoints if not one.committed
    ]
    for one in result.checkpoints:
        # Where the proof itself says that last bits may differ (CUDA), the hashes cannot agree.
        if one.committed and one.identical is not True and one.proof != "close":
            found.append(f"not identical: {one.difference}")
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _added(peak: int | None, base: float | None) -> int | None:
    return None if peak is None or base is None else round(peak - base)


def _agent_added(outcome: Outcome, against: Reference) -> int | None:
    return 0 if not outcome.agent_bytes else _added(outcome.agent_bytes, against.idle_agent_bytes)


def _empty_row(strategy: str, problems: list[str]) -> Json:
    """A strategy that could not be measured: every figure is unknown, none is zero."""
    return {
        "strategy": strategy,
        "valid": False,
        "problems": problems,
        "attempts": 1,
        "relative_throughput": None,
        "tokens_per_s": {"loop": None, "wall": None},
        "step_s": {"median": None, "p95": None},
        "stall": {"blocked_s_per_checkpoint": None, "excess_s_per_checkpoint": None},
        "loop_s": None,
        "drain_s": None,
        "wall_s": None,
        "checkpoints": {
            "requested": None,
            "committed": None,
            "verified": None,
            "identical": None,
            "in_flight_max": None,
        },
        "windows": None,
        "fallbacks": [],
        "bytes": {"state": None, "gradients": None, "persisted": None},
        "latency_s": {"consistent": None, "durable": None},
        "work_s": {"copy": None, "replay": None, "hook": None},
        "memory_bytes": {"trainer_added": None, "agent_added": None, "predicted": None},
        "emulation": {"overruns": None, "worst_s": None},
        "samples": bench_repeats.samples(valid=False),
    }


def _git_sha() -> str | None:
    """The commit of the checkout that this gockpt runs from, if it does."""
    here = Path(gockpt.__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
