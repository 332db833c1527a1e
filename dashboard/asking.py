"""What addresses may ask for, and the runs that they mean.

Parameters shared by pages, figures and the API, so that one name means one thing and has one limit
everywhere; and the ways from a parameter to rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from gockpt.dashboard import limits, queries
from gockpt.dashboard.comparing import Side
from gockpt.dashboard.limits import Bound
from gockpt.dashboard.metrics import METRICS, Metric
from gockpt.dashboard.opening import Problem
from gockpt.dashboard.planning import Wishes
from gockpt.results import Checkpoint, Result, Run, Store
from gockpt.results.models import GATE
from gockpt.results.verdicts import report_of

LATEST = "latest"
BIG = 2**53
"""Beyond this a number is not exact in JavaScript, nor far beyond in SQLite."""

MOST_COMPARED = 8

Text = Query(max_length=200)
RunId = Annotated[str, Query(max_length=200, description="A run's id, or `latest`.")]
RunIds = Annotated[list[str] | None, Query(max_length=MOST_COMPARED, description="Ids of runs.")]
Strategies = Annotated[list[str] | None, Query(max_length=16, description="All if left out.")]
OneOf = Annotated[str | None, Text]
CheckpointStep = Annotated[int | None, Query(ge=0, le=BIG, description="Step of a checkpoint.")]
Theme = Annotated[Literal["light", "dark"], Query(description="What it is drawn for.")]
Number = Annotated[int, Query(ge=1, le=1000, description="At most so many.")]
Offset = Annotated[int, Query(ge=0, le=BIG, description="Leave out so many first.")]


def find(store: Store, run: str, kind: str) -> Run:
    """The run of this kind that an address means.

    Raises:
        Problem: there is none.
        ConfigError: the id is not known, or of several runs.
    """
    if run in ("", LATEST):
        newest = queries.runs(store, kind=kind, limit=1)
        if not newest:
            command = {"bench": "gockpt bench --model gpt-tiny",
                       "crash-test": "gockpt crash-test --quick"}.get(kind)  # fmt: skip
            raise Problem(404, f"No {kind} yet", f"There is no run of {kind} yet.", command)
        return newest[0]
    found = store.run(run)
    if found.kind != kind:
        message = f"Run {found.run_id} is a {found.kind}, and this is about a {kind}."
        raise Problem(404, f"Not a {kind}", message)
    return found


def chosen(results: Sequence[Result], strategies: Sequence[str] | None) -> dict[str, Result]:
    """The first row of each strategy that was asked for; of all but ``none`` if none was."""
    rows: dict[str, Result] = {}
    for one in results:
        if one.strategy in strategies if strategies else one.strategy != "none":
            rows.setdefault(one.strategy, one)
    return rows


def checkpoint_of(saved: Sequence[Checkpoint], step: int | None) -> Checkpoint | None:
    """The checkpoint of this step; without one, the middle one: neither warm-up nor end."""
    if step is None:
        return saved[len(saved) // 2] if saved else None
    return next((one for one in saved if one.step == step), None)


def sides(store: Store, runs: Sequence[str] | None) -> list[Side]:
    """The benches to compare: those named; of one alone (else the newest) also the one before."""
    named = [one for one in dict.fromkeys(runs or ()) if one]
    found = [find(store, one, "bench") for one in named] or queries.runs(
        store, kind="bench", limit=1
    )
    if len(found) == 1:
        before = queries.before(store, found[0])
        found = [before, *found] if before is not None else found
    unique = list({one.run_id: one for one in found}.values())
    rows = queries.results(store, [one.run_id for one in unique])
    return [Side(run=one, results=rows[one.run_id]) for one in unique]


def bounds(
    store: Store, metric: Metric, strategy: str, model: str | None, device: str | None
) -> list[Bound]:
    """What the baselines of this model and device have, and what the gate allows beside them."""
    baselines = [one for one in store.baselines() if _is_of(one.document, model, device)]
    gates = queries.runs(store, kind=GATE, model=model, limit=queries.PAGE)
    reports = (report_of(one.config) for one in gates if not device or one.device == device)
    return limits.bounds(metric, strategy, baselines, limits.rules(reports))


def _is_of(document: Mapping[str, Any], model: str | None, device: str | None) -> bool:
    job, environment = document.get("workload") or {}, document.get("environment") or {}
    return (not model or job.get("model") == model) and (
        not device or environment.get("device") == device
    )


def metric_of(key: str) -> Metric:
    """
    Raises:
        Problem: no such figure.
    """
    if key not in METRICS:
        raise Problem(404, "No such figure", f"There is no figure {key!r}; choose one of "
                      f"{', '.join(METRICS)}.")  # fmt: skip
    return METRICS[key]


def wishes(
    model: Annotated[str, Text] = "gpt-1.3b",
    profile: Annotated[str, Text] = "a100-pcie4",
    interval: Annotated[int, Query(ge=1, le=100_000, description="Steps.")] = 12,
    tokens: Annotated[int | None, Query(ge=1, le=10**9, description="Of a step.")] = None,
    link_gb_s: Annotated[float | None, Query(gt=0.01, le=10_000)] = None,
    mtbf_h: Annotated[float, Query(gt=0.001, le=1e6, description="Hours between crashes.")] = 6.0,
    recovery_s: Annotated[float, Query(ge=0, le=1e6, description="Seconds to come back.")] = 60.0,
) -> Wishes:
    """The sliders of the Plan page."""
    return Wishes(
        model=model,
        profile=profile,
        interval=interval,
        tokens=tokens,
        link_gb_s=link_gb_s,
        mtbf_s=mtbf_h * 3600,
        recovery_s=recovery_s,
    )


def profile_of(run: Run) -> str | None:
    """What emulated the device of a run; None where it was really measured."""
    if not run.emulated:
        return None
    device = (run.device or "").removeprefix("emulated:")
    return str(run.environment.get("profile") or device or "a profile")
