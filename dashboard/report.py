"""One run as one HTML file to send to a colleague: configuration, tables and figures.

Runs in the process of ``gockpt report``. What always holds: the file asks nothing of any network,
and its content policy forbids it to; no script in it runs but the two whose hashes the policy
names; whatever comes from the database is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup

from gockpt import units
from gockpt.dashboard import asking, commands, figures, headlines, metrics, recovery, templating
from gockpt.dashboard.assets import PLOTLY, assets
from gockpt.dashboard.figures import Curve
from gockpt.errors import ConfigError
from gockpt.results import Checkpoint, Result, Run, SpanRow, Store, Trial
from gockpt.results.models import GATE
from gockpt.results.noise import spread_of

RECOVERY_S = 60.0
"""From a crash to the next step, where a bench has to assume it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure and what it says in plain words."""

    figure: go.Figure
    caption: str


def render(store: Store, reference: str) -> tuple[Run, str]:
    """The report of a run, and which run it is.

    Args:
        reference: a run's id, a unique beginning of it, or ``latest``.

    Raises:
        ConfigError: no such run, or it is a gate.
    """
    run = store.run(reference)
    if run.kind == GATE:
        raise ConfigError(
            f"{run.run_id} is a gate, and a report is about a run: name {run.config['run_id']}, or "
            "see the gate in `gockpt dashboard`"
        )
    return run, _of_bench(store, run) if run.kind == "bench" else _of_crash_test(store, run)


def _page(run: Run, drawings: Sequence[Drawing], strategies: Sequence[str], **more: Any) -> str:
    scripts = [assets()[name].body.decode() for name in (PLOTLY, "report.js")]
    return templating.text(
        "report",
        run=run,
        profile=asking.profile_of(run),
        again=commands.again(run, strategies),
        drawings=drawings,
        style=Markup(assets()["style.css"].body.decode()),
        scripts=[Markup(script) for script in scripts],
        hashes=[_hash(script) for script in scripts],
        content=Markup(_content(drawings)),
        **more,
    )


def _hash(script: str) -> str:
    """As a content policy names a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _content(drawings: Sequence[Drawing]) -> str:
    """All figures as JSON, without their template, and the templates once; safe within HTML."""
    parts = [json.loads(one.figure.to_json()) for one in drawings]
    for part in parts:
        part["layout"].pop("template", None)
    document = {
        "figures": parts,
        "templates": {name: one.to_plotly_json() for name, one in figures.TEMPLATES.items()},
        "config": figures.CONFIG,
    }
    return json.dumps(document).replace("<", "\\u003c")


# -- a bench ---------------------------------------------------------------------------------------


def _of_bench(store: Store, run: Run) -> str:
    results = store.results(run.run_id)
    return _page(
        run,
        _bench_drawings(store, run, results),
        [one.strategy for one in results],
        told=headlines.of_bench(results),
        results=results,
        noise=spread_of(results),
        trials=[],
    )


def _bench_drawings(store: Store, run: Run, results: Sequence[Result]) -> list[Drawing]:
    profile = asking.profile_of(run)
    saved = {one.strategy: store.checkpoints(_id(one), repeat=0) for one in results}
    steps = {one.strategy: store.steps(_id(one), repeat=0) for one in reversed(results)}
    steps = {name: steps[name] for name in saved}  # of none its first row, as in the table
    lanes = {one.strategy: _middle(store, one, saved[one.strategy]) for one in _pair(results)}
    every = [checkpoint for rows in saved.values() for checkpoint in rows]
    return [
        Drawing(
            figure=figures.stall(results, emulated=profile),
            caption="For how long one checkpoint holds training up: shorter is better.",
        ),
        Drawing(
            figure=figures.throughput(results, emulated=profile),
            caption="The training speed that is left, beside training without checkpoints. What "
            "lies in the band of noise cannot be told from it.",
        ),
        Drawing(
            figure=figures.timeline(lanes, emulated=profile),
            caption="A checkpoint from the middle of the run. Where training shows a gap, it "
            "waited: the stall says for how long. The shaded windows are the time in which the "
            "state stands still and is copied.",
        ),
        Drawing(
            figure=figures.costs(results, emulated=profile),
            caption="What a strategy takes besides time of training.",
        ),
        Drawing(
            figure=figures.steps(steps, every, emulated=profile),
            caption="Every step; diamonds and dotted lines are checkpoints. A spike is a step that "
            "somebody waited for.",
        ),
        Drawing(
            figure=figures.goodput(_expected(run, results), emulated=profile),
            caption="Calculated from the stall, the interval and the time until a checkpoint is "
            f"durable, with {units.seconds(RECOVERY_S)} from a crash to the next step.",
        ),
    ]


def _id(result: Result) -> int:
    return result.id or 0


def _pair(results: Sequence[Result]) -> list[Result]:
    """The engine and the best of the others, which are worth a look beside each other."""
    ran = [one for one in results if one.strategy != "none" and one.loop_s is not None]
    ours = [one for one in ran if one.strategy == headlines.OURS]
    others = [one for one in ran if not one.strategy.startswith(headlines.OURS)]
    best = sorted(others, key=lambda one: one.blocked_s_per_checkpoint or 0.0)
    return [*best[:1], *ours] if ours else best[:2]


def _middle(store: Store, result: Result, saved: Sequence[Checkpoint]) -> list[SpanRow]:
    """The spans of a checkpoint that others came before and after, if there are so many."""
    done = [one for one in saved if one.durable_s is not None]
    if not done:
        return []
    return figures.of_checkpoint(store.spans(_id(result), repeat=0), done[len(done) // 2])


def _expected(run: Run, results: Sequence[Result]) -> list[Curve]:
    """What is needed to say how much useful work is left; of the rows that tell it all."""
    step = next((_number(o, "step_s", "median") for o in results if o.strategy == "none"), None)
    interval = (run.config.get("workload") or {}).get("interval")
    if not step or not isinstance(interval, int):
        return []
    return [
        Curve(
            strategy=one.strategy,
            interval_s=interval * step,
            stall_s=max(0.0, one.excess_s_per_checkpoint),
            lag_s=max(0.0, durable - ((one.windows or 1) - 1) * step),
            recovery_s=RECOVERY_S,
        )
        for one in results
        if one.excess_s_per_checkpoint is not None
        and (durable := _number(one, "latency_s", "durable")) is not None
    ]


def _number(result: Result, *path: str) -> float | None:
    return metrics.number(result.row, *path)


# -- a crash test ----------------------------------------------------------------------------------


def _of_crash_test(store: Store, run: Run) -> str:
    trials = store.trials(run.run_id)
    counts = {passed: sum(one.passed is passed for one in trials) for passed in (True, False, None)}
    return _page(
        run,
        _crash_drawings(trials, asking.profile_of(run)),
        [one.strategy or "" for one in trials],
        told=[headlines.of_crash_test(counts)],
        results=[],
        noise=None,
        trials=trials,
    )


def _crash_drawings(trials: Sequence[Trial], profile: str | None) -> list[Drawing]:
    return [
        Drawing(
            figure=figures.recovery_matrix(trials, emulated=profile),
            caption="What was done to the training, by strategy. A trial passes only if the "
            "restored state and all that follows are those of a run that nobody interrupted.",
        ),
        Drawing(
            figure=figures.recovery_split(trials, emulated=profile),
            caption="What the time between a crash and the first new step went into.",
        ),
        Drawing(
            figure=figures.goodput(recovery.curves(trials), emulated=profile),
            caption="The share of the time that is useful work, by the work that was lost and the "
            "recovery that these trials took.",
        ),
    ]
