"""The figures as JSON: rows from the database, drawn by :mod:`gockpt.dashboard.figures`.

Handlers run on the server's worker threads. The page's script fetches these and gives them to
Plotly; the answer depends on the address alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import plotly.graph_objects as go
from fastapi import APIRouter, Depends, Response

from gockpt.dashboard import asking, figures, queries
from gockpt.dashboard.comparing import Side
from gockpt.dashboard.figures import Compared, Limit, Point, Theme
from gockpt.dashboard.limits import Bound
from gockpt.dashboard.metrics import Metric
from gockpt.dashboard.opening import opened
from gockpt.dashboard.planning import Wishes, outlook
from gockpt.dashboard.queries import Past
from gockpt.dashboard.recovery import curves
from gockpt.results import Run, SpanRow, Store, Trial

_ROWS: dict[str, Callable[[Store, str], Sequence[Any]]] = {
    "bench": Store.results,
    "crash-test": Store.trials,
}
"""Kind of run → the rows that its figures are drawn from."""

UNITS = {"seconds": "s", "bytes": "B", "rate": "a second", "factor": "×", "count": ""}


def router(database: Path) -> APIRouter:
    """The figures over this database."""
    api = APIRouter(prefix="/api/figures", tags=["figures"])

    def of_run(kind: str, path: str, draw: Any, summary: str) -> None:
        def handler(run: asking.RunId = asking.LATEST, theme: asking.Theme = "light") -> Response:
            with opened(database) as store:
                found = asking.find(store, run, kind)
                rows = _ROWS[kind](store, found.run_id)
            return _json(draw(rows, theme=theme, emulated=asking.profile_of(found)))

        api.get(path, summary=summary, name=path[1:])(handler)

    of_run("bench", "/stall", figures.stall, "For how long each strategy holds up training.")
    of_run(
        "bench",
        "/throughput",
        figures.throughput,
        "Training speed beside that without checkpoints.",
    )
    of_run("bench", "/costs", figures.costs, "Traffic, memory and latency of each strategy.")

    @api.get("/timeline")
    def timeline(
        run: asking.RunId = asking.LATEST,
        strategy: asking.Strategies = None,
        step: asking.CheckpointStep = None,
        theme: asking.Theme = "light",
    ) -> Response:
        """One checkpoint of each strategy, as lanes on one time axis."""
        with opened(database) as store:
            found = asking.find(store, run, "bench")
            lanes = _lanes(store, found, strategy, step)
        return _json(figures.timeline(lanes, theme=theme, emulated=asking.profile_of(found)))

    @api.get("/steps")
    def steps(
        run: asking.RunId = asking.LATEST,
        strategy: asking.Strategies = None,
        theme: asking.Theme = "light",
    ) -> Response:
        """Step times over the run, with its checkpoints."""
        with opened(database) as store:
            found = asking.find(store, run, "bench")
            rows = asking.chosen(store.results(found.run_id), strategy)
            times = {name: queries.steps(store, row.id or 0) for name, row in rows.items()}
            ids = [row.id for row in rows.values() if row.id is not None]
            saved = queries.checkpoints(store, ids)
        drawn = figures.steps(times, saved, theme=theme, emulated=asking.profile_of(found))
        return _json(drawn)

    of_run("crash-test", "/matrix", figures.recovery_matrix, "Scenario by strategy.")
    of_run("crash-test", "/recovery", figures.recovery_split, "What a recovery's time went into.")
    of_run(
        "crash-test", "/goodput", _goodput, "Useful share of the time, over the rate of failures."
    )

    @api.get("/compare")
    def compare(run: asking.RunIds = None, theme: asking.Theme = "light") -> Response:
        """Two or more benches beside each other."""
        with opened(database) as store:
            sides = asking.sides(store, run)
        return _json(_compare(sides, theme))

    @api.get("/trend")
    def trend(
        metric: Annotated[str, asking.Text] = "throughput",
        strategy: Annotated[str, asking.Text] = "gockpt",
        model: asking.OneOf = None,
        device: asking.OneOf = None,
        theme: asking.Theme = "light",
    ) -> Response:
        """A figure over the runs of the past, with the limits it should keep."""
        chosen = asking.metric_of(metric)
        with opened(database) as store:
            past = queries.past(store, strategy=strategy, model=model, device=device)
            bounds = asking.bounds(store, chosen, strategy, model, device)
        return _json(_trend(chosen, past, bounds, theme))

    @api.get("/plan")
    def plan(
        wishes: Annotated[Wishes, Depends(asking.wishes)], theme: asking.Theme = "light"
    ) -> Response:
        """Stall and traffic of each strategy over links of different speed."""
        return _json(_plan(wishes, theme))

    return api


def _json(figure: go.Figure) -> Response:
    return Response(figure.to_json(), media_type="application/json")


def _lanes(
    store: Store, run: Run, strategies: list[str] | None, step: int | None
) -> dict[str, list[SpanRow]]:
    """The spans of one checkpoint of each strategy that has one."""
    lanes = {}
    for name, row in asking.chosen(store.results(run.run_id), strategies).items():
        saved = asking.checkpoint_of(queries.checkpoints(store, [row.id or 0]), step)
        if saved is not None:
            spans = queries.checkpoint_spans(store, saved).spans
            lanes[name] = figures.of_checkpoint(spans, saved)
    return lanes


def _goodput(trials: Sequence[Trial], *, theme: Theme, emulated: str | None) -> go.Figure:
    """By what crashes of a crash test really cost: what was lost stands for interval and lag."""
    return figures.goodput(curves(trials), theme=theme, emulated=emulated)


def _compare(sides: Sequence[Side], theme: Theme) -> go.Figure:
    runs = [Compared(label=one.run.run_id, results=one.results) for one in sides]
    profiles = [name for one in sides if (name := asking.profile_of(one.run)) is not None]
    return figures.compare(runs, theme=theme, emulated=", ".join(dict.fromkeys(profiles)) or None)


def _trend(
    metric: Metric, past: Sequence[Past], bounds: Sequence[Bound], theme: Theme
) -> go.Figure:
    factor, unit = (100, "%") if metric.unit == "share" else (1, UNITS[metric.unit])
    points = [
        Point(
            created=one.run.created,
            run_id=one.run.run_id,
            commit=one.run.environment.get("git_sha"),
            strategy=one.result.strategy,
            value=factor * value,
            valid=one.result.valid,
        )
        for one in past
        if (value := metric.read(one.result.row)) is not None
    ]
    limits = [
        Limit(name=f"baseline {one.baseline}", value=factor * one.value, fails=False)
        for one in bounds
    ] + [
        Limit(name=f"gate's limit by {one.baseline}", value=factor * one.limit)
        for one in bounds
        if one.limit is not None
    ]
    profiles = [name for one in past if (name := asking.profile_of(one.run)) is not None]
    return figures.trend(
        points, limits, metric=metric.title, unit=unit, theme=theme,
        emulated=", ".join(dict.fromkeys(profiles)) or None,
    )  # fmt: skip


def _plan(wishes: Wishes, theme: Theme) -> go.Figure:
    predictions = [
        figures.Prediction(
            strategy=one.strategy,
            windows=one.windows,
            traffic_factor=one.traffic_factor,
            memory_bytes=one.memory_bytes,
            stall_s=one.stall_s,
            goodput=one.goodput,
        )
        for one in outlook(wishes).predictions
    ]
    return figures.plan(predictions, theme=theme, emulated=wishes.profile)
