"""From the documents of ``bench --json`` and ``crash-test --json`` to rows of the tables.

Pure functions; the documents are described in docs/metrics.md. What is not searched for is taken
over as it is, so that a document of a later minor version survives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gockpt.errors import ConfigError
from gockpt.results.models import GATE, LIVE, Result, Run, Trial
from gockpt.results.verdicts import report_of

DOCUMENT_SCHEMA = 1
"""The ``schema`` of the documents that this version writes and reads."""

PARTS = {"bench": "results", "crash-test": "trials"}
"""Kind of document → the list in it that is kept row by row."""


def run_row(document: Mapping[str, Any], kind: str) -> Run:
    """
    Raises:
        ConfigError: not a document of this kind, or of a schema that is not known.
    """
    part = PARTS[kind]
    if document.get("kind") != kind or not isinstance(document.get(part), list):
        raise ConfigError(f'not a {kind} document: it needs "kind": "{kind}" and "{part}"')
    if document.get("schema") != DOCUMENT_SCHEMA or not isinstance(document.get("run_id"), str):
        raise ConfigError(
            f"a {kind} document of schema {document.get('schema')!r}, run "
            f"{document.get('run_id')!r}: this gockpt takes schema {DOCUMENT_SCHEMA} with a run_id"
        )
    environment = document.get("environment") or {}
    return Run(
        run_id=document["run_id"],
        kind=kind,
        created=document.get("created") or datetime.now(UTC).isoformat(timespec="seconds"),
        model=(document.get("workload") or {}).get("model"),
        device=environment.get("device"),
        emulated=environment.get("emulated"),
        environment=environment,
        config={k: v for k, v in document.items() if k not in ("environment", part)},
    )


def live_row(document: Mapping[str, Any]) -> Run:
    """A document that is not finished, whole in one row."""
    environment = document.get("environment") or {}
    return Run(
        run_id=document["run_id"],
        kind=LIVE,
        created=document["created"],
        model=(document.get("workload") or {}).get("model"),
        device=environment.get("device"),
        emulated=environment.get("emulated"),
        environment=environment,
        config={k: v for k, v in document.items() if k != "environment"},
    )


def gate_row(document: Mapping[str, Any], judged: Mapping[str, Any], run_id: str) -> Run:
    """A gate's document, whole in one row; of the run that it judged what runs are searched by.

    Raises:
        ConfigError: not a document of a gate.
    """
    report_of(document)
    environment = judged.get("environment") or {}
    return Run(
        run_id=run_id,
        kind=GATE,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),  # of two in a second, too
        model=(judged.get("workload") or {}).get("model"),
        device=environment.get("device"),
        emulated=environment.get("emulated"),
        environment=environment,
        config=dict(document),
    )


def result_row(run_id: str, position: int, row: Mapping[str, Any]) -> Result:
    """One of the document's ``results``."""
    stall = row.get("stall") or {}
    return Result(
        run_id=run_id,
        position=position,
        strategy=row["strategy"],
        valid=row["valid"],
        relative_throughput=row.get("relative_throughput"),
        blocked_s_per_checkpoint=stall.get("blocked_s_per_checkpoint"),
        excess_s_per_checkpoint=stall.get("excess_s_per_checkpoint"),
        loop_s=row.get("loop_s"),
        drain_s=row.get("drain_s"),
        windows=row.get("windows"),
        row=dict(row),
    )


def trial_row(run_id: str, position: int, row: Mapping[str, Any]) -> Trial:
    """One of the document's ``trials``."""
    return Trial(
        run_id=run_id,
        position=position,
        scenario=row["scenario"],
        point=row.get("point"),
        strategy=row.get("strategy"),
        passed=row.get("passed"),
        row=dict(row),
    )


def samples(ids: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What lies under ``samples``, one value at a time."""
    for result_id, row in zip(ids, rows, strict=True):
        for metric, values in (row.get("samples") or {}).items():
            for repeat, value in enumerate(values):
                if value is not None:
                    yield {"result_id": result_id, "repeat": repeat,
                           "metric": metric, "value": value}  # fmt: skip
