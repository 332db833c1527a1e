"""The pages for people, one handler each: rows from the database, words from the templates.

Handlers run on the server's worker threads, each with the database opened for itself. Figures are
fetched by the page's script afterwards, so that a page is there at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse

from gockpt.dashboard import asking, commands, headlines, live, queries, recovery
from gockpt.dashboard.comparing import SAMPLED, compare
from gockpt.dashboard.metrics import METRICS
from gockpt.dashboard.opening import opened
from gockpt.dashboard.planning import Wishes, outlook
from gockpt.dashboard.templating import page
from gockpt.devices import profile_names
from gockpt.results import Result, Run, Store
from gockpt.results.models import GATE
from gockpt.results.noise import spread_of
from gockpt.results.verdicts import report_of
from gockpt.workloads import PRESETS

TRIALS = 500
"""Trials that are listed on one page."""


def router(database: Path) -> APIRouter:
    """The pages over this database."""
    html = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    @html.get("/")
    def overview() -> HTMLResponse:
        with opened(database) as store:
            return page("overview", here="/", **_overview(store))

    @html.get("/runs")
    def runs(
        kind: asking.OneOf = None, model: asking.OneOf = None, offset: asking.Offset = 0
    ) -> HTMLResponse:
        with opened(database) as store:
            found = queries.runs(
                store, kind=kind, model=model, limit=queries.PAGE + 1, offset=offset
            )
            more = len(found) > queries.PAGE
            listed = found[: queries.PAGE]
            return page(
                "runs", here="/runs", runs=listed, summaries=_summaries(store, listed),
                kinds=queries.kinds(store), models=queries.names(store, Run.model),
                kind=kind or "", model=model or "", offset=offset, size=queries.PAGE, more=more,
                profiles=_profiles(listed),
            )  # fmt: skip

    @html.get("/run")
    def run(run: asking.RunId = asking.LATEST) -> HTMLResponse:
        with opened(database) as store:
            found = store.run(run)
            if found.kind == "crash-test":
                return _recovery(store, found, None, None)
            if found.kind == GATE:
                return _gate(store, found)
            if found.kind != "bench":
                return page("other", here="/runs", run=found, profile=asking.profile_of(found),
                            document=store.document(found.run_id))  # fmt: skip
            return _bench(store, found)

    @html.get("/timeline")
    def timeline(
        run: asking.RunId = asking.LATEST,
        strategy: asking.Strategies = None,
        step: asking.CheckpointStep = None,
    ) -> HTMLResponse:
        with opened(database) as store:
            found = asking.find(store, run, "bench")
            return page("timeline", here="/timeline", **_chosen(store, found, strategy, step))

    @html.get("/steps")
    def steps(
        run: asking.RunId = asking.LATEST, strategy: asking.Strategies = None
    ) -> HTMLResponse:
        with opened(database) as store:
            found = asking.find(store, run, "bench")
            return page("steps", here="/steps", **_chosen(store, found, strategy, None))

    @html.get("/recovery")
    def crash_test(
        run: asking.RunId = asking.LATEST,
        scenario: asking.OneOf = None,
        strategy: asking.OneOf = None,
    ) -> HTMLResponse:
        with opened(database) as store:
            return _recovery(store, asking.find(store, run, "crash-test"), scenario, strategy)

    @html.get("/compare")
    def comparison(run: asking.RunIds = None) -> HTMLResponse:
        with opened(database) as store:
            sides = asking.sides(store, run)
            benches = queries.runs(store, kind="bench", limit=200)
        return page(
            "compare", here="/compare", sides=sides, table=compare(sides), benches=benches,
            profiles=_profiles([one.run for one in sides]), most=asking.MOST_COMPARED,
            alike=len({(one.run.model, one.run.device, one.run.environment.get("host"))
                       for one in sides}) <= 1,
        )  # fmt: skip

    @html.get("/trends")
    def trends(
        metric: Annotated[str, asking.Text] = "throughput",
        strategy: Annotated[str, asking.Text] = "gockpt",
        model: asking.OneOf = None,
        device: asking.OneOf = None,
    ) -> HTMLResponse:
        chosen = asking.metric_of(metric)
        with opened(database) as store:
            newest = next(iter(queries.runs(store, kind="bench", limit=1)), None)
            if model is None and device is None and newest is not None:
                model, device = newest.model, newest.device  # others are no trend together
            past = queries.past(store, strategy=strategy, model=model, device=device)
            return page(
                "trends", here="/trends", metric=chosen, strategy=strategy, model=model or "",
                device=device or "", past=past[::-1][: queries.PAGE], number=len(past),
                strategies=queries.names(store, Result.strategy),
                models=queries.names(store, Run.model), devices=queries.names(store, Run.device),
                bounds=asking.bounds(store, chosen, strategy, model, device),
                profiles=_profiles([one.run for one in past]),
            )  # fmt: skip

    @html.get("/live")
    def live_page() -> HTMLResponse:
        shown = [{"key": key, "title": METRICS[key].title} for key in live.SHOWN]
        return page("live", here="/live", now=live.snapshot(database), shown_metrics=shown)

    @html.get("/plan")
    def plan(wishes: Annotated[Wishes, Depends(asking.wishes)]) -> HTMLResponse:
        return page(
            "plan", here="/plan", wishes=wishes, outlook=outlook(wishes),
            models=[name for name, preset in PRESETS.items() if preset.shrink > 1],
            profiles=profile_names(),
        )  # fmt: skip

    return html


def _overview(store: Store) -> dict[str, Any]:
    recent = queries.runs(store, limit=12)
    latest = {kind: next(iter(queries.runs(store, kind=kind, limit=1)), None)
              for kind in ("bench", "crash-test", GATE)}  # fmt: skip
    bench, crash, gate = latest["bench"], latest["crash-test"], latest[GATE]
    results = [] if bench is None else store.results(bench.run_id)
    counts = {} if crash is None else queries.trial_counts(store, [crash.run_id])[crash.run_id]
    return {
        "bench": bench,
        "crash": crash,
        "gate": gate,
        "decided": None if gate is None else _verdict(store, gate),
        "told": headlines.of_bench(results),
        "recovered": headlines.of_crash_test(counts),
        "failed": counts.get(False, 0),
        "recent": recent,
        "summaries": _summaries(store, recent),
        "profiles": _profiles([*recent, *(one for one in latest.values() if one)]),
        "running": store.live(),
    }


def _profiles(runs: list[Run]) -> dict[str, str | None]:
    return {one.run_id: asking.profile_of(one) for one in runs}


def _summaries(store: Store, runs: list[Run]) -> dict[str, str]:
    """What came of each run, in a few words."""
    ids = [one.run_id for one in runs]
    results, trials = queries.results(store, ids), queries.trial_counts(store, ids)
    return {one.run_id: _summary(one, results[one.run_id], trials[one.run_id]) for one in runs}


def _summary(run: Run, results: list[Result], trials: dict[bool | None, int]) -> str:
    if run.kind == GATE:
        return f"{run.config.get('verdict')}: run {run.config.get('run_id')}"
    if run.kind == "crash-test":
        found = headlines.of_crash_test(trials)
        return f"{found.value} {found.words.partition('.')[0]}"
    ours = next((one for one in results if one.strategy == headlines.OURS), None)
    if ours is None:
        return ", ".join(dict.fromkeys(one.strategy for one in results))
    if not ours.valid:
        return "invalid"
    return f"gockpt keeps {METRICS['throughput'].show(ours.relative_throughput)} of the speed"


def _verdict(store: Store, gate: Run) -> dict[str, Any]:
    """What a gate decided, and which of its two runs are here to be looked at."""
    report = report_of(gate.config)
    return {
        "report": report,
        "told": headlines.of_gate(report),
        "known": queries.known(store, [report.run_id, report.baseline]),
    }


def _gate(store: Store, run: Run) -> HTMLResponse:
    return page("gate", here="/runs", run=run, profile=asking.profile_of(run),
                **_verdict(store, run))  # fmt: skip


def _bench(store: Store, run: Run) -> HTMLResponse:
    results = store.results(run.run_id)
    samples = queries.samples(store, [one.id for one in results if one.id is not None])
    return page(
        "run", here="/runs", run=run, results=results, profile=asking.profile_of(run),
        told=headlines.of_bench(results), noise=spread_of(results),
        ranges=_ranges(samples), again=commands.again(run, [one.strategy for one in results]),
    )  # fmt: skip


def _ranges(samples: list[Any]) -> dict[tuple[int, str], tuple[float, float]]:
    """The smallest and largest value of what was measured more than once."""
    values: dict[tuple[int, str], list[float]] = {}
    names = {sampled: key for key, sampled in SAMPLED.items()}
    for one in samples:
        key = (one.result_id, names.get(one.metric, one.metric))
        values.setdefault(key, []).append(one.value)
    return {key: (min(some), max(some)) for key, some in values.items() if len(some) > 1}


def _chosen(
    store: Store, run: Run, strategies: list[str] | None, step: int | None
) -> dict[str, Any]:
    """What the pages of one bench's inside show: its strategies and checkpoints."""
    results = store.results(run.run_id)
    rows = asking.chosen(results, strategies)
    ids = [row.id for row in rows.values() if row.id is not None]
    saved = queries.checkpoints(store, ids)
    steps = sorted({one.step for one in saved})
    if step is None and steps:
        step = steps[len(steps) // 2]
    return {
        "run": run,
        "profile": asking.profile_of(run),
        "benches": queries.runs(store, kind="bench", limit=200),
        "strategies": list(dict.fromkeys(one.strategy for one in results)),
        "chosen": list(rows),
        "checkpoints": saved,
        "steps": steps,
        "step": step,
    }


def _recovery(store: Store, run: Run, scenario: str | None, strategy: str | None) -> HTMLResponse:
    trials = store.trials(run.run_id)
    listed = [
        one
        for one in trials
        if (scenario is None or one.scenario == scenario)
        and (strategy is None or (one.strategy or "–") == strategy)
    ]
    narrowed = scenario is not None or strategy is not None
    if not narrowed:
        listed = [one for one in trials if one.passed is False]
    return page(
        "recovery", here="/recovery", run=run, profile=asking.profile_of(run),
        matrix=recovery.matrix(trials), costs=recovery.costs(trials), trials=listed[:TRIALS],
        cut=max(0, len(listed) - TRIALS), scenario=scenario, strategy=strategy, narrowed=narrowed,
        recovered=headlines.of_crash_test(
            queries.trial_counts(store, [run.run_id])[run.run_id]
        ),
        runs=queries.runs(store, kind="crash-test", limit=200),
        again=commands.again(run, [one.strategy or "" for one in trials], trials),
    )  # fmt: skip
