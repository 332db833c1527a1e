"""The JSON API: the same rows as the pages, typed, and every table as CSV.

Handlers run on the server's worker threads, each with the database opened for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from gockpt.dashboard import asking, csv_export, live, queries
from gockpt.dashboard.comparing import compare
from gockpt.dashboard.opening import opened
from gockpt.dashboard.planning import Outlook, Wishes, outlook
from gockpt.results import Run


class RunOut(BaseModel):
    """A run, without its rows."""

    run_id: str
    kind: str
    created: str
    model: str | None
    device: str | None
    emulated: bool | None
    profile: str | None
    """What emulated the device."""

    @classmethod
    def of(cls, run: Run) -> RunOut:
        return cls(**run.model_dump(include=set(cls.model_fields)), profile=asking.profile_of(run))


class CheckpointOut(BaseModel):
    """What became of one checkpoint. Seconds and bytes."""

    strategy: str
    repeat: int
    step: int
    windows: int
    fallback: str | None
    proof: str | None
    identical: bool | None
    blocked_s: float
    consistent_s: float | None
    durable_s: float | None
    state_bytes: int
    gradient_bytes: int
    persisted_bytes: int


class StepOut(BaseModel):
    """One training step. Of a very long run the slowest and fastest of each stretch."""

    strategy: str
    step: int
    seconds: float


class SpanOut(BaseModel):
    """One stretch of work; seconds from the first span that is shown."""

    strategy: str
    lane: str
    name: str
    start: float
    end: float
    step: int


class CellOut(BaseModel):
    """One figure of one run."""

    run_id: str
    value: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: str


class DifferenceOut(BaseModel):
    """One figure of one strategy in several runs, beside the first of them."""

    strategy: str
    metric: str
    unit: str
    runs: list[CellOut]


class PointOut(BaseModel):
    """A figure of one run of the past."""

    run_id: str
    created: str
    git_sha: str | None
    valid: bool
    emulated: bool | None
    value: float | None


class BaselineOut(BaseModel):
    """A run that later ones are compared with."""

    name: str
    created: str
    run_id: str


def router(database: Path) -> APIRouter:
    """The API over this database."""
    api = APIRouter(prefix="/api", tags=["results"])

    @api.get("/runs")
    def list_runs(
        kind: asking.OneOf = None,
        model: asking.OneOf = None,
        limit: asking.Number = queries.PAGE,
        offset: asking.Offset = 0,
    ) -> list[RunOut]:
        """Runs, newest first."""
        with opened(database) as store:
            found = queries.runs(store, kind=kind, model=model, limit=limit, offset=offset)
            return [RunOut.of(one) for one in found]

    @api.get("/run")
    def one_run(run: asking.RunId = asking.LATEST) -> dict[str, Any]:
        """The document of a run, as `--json` wrote it."""
        with opened(database) as store:
            return store.document(run)

    @api.get("/checkpoints")
    def list_checkpoints(
        run: asking.RunId = asking.LATEST, strategy: asking.Strategies = None
    ) -> list[CheckpointOut]:
        """The checkpoints of a bench."""
        with opened(database) as store:
            rows = store.results(asking.find(store, run, "bench").run_id)
            ids = [one.id for one in asking.chosen(rows, strategy).values() if one.id is not None]
            found = queries.checkpoints(store, ids)
            return [CheckpointOut(**one.model_dump(exclude={"id", "result_id"})) for one in found]

    @api.get("/steps")
    def list_steps(
        run: asking.RunId = asking.LATEST, strategy: asking.Strategies = None
    ) -> list[StepOut]:
        """The step times of a bench's first repeat."""
        with opened(database) as store:
            rows = store.results(asking.find(store, run, "bench").run_id)
            return [
                StepOut(strategy=name, step=one.step, seconds=one.seconds)
                for name, row in asking.chosen(rows, strategy).items()
                for one in queries.steps(store, row.id or 0)
            ]

    @api.get("/spans")
    def list_spans(
        run: asking.RunId = asking.LATEST,
        strategy: asking.Strategies = None,
        step: asking.CheckpointStep = None,
    ) -> list[SpanOut]:
        """What happened during one checkpoint, by strategy."""
        with opened(database) as store:
            rows = store.results(asking.find(store, run, "bench").run_id)
            found = []
            for name, row in asking.chosen(rows, strategy).items():
                saved = asking.checkpoint_of(queries.checkpoints(store, [row.id or 0]), step)
                spans = queries.checkpoint_spans(store, saved).spans if saved else []
                zero = min((one.start for one in spans), default=0.0)
                found += [
                    SpanOut(strategy=name, lane=one.lane, name=one.name, start=one.start - zero,
                            end=one.end - zero, step=one.step)
                    for one in spans
                ]  # fmt: skip
            return found

    @api.get("/compare")
    def compare_runs(run: asking.RunIds = None) -> list[DifferenceOut]:
        """Every figure of two or more benches, with the difference to the first."""
        with opened(database) as store:
            sides = asking.sides(store, run)
        return [
            DifferenceOut(
                strategy=name,
                metric=line.metric.key,
                unit=line.metric.unit,
                runs=[
                    CellOut(run_id=side.run.run_id, **asdict(cell))
                    for side, cell in zip(sides, line.cells, strict=True)
                ],
            )
            for name, lines in compare(sides).items()
            for line in lines
        ]

    @api.get("/trend")
    def trend(
        metric: Annotated[str, asking.Text] = "throughput",
        strategy: Annotated[str, asking.Text] = "gockpt",
        model: asking.OneOf = None,
        device: asking.OneOf = None,
    ) -> list[PointOut]:
        """A figure over the runs of the past, oldest first."""
        read = asking.metric_of(metric).read
        with opened(database) as store:
            past = queries.past(store, strategy=strategy, model=model, device=device)
        return [
            PointOut(
                run_id=one.run.run_id,
                created=one.run.created,
                git_sha=one.run.environment.get("git_sha"),
                valid=one.result.valid,
                emulated=one.run.emulated,
                value=read(one.result.row),
            )
            for one in past
        ]

    @api.get("/baselines")
    def list_baselines() -> list[BaselineOut]:
        """The runs that are kept to compare with."""
        with opened(database) as store:
            return [
                BaselineOut(name=one.name, created=one.created, run_id=one.run_id)
                for one in store.baselines()
            ]

    @api.get("/live")
    def live_now() -> live.Live:
        """What is being made now."""
        return live.snapshot(database)

    @api.get("/live/stream", include_in_schema=False)
    def live_stream() -> StreamingResponse:
        return StreamingResponse(live.stream(database), media_type="text/event-stream")

    @api.get("/plan", tags=["predictions"])
    def predict(wishes: Annotated[Wishes, Depends(asking.wishes)]) -> Outlook:
        """What each strategy would cost on a machine that is described by its figures."""
        return outlook(wishes)

    @api.get("/tables/{table}.csv", response_class=Response, responses={
        200: {"content": {"text/csv": {}}, "description": "The table."}})  # fmt: skip
    def table(table: csv_export.Table, run: asking.OneOf = None) -> StreamingResponse:
        """A whole table as CSV, of one run or of all."""
        with ExitStack() as opening:
            store = opening.enter_context(opened(database))
            run_id = None if run is None else store.run(run).run_id
            found = csv_export.lines(store, table, run_id)
            first = next(found)  # what is wrong with the database is found before the answer begins
            staying = opening.pop_all()
        name = f"gockpt-{table}.csv"
        return StreamingResponse(
            _closing(staying, chain([first], found)),
            media_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    return api


def _closing(opening: ExitStack, pieces: Iterator[str]) -> Iterator[str]:
    with opening:
        yield from pieces
