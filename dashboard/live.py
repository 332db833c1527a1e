"""Runs that are being made, as they come: what the Live page follows.

The stream runs on the server's event loop and reads on worker threads. What always holds: an event
is sent only when something has changed, a sign of life at least every :data:`ALIVE` seconds, and a
stream ends by itself after :data:`LONGEST` (browsers open another).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
from pydantic import BaseModel

from gockpt.dashboard import queries
from gockpt.dashboard.asking import profile_of
from gockpt.dashboard.metrics import METRICS
from gockpt.dashboard.opening import Problem, opened
from gockpt.results import Run

EVERY = 1.0
ALIVE = 15.0
LONGEST = 3600.0
SILENT = 60.0
"""Seconds without news after which a run was probably killed."""

SHOWN = ("throughput", "blocked", "durable", "drain", "windows")
"""Figures in the live table."""


class LiveRow(BaseModel):
    """A strategy, or a trial, that is done or waits."""

    name: str
    state: str
    """``done``, ``invalid``, ``running``, ``waiting``, ``passed``, ``failed``, ``skipped``."""
    figures: dict[str, str] = {}
    detail: str = ""


class LiveRun(BaseModel):
    """A run that is being made."""

    run_id: str
    of: str
    title: str
    profile: str | None
    created: str
    silent_s: float
    """Seconds since it was last heard of."""
    stage: str
    step: int = 0
    steps: int = 0
    done: int
    total: int
    rows: list[LiveRow]


class Live(BaseModel):
    """All that is being made, and the newest run that is finished."""

    runs: list[LiveRun]
    newest: str | None = None
    newest_kind: str | None = None
    problem: str | None = None


def snapshot(database: Path) -> Live:
    """What there is now; a database that is not there yet is nothing to follow."""
    try:
        with opened(database) as store:
            newest = queries.runs(store, limit=1)
            runs = [_run(one) for one in store.live()]
    except Problem as problem:
        return Live(runs=[], problem=problem.message)
    first = newest[0] if newest else None
    return Live(
        runs=runs,
        newest=None if first is None else first.run_id,
        newest_kind=None if first is None else first.kind,
    )


async def stream(database: Path) -> AsyncIterator[str]:
    """Server-sent events: a snapshot whenever it differs from the one before."""
    began = said = time.monotonic()
    before: Live | None = None
    yield "retry: 2000\n\n"
    while (now := time.monotonic()) - began < LONGEST:
        found = await anyio.to_thread.run_sync(snapshot, database)
        if found != before:
            before, said = found, now
            yield f"event: live\ndata: {json.dumps(found.model_dump())}\n\n"
        elif now - said > ALIVE:
            said = now
            yield ": nothing new\n\n"
        await anyio.sleep(EVERY)


def _run(run: Run) -> LiveRun:
    config = run.config
    progress = config.get("progress") or {}
    bench = config.get("of") == "bench"
    rows = _strategies(config, progress) if bench else _trials(config)
    stage = " ".join(str(progress[key]) for key in ("strategy", "stage") if progress.get(key))
    job = config.get("workload") or {}
    silent = _since(str(config.get("updated", "")))
    return LiveRun(
        run_id=run.run_id,
        of=str(config.get("of", "run")),
        title=f"{run.model or job.get('command', '')} on {run.device or 'this machine'}",
        profile=profile_of(run),
        created=run.created,
        # In whole stretches, so that silence alone is news only now and then.
        silent_s=silent // SILENT * SILENT,
        stage=stage or "starting",
        step=int(progress.get("step") or 0),
        steps=int(progress.get("of") or 0),
        done=sum(row.state not in ("waiting", "running") for row in rows),
        total=len(rows) if bench else int(config.get("cases") or len(rows)),
        rows=rows,
    )


def _strategies(config: dict[str, Any], progress: dict[str, Any]) -> list[LiveRow]:
    names = [str(name) for name in config.get("strategies") or ()]
    results = list(config.get("results") or ())
    golden = progress.get("strategy") == "golden run"
    rows = []
    for position, name in enumerate(names):
        if position < len(results):
            rows.append(_result(name, results[position]))
        else:
            running = position == len(results) and not golden
            rows.append(LiveRow(name=name, state="running" if running else "waiting"))
    return rows


def _result(name: str, row: dict[str, Any]) -> LiveRow:
    figures = {key: METRICS[key].show(METRICS[key].read(row)) for key in SHOWN}
    problems = "; ".join(str(one) for one in row.get("problems") or ())
    state = "done" if row.get("valid") else "invalid"
    return LiveRow(name=name, state=state, figures=figures, detail=problems)


def _trials(config: dict[str, Any]) -> list[LiveRow]:
    words = {True: "passed", False: "failed", None: "skipped"}
    return [
        LiveRow(
            name=f"{one.get('scenario')} at {one.get('point')}, {one.get('strategy')}",
            state=words.get(one.get("passed"), "skipped"),
            detail=str(one.get("detail") or ""),
        )
        for one in config.get("trials") or ()
    ]


def _since(when: str) -> float:
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
