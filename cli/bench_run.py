"""The bench itself: a golden run, then one worker after the other, then the document.

Runs in the parent, on its main thread. What always holds: when it ends, for whatever reason, no
worker runs and its temporary directory is gone.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gockpt.cli import output
from gockpt.cli.bench_document import Outcome, Reference, Round, document, reference, too_busy
from gockpt.cli.bench_job import REAL_SHARE, Failed, Golden, Job, Measured, Progress
from gockpt.cli.bench_setup import Setup
from gockpt.cli.bench_worker import Worker
from gockpt.errors import AgentError, GockptError
from gockpt.results import CheckpointRecord, Trace

ATTEMPTS = 3
"""Runs of one strategy, at the most, for one in which the machine is quiet enough."""


class View(Protocol):
    """Who is told how far the bench has come."""

    def progress(self, position: int | None, progress: Progress) -> None:
        """The run at this position of the strategies (None: the golden one) has come so far."""
        ...

    def finished(self, outcomes: list[Outcome], against: Reference) -> None:
        """One more strategy is done."""
        ...

    def note(self, line: str) -> None:
        """Something that the user should know now."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A finished bench."""

    document: dict[str, Any]
    traces: list[Trace] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    """(strategy, what its engine warned of)."""


def run(setup: Setup, view: View) -> Report:
    """Run everything.

    Raises:
        GockptError: the golden run failed, so there is nothing to compare with.
    """
    created = datetime.now(UTC)
    run_id = f"{created:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    directory = Path(tempfile.mkdtemp(prefix="gockpt-bench-", dir=setup.directory))
    try:
        golden = _golden(setup, directory, view)
        rounds = [_round(setup, directory, golden, repeat, view) for repeat in range(setup.repeats)]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Report(
        document=document(
            setup,
            rounds,
            run_id=run_id,
            created=created.isoformat(timespec="seconds"),
        ),
        traces=[
            trace
            for repeat, one in enumerate(rounds)
            for position, outcome in enumerate(one.outcomes)
            if (trace := _trace(position, repeat, outcome)) is not None
        ],
        warnings=[
            (one.strategy, warning)
            for each in rounds
            for one in each.outcomes
            if isinstance(one.result, Measured)
            for warning in one.result.warnings
        ],
    )


def _round(setup: Setup, directory: Path, golden: Golden, repeat: int, view: View) -> Round:
    """All strategies once. Rounds follow one another, so that whatever slows the machine for a
    while slows all strategies of a round, and the ratios within it stand."""
    if setup.repeats > 1:
        view.note(f"round {repeat + 1} of {setup.repeats}")
    outcomes: list[Outcome] = []
    against = reference(outcomes, golden.idle_agent_bytes)
    for position, strategy in enumerate(setup.strategies):
        job = _job(setup, directory, strategy=strategy, tokens=golden.real_tokens)
        outcomes.append(_measure_quietly(job, position, view))
        against = reference(outcomes, golden.idle_agent_bytes)
        view.finished(outcomes, against)
    return Round(outcomes=outcomes, against=against)


def _job(setup: Setup, directory: Path, *, strategy: str | None, tokens: int | None) -> Job:
    return Job(
        **msgspec.structs.asdict(setup.task),
        strategy=strategy,
        measured_tokens=tokens,
        steps=setup.steps,
        interval=setup.interval,
        windows=setup.windows,
        warmup=setup.warmup,
        directory=str(directory / (strategy or "golden")),
        golden=str(directory / "golden.json"),
        faults=setup.faults,
    )


def _golden(setup: Setup, directory: Path, view: View) -> Golden:
    tokens = None if setup.task.profile else setup.task.tokens
    with Worker(_job(setup, directory, strategy=None, tokens=tokens)) as worker:
        result = _listen(worker, lambda progress: view.progress(None, progress), view)
    if isinstance(result, Golden):
        _warn_of_slowness(result, view)
        return result
    if isinstance(result, Failed):
        raise GockptError(f"the golden run failed: {result.reason}")
    raise AgentError(f"the golden run ended with {type(result).__name__}")


def _warn_of_slowness(golden: Golden, view: View) -> None:
    if golden.real_s is None or golden.modelled_s is None:
        return
    if golden.real_s > REAL_SHARE * golden.modelled_s:
        view.note(
            f"A real step of {golden.real_tokens} tokens takes {output.seconds(golden.real_s)} "
            f"here and should take at most a quarter of the modelled "
            f"{output.seconds(golden.modelled_s)}: rows may be invalid."
        )


def _measure_quietly(job: Job, position: int, view: View) -> Outcome:
    """Measure, again if something else kept the machine busy: that says nothing of the strategy."""
    for attempt in range(1, ATTEMPTS + 1):
        outcome = _measure(job, position, view)
        shutil.rmtree(job.directory, ignore_errors=True)
        busy = too_busy(outcome.result) if isinstance(outcome.result, Measured) else None
        if busy is None or attempt == ATTEMPTS:
            break
        view.note(f"{job.strategy}: {busy}; it is measured again.")
    return replace(outcome, attempts=attempt)


def _measure(job: Job, position: int, view: View) -> Outcome:
    with Worker(job) as worker:
        try:
            result = _listen(worker, lambda progress: view.progress(position, progress), view)
        except AgentError as error:
            result = Failed(kind=type(error).__name__, reason=str(error))
        if isinstance(result, Golden):
            raise AgentError(f"the run of {job.strategy} ended as a golden one")
        known = worker.peak.samples > 0
        return Outcome(
            strategy=job.strategy or "",
            result=result,
            trainer_bytes=worker.peak.trainer if known else None,
            agent_bytes=worker.peak.agent if known else None,
        )


def _listen(
    worker: Worker, progressed: Callable[[Progress], None], view: View
) -> Golden | Measured | Failed:
    for message in worker.messages():
        if message is None:
            view.tick()
        elif isinstance(message, Progress):
            progressed(message)
        else:
            return message
    raise AgentError("the worker ended without a result")


def _trace(position: int, repeat: int, outcome: Outcome) -> Trace | None:
    """What the database keeps beside the document."""
    result = outcome.result
    if isinstance(result, Failed):
        return None
    number = max(1, len(result.checkpoints))
    records = [
        CheckpointRecord(
            step=one.step,
            strategy=outcome.strategy,
            windows=one.windows,
            fallback=one.fallback,
            proof=one.proof,
            identical=one.identical,
            blocked_s=one.blocked_s,
            consistent_s=one.consistent_s,
            durable_s=one.durable_s,
            # Of all checkpoints together, as every one of a run has the same layout.
            state_bytes=result.state_bytes // number,
            gradient_bytes=result.gradient_bytes // number,
            persisted_bytes=result.persisted_bytes // number,
        )
        for one in result.checkpoints
    ]
    return Trace(
        result=position,
        repeat=repeat,
        steps=result.steps,
        spans=result.spans,
        checkpoints=records,
    )
