"""What came of the trials of ``gockpt crash-test --command``: records, document, a last sentence.

Pure functions; docs/metrics.md says what each figure means.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from gockpt.cli import output
from gockpt.cli.crash_command_files import Compared
from gockpt.cli.crash_command_lives import Launch
from gockpt.cli.crash_command_options import Order
from gockpt.results.documents import DOCUMENT_SCHEMA

DEADLINE_FACTOR = 5.0
LEAST_DEADLINE = 60.0
"""A launch may take this many times the golden run, and this many seconds at least."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The run that nobody killed."""

    directory: Path
    launch: Launch

    @property
    def ready_s(self) -> float:
        """Seconds until its first step, or its first output; 0 where neither is known."""
        return self.launch.ready_s or 0.0

    @property
    def deadline(self) -> float:
        return max(LEAST_DEADLINE, DEADLINE_FACTOR * self.launch.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial, and what came of it."""

    number: int
    launches: tuple[Launch, ...]
    passed: bool | None
    """None: skipped, as no kill landed."""
    detail: str
    compared: tuple[Compared, ...]
    lost_s: float
    """Seconds of work that were done again; see docs/crash-test.md."""
    logs: Path | None = None

    @property
    def line(self) -> str:
        """For people."""
        kept = "" if self.logs is None else f"; logs in {self.logs}"
        verdict = {True: "passed", False: "FAILED", None: "skipped"}[self.passed]
        lives = "; ".join(str(one) for one in self.launches if one.killed or not one.completed)
        return f"trial {self.number} {verdict}: {lives or 'no kill'}: {self.detail}{kept}"


def lost_s(golden: Golden, launches: Sequence[Launch]) -> float:
    """Seconds of all launches, beyond those of the golden run and of the further starts."""
    total = sum(launch.seconds for launch in launches)
    return max(0.0, total - golden.launch.seconds - golden.ready_s * (len(launches) - 1))


def document(
    order: Order, golden: Golden, trials: Sequence[Trial], *, run_id: str, created: datetime
) -> Json:
    """The document of ``--json``; docs/metrics.md says what each figure means."""
    return {
        "schema": DOCUMENT_SCHEMA,
        "kind": "crash-test",
        "run_id": run_id,
        "created": created.isoformat(timespec="seconds"),
        "seed": order.seed,
        "sabotage": None,
        "workload": {"command": order.text, "results": list(order.results)},
        "environment": {
            "host": platform.node(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "golden": {"seconds": golden.launch.seconds, "ready_s": golden.ready_s},
        "trials": [row(one) for one in trials],
        "summary": {
            "trials": len(trials),
            "passed": sum(one.passed is True for one in trials),
            "failed": sum(one.passed is False for one in trials),
            "skipped": sum(one.passed is None for one in trials),
        },
    }


def row(trial: Trial) -> Json:
    """One of the document's ``trials``. Steps are None where the command does not tell them."""
    kills = [launch for launch in trial.launches if launch.killed]
    before = [step for launch in kills[:1] for step in launch.steps]
    after = [launch.steps[0] for launch in trial.launches[1:] if launch.steps]
    told = [step for launch in trial.launches for step in launch.steps]
    return {
        "scenario": "command",
        "point": "random",
        "strategy": "command",
        "injected_at_step": before[-1] if before else None,
        "restored_step": after[0] - 1 if after else None,
        "lost_steps": len(told) - len(set(told)) if told else None,
        "lost_s": trial.lost_s,
        "source": None,
        "recovery_s": next((one.ready_s for one in trial.launches[1:] if one.steps), None),
        "bit_identical": None,
        "continued_identical": None if trial.passed is None else trial.passed,
        "passed": trial.passed,
        "detail": trial.detail,
        "launches": [
            {"seconds": one.seconds, "code": one.code, "killed": one.killed is not None,
             "how": str(one)} for one in trial.launches
        ],
        "files": [
            {"name": one.name, "compared_as": one.kind, "differences": list(one.differences),
             "count": one.count}
            for one in trial.compared
        ],
        "logs": None if trial.logs is None else str(trial.logs),
    }  # fmt: skip


def verdict(made: Json) -> str:
    """The document in a sentence."""
    counts = made["summary"]
    judged = counts["passed"] + counts["failed"]
    text = f"{counts['passed']} of {judged} trials ended as the golden run did"
    if counts["skipped"]:
        text += f", {counts['skipped']} skipped"
    lost = [one["lost_s"] for one in made["trials"] if one["passed"]]
    if lost:
        typical, most = output.seconds(statistics.median(lost)), output.seconds(max(lost))
        text += f"; work lost in one: {typical} (median), {most} at most"
    return text
