"""What the pages ask the results database. Each question is one short query with a limit.

Used on the server's worker threads, over a :class:`gockpt.results.Store` that is open for reading.
What always holds: no answer is larger than its limit, so a page of a database of millions of rows
takes as much memory as that of a small one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func
from sqlmodel import Session, col, select

from gockpt.results import Checkpoint, Result, Run, Sample, SpanRow, Step, Store, Trial
from gockpt.results.models import LIVE

PAGE = 50
"""Runs on one page of the list."""

MOST_SPANS = 20_000
"""Spans of one checkpoint; more than a person can see."""

MOST_STEPS = 20_000
"""Steps of one row that are read one by one; beyond, the slowest and fastest of each stretch."""


def runs(
    store: Store,
    *,
    kind: str | None = None,
    model: str | None = None,
    limit: int = PAGE,
    offset: int = 0,
) -> list[Run]:
    """Finished runs, newest first."""
    query = select(Run).where(Run.kind != LIVE)
    if kind:
        query = query.where(Run.kind == kind)
    if model:
        query = query.where(Run.model == model)
    query = query.order_by(col(Run.created).desc(), col(Run.run_id)).limit(limit).offset(offset)
    with store.reading() as session:
        return list(session.exec(query))


def known(store: Store, run_ids: Iterable[str | None]) -> set[str]:
    """Which of these runs are here; None is no run."""
    ids = [one for one in run_ids if one is not None]
    query = select(Run.run_id).where(col(Run.run_id).in_(ids), Run.kind != LIVE)
    with store.reading() as session:
        return set(session.exec(query))


def before(store: Store, run: Run) -> Run | None:
    """The newest older run of the same kind; rather one of the same model and device."""
    alike = (col(Run.model) == run.model) & (col(Run.device) == run.device)
    query = (
        select(Run)
        .where(Run.kind == run.kind, col(Run.created) < run.created)
        .order_by(alike.desc(), col(Run.created).desc(), col(Run.run_id))
        .limit(1)
    )
    with store.reading() as session:
        return session.exec(query).first()


def kinds(store: Store) -> dict[str, int]:
    """How many runs there are of each kind."""
    query = select(Run.kind, func.count()).where(Run.kind != LIVE).group_by(Run.kind)
    with store.reading() as session:
        return dict(session.exec(query).all())


def results(store: Store, run_ids: Sequence[str]) -> dict[str, list[Result]]:
    """The rows of several benches."""
    query = select(Result).where(col(Result.run_id).in_(run_ids)).order_by(col(Result.position))
    found: dict[str, list[Result]] = {one: [] for one in run_ids}
    with store.reading() as session:
        for row in session.exec(query):
            found[row.run_id].append(row)
    return found


def trial_counts(store: Store, run_ids: Sequence[str]) -> dict[str, dict[bool | None, int]]:
    """How many trials of each crash test passed (True), failed (False), were skipped (None)."""
    query = (
        select(Trial.run_id, Trial.passed, func.count())
        .where(col(Trial.run_id).in_(run_ids))
        .group_by(Trial.run_id, col(Trial.passed))
    )
    found: dict[str, dict[bool | None, int]] = {one: {} for one in run_ids}
    with store.reading() as session:
        for run_id, passed, number in session.exec(query):
            found[run_id][passed] = number
    return found


def checkpoints(store: Store, result_ids: Sequence[int]) -> list[Checkpoint]:
    """The checkpoints of several rows, in order."""
    query = (
        select(Checkpoint)
        .where(col(Checkpoint.result_id).in_(result_ids))
        .order_by(col(Checkpoint.result_id), col(Checkpoint.repeat), col(Checkpoint.step))
        .limit(MOST_STEPS)
    )
    with store.reading() as session:
        return list(session.exec(query))


def samples(store: Store, result_ids: Sequence[int]) -> list[Sample]:
    """All values of all repeats of several rows."""
    query = select(Sample).where(col(Sample.result_id).in_(result_ids)).limit(MOST_STEPS)
    with store.reading() as session:
        return list(session.exec(query))


def steps(store: Store, result_id: int, repeat: int = 0) -> list[Step]:
    """Step times in order; of a very long run the slowest and the fastest of each stretch."""
    mine = (Step.result_id == result_id, Step.repeat == repeat)
    with store.reading() as session:
        number = session.exec(select(func.count()).select_from(Step).where(*mine)).one()
        query = select(Step).where(*mine).order_by(col(Step.step))
        if number <= MOST_STEPS:
            return list(session.exec(query))
        stretch = col(Step.step) // -(-2 * number // MOST_STEPS)
        kept: list[Step] = []
        # SQLite takes the other columns from the row that has the largest (smallest) value.
        for extreme in (func.max(Step.seconds), func.min(Step.seconds)):
            chosen = select(Step.step, extreme).where(*mine).group_by(stretch)
            kept += [
                Step(result_id=result_id, repeat=repeat, step=step, seconds=seconds)
                for step, seconds in session.exec(chosen)
            ]
        return sorted(kept, key=lambda one: one.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A stretch of one row's time: a checkpoint from its first window to its commit."""

    spans: list[SpanRow]
    cut: bool
    """There were more spans than are read."""


def checkpoint_spans(store: Store, checkpoint: Checkpoint) -> Moment:
    """All that happened while one checkpoint was taken, written and committed."""
    mine = (SpanRow.result_id == checkpoint.result_id, SpanRow.repeat == checkpoint.repeat)
    opens = checkpoint.step - max(1, checkpoint.windows)
    with store.reading() as session:
        begin = _one(session, func.min(SpanRow.start), *mine, SpanRow.step == opens)
        end = _one(session, func.max(SpanRow.end), *mine, SpanRow.step == checkpoint.step)
        during: Any = col(SpanRow.step).between(opens, checkpoint.step)
        if begin is not None and end is not None:
            during = (col(SpanRow.end) >= begin) & (col(SpanRow.start) <= end)
        query = select(SpanRow).where(*mine, during).order_by(col(SpanRow.start))
        found = list(session.exec(query.limit(MOST_SPANS + 1)))
    return Moment(spans=found[:MOST_SPANS], cut=len(found) > MOST_SPANS)


def _one(session: Session, value: Any, *where: Any) -> float | None:
    found: float | None = session.exec(select(value).where(*where)).one()
    return found


def names(store: Store, column: Any) -> list[str]:
    """The different values of a column of runs or results."""
    query = select(column).distinct().order_by(column).limit(200)
    with store.reading() as session:
        return [one for one in session.exec(query) if one is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One row of one run of the past, for a trend."""

    run: Run
    result: Result


def past(
    store: Store, *, strategy: str, model: str | None, device: str | None, limit: int = 500
) -> list[Past]:
    """One strategy over the newest runs, oldest first."""
    query = (
        select(Run, Result)
        .join(Result, col(Result.run_id) == col(Run.run_id))
        .where(Result.strategy == strategy, Run.kind == "bench")
        .order_by(col(Run.created).desc(), col(Result.position))
        .limit(limit)
    )
    if model:
        query = query.where(Run.model == model)
    if device:
        query = query.where(Run.device == device)
    with store.reading() as session:
        rows = [Past(run=run, result=result) for run, result in session.exec(query)]
    return rows[::-1]
