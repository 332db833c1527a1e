"""What came of the trials: one record for each, and the document of ``--json``.

Pure. docs/crash-test.md describes the fields.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from gockpt.cli import crash_verdict
from gockpt.cli.crash_process import Life
from gockpt.cli.crash_setup import INTERVAL, STEPS, Case, Setup, policy_of
from gockpt.cli.crash_trial import Trial

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trial that has ended."""

    case: Case
    row: dict[str, Any]

    @property
    def word(self) -> str:
        """``passed``, ``failed`` or ``skipped``."""
        passed = self.row["passed"]
        return SKIPPED if passed is None else PASSED if passed else FAILED

    @property
    def decides(self) -> bool:
        """Whether a failure of it is one of the whole crash test: gockpt's own strategies only."""
        return policy_of(self.case.strategy) is not None

    @classmethod
    def of(
        cls,
        trial: Trial,
        problems: list[str],
        skipped: str | None,
        seconds: float,
        logs: list[str],
    ) -> Outcome:
        """What a trial has come to."""
        facts, case = trial.facts, trial.case
        passed = None if skipped is not None else not problems
        recovery = _recovery(trial) if facts.restarted and skipped is None else None
        final = trial.lives[-1] if trial.lives else None
        ended = final is not None and final.ended is not None
        return cls(
            case=case,
            row={
                "scenario": case.scenario.name,
                "family": case.scenario.family,
                "point": case.point,
                "strategy": case.strategy,
                "seed": case.seed,
                "sabotage": trial.setup.sabotage and trial.setup.sabotage.name,
                "injected_at_step": facts.injected_step,
                "promised_step": facts.promised,
                "restored_step": crash_verdict.restored(trial),
                "lost_steps": crash_verdict.lost(trial),
                "lost_s": _lost_seconds(trial),
                "source": final.ready.source if final is not None and final.ready else None,
                "recovery_s": None if recovery is None else sum(recovery.values()),
                "recovery": recovery,
                "bit_identical": None if skipped else not _differs(trial.lives),
                "continued_identical": None if skipped else ended and not problems,
                "passed": passed,
                "detail": skipped or "; ".join(problems) or "; ".join(facts.notes),
                "problems": problems,
                "different_tensors": crash_verdict.different(trial),
                "seconds": seconds,
                "command": again(trial.setup, case),
                "log": logs,
            },
        )


def _differs(lives: list[Life]) -> bool:
    return any(life.ready is not None and life.ready.different for life in lives)


def _recovery(trial: Trial) -> dict[str, float] | None:
    """Seconds from the death to the end of the first new step, in their parts."""
    if len(trial.lives) < 2:
        return None
    life = trial.lives[-1]
    ready = life.ready
    if ready is None or not life.stepped:
        return None
    reading = ready.read_s + ready.apply_s
    return {
        "detect": trial.facts.detect_s,
        "start": ready.built_at - life.began_at,
        "open": ready.opened_at - ready.built_at,
        "read": ready.read_s,
        "to_device": ready.apply_s,
        "first_step": max(0.0, life.stepped[0].at - ready.opened_at - reading),
    }


def _lost_seconds(trial: Trial) -> float | None:
    """Seconds of work that were lost: from the end of the restored step to the crash."""
    facts = trial.facts
    if not facts.restarted or facts.injected_at is None or len(trial.lives) < 2:
        return None
    back = crash_verdict.restored(trial) or 0
    ends = {one.step: one.at for life in trial.lives[:-1] for one in life.stepped}
    if back > max(ends, default=0):
        return 0.0  # it died in this very step, behind the update
    first = trial.lives[0].ready
    begin = ends.get(back, first.opened_at if first is not None else facts.injected_at)
    last = max(ends.values(), default=begin)
    return max(0.0, min(last, facts.injected_at) - begin)


def again(setup: Setup, case: Case) -> str:
    """The command line that does this one trial again."""
    words = ["gockpt", "crash-test", "--scenario", case.scenario.name, "--point", case.point]
    words += ["--strategies", case.strategy, "--seed", str(case.seed), "--trials", "1"]
    words += ["--model", setup.task.model, "--device", setup.task.device]
    if not setup.task.calibrated:  # a number was given; one equal to the model's own counts too
        words += ["--tokens", str(setup.task.tokens)]
    if setup.sabotage is not None:
        words += ["--sabotage", setup.sabotage.name]
    return shlex.join(words)


def document(
    setup: Setup, outcomes: Sequence[Outcome], run_id: str, created: str
) -> dict[str, Any]:
    """The whole as JSON."""
    return {
        "schema": 1,
        "kind": "crash-test",
        "run_id": run_id,
        "created": created,
        "seed": setup.seed,
        "sabotage": setup.sabotage.name if setup.sabotage else None,
        "environment": environment(setup),
        "workload": workload(setup),
        "trials": [one.row for one in outcomes],
        "summary": {**_counts(outcomes), "strategies": _strategies(setup, outcomes)},
    }


def environment(setup: Setup) -> dict[str, Any]:
    """Where the crash test runs."""
    profile = setup.task.profile
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": setup.task.device,
        "emulated": profile is not None,
        "profile": None if profile is None else profile.name,
    }


def workload(setup: Setup) -> dict[str, Any]:
    """What it trains."""
    return {
        "model": setup.task.model,
        "precision": setup.task.precision,
        "tokens_per_step": setup.task.tokens,
        "steps": STEPS,
        "interval": INTERVAL,
    }


def _counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    words = [one.word for one in outcomes]
    counts = {word: words.count(word) for word in (PASSED, FAILED, SKIPPED)}
    return {"trials": len(outcomes), **counts}


def _strategies(setup: Setup, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [
        _summary(name, [one for one in outcomes if one.case.strategy == name])
        for name in setup.strategies
    ]


def _summary(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One strategy: how it fared, and what a crash cost on average."""
    ran = [one.row for one in outcomes if one.row["recovery_s"] is not None]
    steps = [row["lost_steps"] for row in ran if row["lost_steps"] is not None]
    seconds = [row["lost_s"] for row in ran if row["lost_s"] is not None]
    return {
        "strategy": name,
        "decides": policy_of(name) is not None,
        **_counts(outcomes),
        "lost_steps": mean(steps) if steps else None,
        "lost_s": mean(seconds) if seconds else None,
        "recovery_s": mean(row["recovery_s"] for row in ran) if ran else None,
    }
