"""The crash test itself: golden runs, one trial after the other, then the document.

Runs in the parent, on its main thread. What always holds: when it ends, for whatever reason, no
process of it runs, and nothing is left but the logs of failed trials, which it names.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from gockpt.cli import crash_verdict
from gockpt.cli.crash_damage import damage
from gockpt.cli.crash_document import FAILED, Outcome, document
from gockpt.cli.crash_golden import golden_run
from gockpt.cli.crash_kill import process
from gockpt.cli.crash_power import power
from gockpt.cli.crash_setup import MARKER, Case, Setup
from gockpt.cli.crash_starve import disk
from gockpt.cli.crash_training import event_of, training
from gockpt.cli.crash_trial import Skipped, Trial, tail
from gockpt.errors import GockptError

FAMILIES: dict[str, Callable[[Trial], None]] = {
    "process": process,
    "power": power,
    "disk": disk,
    "damage": damage,
    "training": training,
}


class View(Protocol):
    """Who is told how far the crash test has come."""

    def golden(self) -> None:
        """An uninterrupted run is being made."""
        ...

    def begins(self, case: Case) -> None:
        """A trial begins."""
        ...

    def ended(self, outcome: Outcome) -> None:
        """A trial has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A finished crash test."""

    document: dict[str, Any]
    outcomes: list[Outcome]
    logs: Path | None
    """Where the logs of failed trials are."""
    setup: Setup

    @property
    def good(self) -> bool:
        """Whether every trial of gockpt's own strategies passed, or was skipped.

        A planted bug is never good: found, or not found, which is worse.
        """
        failed = any(one.word == FAILED and one.decides for one in self.outcomes)
        return not failed and self.setup.sabotage is None


def run(setup: Setup, view: View) -> Report:
    """Run everything.

    Raises:
        GockptError: a golden run failed, so there is nothing to compare with.
    """
    created = datetime.now(UTC)
    run_id = f"{created:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    outcomes: list[Outcome] = []
    with _ground(setup, run_id) as ground:
        for number, case in enumerate(setup.cases, 1):
            outcomes.append(_trial(setup, case, ground / f"trial-{number:03d}", view))
            view.ended(outcomes[-1])
    made = document(setup, outcomes, run_id, created.isoformat(timespec="seconds"))
    logs = ground if ground.exists() else None
    return Report(document=made, outcomes=outcomes, logs=logs, setup=setup)


@contextmanager
def _ground(setup: Setup, run_id: str) -> Iterator[Path]:
    """The directory of all trials; after an orderly end only what is in it keeps it."""
    top = setup.directory
    made_top = top is not None and not top.exists()
    if top is None:
        ground = Path(tempfile.mkdtemp(prefix="gockpt-crash-"))
    else:
        top.mkdir(exist_ok=True)
        (top / MARKER).touch()
        ground = top / run_id
        ground.mkdir()
    try:
        yield ground
    except BaseException:
        shutil.rmtree(ground, ignore_errors=True)
        if top is not None and made_top:
            shutil.rmtree(top, ignore_errors=True)
        raise
    if not any(ground.iterdir()):
        ground.rmdir()


def _trial(setup: Setup, case: Case, place: Path, view: View) -> Outcome:
    place.mkdir()
    view.golden()
    golden = golden_run(setup, case.seed, event_of(case), place)
    view.begins(case)
    began = time.monotonic()
    trial = Trial(setup, case, golden, place)
    problems: list[str] = []
    skipped: str | None = None
    passed = False
    try:
        try:
            FAMILIES[case.scenario.family](trial)
            problems = crash_verdict.judge(trial)
        except Skipped as reason:
            problems = crash_verdict.broke(trial)
            skipped = None if problems else str(reason)
        except GockptError as error:
            problems = [f"{type(error).__name__}: {error}", *trial.facts.problems]
        passed = not problems and skipped is None
        logs = [] if passed else [line for life in trial.lives for line in tail(Path(life.job.log))]
        return Outcome.of(trial, problems, skipped, time.monotonic() - began, logs)
    finally:
        trial.close(keep_logs=bool(problems))
