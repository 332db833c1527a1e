"""The results of bench and crash-test in one SQLite file, written whole and read in parts.

Used by the commands and the dashboard, from any thread; never by the engine. What always holds: a
run is there entirely or not at all, and :meth:`Store.document` gives back the document that was
added.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import delete, insert
from sqlmodel import Session, col, select
from sqlmodel.sql.expression import SelectOfScalar

from gockpt.errors import ConfigError
from gockpt.events import Span
from gockpt.results.database import Database
from gockpt.results.documents import (
    PARTS,
    gate_row,
    live_row,
    result_row,
    run_row,
    samples,
    trial_row,
)
from gockpt.results.models import (
    GATE,
    LIVE,
    Baseline,
    Checkpoint,
    CheckpointRecord,
    Result,
    Run,
    Sample,
    SpanRow,
    Step,
    Trial,
)

_OfRepeat = TypeVar("_OfRepeat", Step, SpanRow, Checkpoint, Sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one process of a bench recorded besides the figures in the document."""

    result: int
    """Index of its row in the document's ``results``."""
    repeat: int = 0
    steps: Sequence[tuple[int, float]] = ()
    """(step, seconds) of each training step."""
    spans: Sequence[Span] = ()
    checkpoints: Sequence[CheckpointRecord] = ()


class Store:
    """The results database. Usable in a ``with`` statement."""

    def __init__(
        self, path: str | Path, *, read_only: bool = False, busy_s: float | None = None
    ) -> None:
        """Open or make the database; see :class:`gockpt.results.database.Database`."""
        self._database = Database(path, read_only=read_only, busy_s=busy_s)

    @property
    def path(self) -> Path:
        return self._database.path

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reading(self) -> AbstractContextManager[Session]:
        """A session for queries of the caller's own; it sees one state of the database."""
        return self._database.reading()

    # ── Adding ──

    def add_bench(self, document: Mapping[str, Any], traces: Iterable[Trace] = ()) -> None:
        """Add a document of ``bench --json`` and what its processes recorded.

        Raises:
            ConfigError: not such a document, or its run is there already.
        """
        run = run_row(document, "bench")
        with self._database.writing() as session:
            _add_run(session, run)
            results = [result_row(run.run_id, i, r) for i, r in enumerate(document["results"])]
            session.add_all(results)
            session.flush()
            ids = [result.id for result in results if result.id is not None]
            _insert(session, Sample, samples(ids, document["results"]))
            _add_traces(session, ids, traces)

    def add_crash_test(self, document: Mapping[str, Any]) -> None:
        """Add a document of ``crash-test --json``.

        Raises:
            ConfigError: not such a document, or its run is there already.
        """
        run = run_row(document, "crash-test")
        with self._database.writing() as session:
            _add_run(session, run)
            session.add_all(trial_row(run.run_id, i, t) for i, t in enumerate(document["trials"]))

    def add_gate(self, document: Mapping[str, Any], judged: Mapping[str, Any]) -> str:
        """Add a document of ``gate --json``; ``latest`` stays what was measured last.

        Args:
            judged: the document of the run that the gate is about, which need not be here.

        Returns:
            The id that the gate is found by: ``run_id`` in its document is that of the run.

        Raises:
            ConfigError: not such a document.
        """
        run_id = f"gate-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        with self._database.writing() as session:
            _add_run(session, gate_row(document, judged, run_id))
        return run_id

    def delete(self, run_id: str) -> None:
        """Delete a run with all that belongs to it. Baselines stay."""
        with self._database.writing() as session:
            session.exec(delete(Run).where(col(Run.run_id) == _find(session, run_id).run_id))

    # ── A run while it is being made ──

    def show_live(self, document: Mapping[str, Any]) -> None:
        """Let readers see how far a run has come, in place of what was shown of it before.

        Only :meth:`live` shows it: to everything else a run is there entirely or not at all.
        """
        with self._database.writing() as session:
            session.merge(live_row(document))

    def end_live(self, run_id: str) -> None:
        """It is no longer being made."""
        with self._database.writing() as session:
            session.exec(delete(Run).where(col(Run.run_id) == run_id, col(Run.kind) == LIVE))

    def live(self) -> list[Run]:
        """The runs that are being made, newest first; of one that was killed the row stays."""
        query = select(Run).where(Run.kind == LIVE).order_by(col(Run.created).desc())
        with self._database.reading() as session:
            return list(session.exec(query))

    # ── Reading ──

    def runs(
        self,
        *,
        kind: str | None = None,
        model: str | None = None,
        device: str | None = None,
        limit: int = 100,
    ) -> list[Run]:
        """The runs (of a kind, model, device), newest first."""
        query = _newest().limit(limit)
        for column, wanted in ((Run.kind, kind), (Run.model, model), (Run.device, device)):
            if wanted is not None:
                query = query.where(column == wanted)
        with self._database.reading() as session:
            return list(session.exec(query))

    def run(self, reference: str = "latest") -> Run:
        """One run, by its id, a unique beginning of it, or ``latest`` (of those that measured).

        Raises:
            ConfigError: no such run, or more than one.
        """
        with self._database.reading() as session:
            return _find(session, reference)

    def document(self, reference: str = "latest") -> dict[str, Any]:
        """The document of a run, as it was added."""
        with self._database.reading() as session:
            run = _find(session, reference)
            if run.kind == GATE:
                return dict(run.config)
            rows = (_results if run.kind == "bench" else _trials)(session, run.run_id)
            document = {**run.config, PARTS[run.kind]: [row.row for row in rows]}
            if run.environment:
                document["environment"] = run.environment
            return document

    def results(self, run_id: str) -> list[Result]:
        """The rows of a bench, in the order of the document."""
        with self._database.reading() as session:
            return _results(session, run_id)

    def trials(self, run_id: str) -> list[Trial]:
        """The trials of a crash test, in their order."""
        with self._database.reading() as session:
            return _trials(session, run_id)

    def samples(self, result_id: int, metric: str) -> list[float]:
        """The values of one metric, one a repeat."""
        rows = self._of_repeat(Sample, result_id, None)
        return [row.value for row in rows if row.metric == metric]

    def steps(self, result_id: int, *, repeat: int | None = None) -> list[Step]:
        """The steps of a row, of one repeat or of all."""
        return self._of_repeat(Step, result_id, repeat)

    def spans(self, result_id: int, *, repeat: int | None = None) -> list[SpanRow]:
        """The spans of a row, of one repeat or of all."""
        return self._of_repeat(SpanRow, result_id, repeat)

    def checkpoints(self, result_id: int, *, repeat: int | None = None) -> list[Checkpoint]:
        """The checkpoints of a row, of one repeat or of all."""
        return self._of_repeat(Checkpoint, result_id, repeat)

    def _of_repeat(
        self, table: type[_OfRepeat], result_id: int, repeat: int | None
    ) -> list[_OfRepeat]:
        query = select(table).where(table.result_id == result_id)
        if repeat is not None:
            query = query.where(table.repeat == repeat)
        with self._database.reading() as session:
            return list(session.exec(query.order_by(col(table.repeat), col(table.id))))

    # ── Baselines ──

    def keep_baseline(self, name: str, document: Mapping[str, Any]) -> Baseline:
        """Keep a document under a name, in place of an earlier one; its run need not be here."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        run_id = document["run_id"]
        baseline = Baseline(name=name, created=now, run_id=run_id, document=dict(document))
        with self._database.writing() as session:
            return session.merge(baseline)

    def baseline(self, name: str) -> Baseline:
        """
        Raises:
            ConfigError: no baseline of this name.
        """
        with self._database.reading() as session:
            found = session.get(Baseline, name)
            if found is None:
                names = list(session.exec(select(Baseline.name)))
                raise ConfigError(f"no baseline {name!r}; {_suggest(name, names, 'baselines')}")
            return found

    def baselines(self) -> list[Baseline]:
        """All baselines by name."""
        with self._database.reading() as session:
            return list(session.exec(select(Baseline).order_by(col(Baseline.name))))


# ── Inserting many rows ──


def _add_traces(session: Session, ids: Sequence[int], traces: Iterable[Trace]) -> None:
    for trace in traces:
        if not 0 <= trace.result < len(ids):
            raise ConfigError(f"a trace of result {trace.result}, but there are {len(ids)}")
        key = {"result_id": ids[trace.result], "repeat": trace.repeat}
        _insert(session, Step, ({**key, "step": s, "seconds": t} for s, t in trace.steps))
        _insert(session, SpanRow, ({**key, **_fields(span)} for span in trace.spans))
        _insert(session, Checkpoint, ({**key, **c.model_dump()} for c in trace.checkpoints))


def _fields(span: Span) -> dict[str, Any]:
    return {name: getattr(span, name) for name in span.__struct_fields__}


def _insert(session: Session, table: type[Any], rows: Iterable[dict[str, Any]]) -> None:
    """Insert many rows without an object for each."""
    if values := list(rows):
        session.execute(insert(table), values)


# ── Finding rows ──


def _results(session: Session, run_id: str) -> list[Result]:
    query = select(Result).where(Result.run_id == run_id).order_by(col(Result.position))
    return list(session.exec(query))


def _trials(session: Session, run_id: str) -> list[Trial]:
    query = select(Trial).where(Trial.run_id == run_id).order_by(col(Trial.position))
    return list(session.exec(query))


def _add_run(session: Session, run: Run) -> None:
    if session.get(Run, run.run_id) is not None:
        raise ConfigError(f"run {run.run_id} is among the results already; delete it first")
    session.add(run)
    session.flush()  # rows that refer to it come next


def _newest() -> SelectOfScalar[Run]:
    """All finished runs, newest first."""
    finished = select(Run).where(Run.kind != LIVE)
    return finished.order_by(col(Run.created).desc(), col(Run.run_id))


def _find(session: Session, reference: str) -> Run:
    newest = _newest()
    if reference == "latest":
        run = session.exec(newest.where(Run.kind != GATE).limit(1)).first()
        if run is None:
            raise ConfigError("there are no results yet; run `gockpt bench` first")
        return run
    exact = session.get(Run, reference)
    if exact is not None and exact.kind != LIVE:
        return exact
    begins = col(Run.run_id).startswith(reference, autoescape=True)
    found = list(session.exec(newest.where(begins).limit(2)))
    if len(found) == 1 and reference:
        return found[0]
    if found:
        raise ConfigError(f"more than one run begins with {reference!r}; give more of its id")
    names = [run.run_id for run in session.exec(newest.where(Run.kind != GATE).limit(50))]
    raise ConfigError(f"no run {reference!r}; {_suggest(reference, names, 'runs')}")


def _suggest(name: str, names: Sequence[str], what: str) -> str:
    """What to do about a name that is not there."""
    if close := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {close[0]!r}?"
    return f"there are {', '.join(names[:5])}" if names else f"there are no {what} yet"
