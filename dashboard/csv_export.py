"""Every table of the results as CSV, a piece at a time.

Used on the server's worker threads. What always holds: no more than :data:`PIECE` rows are in
memory, and no cell begins with a character that a spreadsheet takes for a formula.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal

from sqlmodel import SQLModel, col, select

from gockpt.results import Checkpoint, Result, Run, Sample, SpanRow, Step, Store, Trial
from gockpt.results.models import GATE, LIVE
from gockpt.results.verdicts import Finding

PIECE = 1_000
"""Rows read and sent at a time."""

Table = Literal["runs", "results", "trials", "checks", "checkpoints", "steps", "spans", "samples"]

OF_REPEATS: dict[str, Any] = {
    "checkpoints": Checkpoint,
    "steps": Step,
    "spans": SpanRow,
    "samples": Sample,
}
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def lines(store: Store, table: Table, run_id: str | None) -> Iterator[str]:
    """The table, of one run or of all, with a header; each string is some whole lines."""
    columns: list[str] = []
    for piece in _pieces(_rows(store, table, run_id)):
        if not columns:
            columns = list(dict.fromkeys(name for row in piece for name in row))
            yield _text([map(_cell, columns)])
        yield _text([_cell(row.get(name)) for name in columns] for row in piece)
    if not columns:
        yield _text([_empty_columns(table)])


def _rows(store: Store, table: Table, run_id: str | None) -> Iterator[dict[str, Any]]:
    with store.reading() as session:
        for found in session.exec(_query(table, run_id).execution_options(yield_per=PIECE)):
            if table == "checks":
                for check in found.config["checks"]:
                    yield {
                        "gate": found.run_id,
                        "run_id": found.config["run_id"],
                        **_opened(check, ""),
                    }
            elif isinstance(found, SQLModel):
                yield _flat(found)
            else:
                row, result = found
                yield {"run_id": result.run_id, "strategy": result.strategy, **_flat(row)}


def _query(table: Table, run_id: str | None) -> Any:
    query: Any
    if table == "runs":
        query = select(Run).where(Run.kind != LIVE).order_by(col(Run.created).desc())
        return query if run_id is None else query.where(Run.run_id == run_id)
    if table == "checks":
        query = select(Run).where(Run.kind == GATE).order_by(col(Run.created).desc())
        return query if run_id is None else query.where(Run.run_id == run_id)
    if table in OF_REPEATS:
        model = OF_REPEATS[table]
        query = select(model, Result).join(Result, col(Result.id) == model.result_id)
        query = query.order_by(model.result_id, model.repeat, model.id)
    else:
        which: Any = Result if table == "results" else Trial
        query = select(which).order_by(which.run_id, which.position)
        return query if run_id is None else query.where(which.run_id == run_id)
    return query if run_id is None else query.where(Result.run_id == run_id)


def _flat(row: SQLModel) -> dict[str, Any]:
    """The columns of a row; documents in it as ``outer.inner`` columns of their own.

    Lists of records are left out: they are a table of their own.
    """
    found: dict[str, Any] = {}
    for name, value in row.model_dump(exclude={"id", "result_id"}).items():
        if isinstance(value, Mapping):
            found.update(_opened(value, "" if name == "row" else f"{name}."))
        else:
            found[name] = value
    return found


def _opened(document: Mapping[str, Any], head: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            found.update(_opened(value, f"{head}{name}."))
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            continue
        elif isinstance(value, list):
            found[f"{head}{name}"] = "; ".join(str(one) for one in value)
        else:
            found[f"{head}{name}"] = value
    return found


def _cell(value: Any) -> Any:
    """As it is, or with a mark in front that keeps a spreadsheet from computing it."""
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return value


def _empty_columns(table: Table) -> list[str]:
    if table == "checks":
        return ["gate", "run_id", *(one.name for one in fields(Finding))]
    model: Any = {"runs": Run, "results": Result, "trials": Trial, **OF_REPEATS}[table]
    of_run = ["run_id", "strategy"] if table in OF_REPEATS else []
    own = [name for name in model.model_fields if name not in ("id", "result_id", "row")]
    return [*of_run, *own]


def _text(rows: Iterable[Iterable[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue()


def _pieces(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    piece: list[dict[str, Any]] = []
    for row in rows:
        piece.append(row)
        if len(piece) == PIECE:
            yield piece
            piece = []
    if piece:
        yield piece
