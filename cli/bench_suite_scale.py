"""``--suite scale``: how the cost of a checkpoint grows from 125 M to 13 G parameters.

A model that is too large for one such accelerator is measured all the same, and says so: its
gradients find no room on the device while they wait for the link, as on a device that is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gockpt.cli import output
from gockpt.cli.bench_setup import Options
from gockpt.cli.bench_suite import Member, Ran, Request, Suite
from gockpt.cli.bench_suite_figures import (
    interval_for,
    planned,
    predicted_stall_s,
    strategies_of,
)
from gockpt.cli.bench_suite_sheet import Sheet, labelled, times
from gockpt.cli.device_choice import AUTO, DEFAULT_PROFILE, EMULATED, device_bytes
from gockpt.cli.task import Task, resolve
from gockpt.errors import ConfigError, GockptError

Json = dict[str, Any]

MODELS = ("gpt-125m", "gpt-350m", "gpt-760m", "gpt-1.3b", "gpt-2.7b", "gpt-6.7b", "gpt-13b")
STRATEGIES = "async-o,gockpt"
LEAST = 6
"""Steps between checkpoints at the least."""


def members(request: Request) -> list[Member]:
    """One bench a model, each with its usual tokens a step."""
    given = request.options
    if "device" in request.given and given.device == AUTO:
        raise ConfigError(
            f"--device {AUTO} may be another one for each model; name the device of --suite scale"
        )
    options = replace(
        given,
        device=given.device if "device" in request.given else f"{EMULATED}:{DEFAULT_PROFILE}",
        strategies=given.strategies if "strategies" in request.given else STRATEGIES,
    )
    return [_member(replace(options, model=model), request.steps) for model in MODELS]


def _member(options: Options, steps: int | None) -> Member:
    interval = _interval(options, steps)
    return Member(
        label=options.model,
        options=replace(options, interval=interval, steps=steps or 2 * interval),
    )


def _interval(options: Options, steps: int | None) -> int:
    try:
        task, _ = resolve(
            model=options.model,
            device=options.device,
            tokens=None,
            precision=options.precision,
            profile_file=options.profile_file,
        )
    except GockptError:
        return LEAST  # it does not fit, and is left out with the reason when it is set up
    return interval_for(task, least=LEAST, steps=steps)


def rows(ran: Sequence[Ran]) -> list[Json]:
    """What each strategy costs each model."""
    return [_row(one, row) for one in ran for row in strategies_of(one.document)]


def _row(one: Ran, row: Json) -> Json:
    task, workload = one.setup.task, one.document["workload"]
    interval = workload["interval"]
    emulated = one.document["environment"]["emulated"]
    sent = row["bytes"]
    return {
        "run_id": one.document["run_id"],
        "model": workload["model"],
        "strategy": row["strategy"],
        "valid": row["valid"],
        "emulated": emulated,
        "profile": one.document["environment"]["profile"],
        "params": workload["params"],
        "tokens_per_step": workload["tokens_per_step"],
        "interval": interval,
        "blocked_s": row["stall"]["blocked_s_per_checkpoint"],
        "excess_s": row["stall"]["excess_s_per_checkpoint"],
        "predicted_s": predicted_stall_s(task, row["strategy"], interval) if emulated else None,
        "relative_throughput": row["relative_throughput"],
        "windows": row["windows"],
        "traffic_factor": (
            (sent["state"] + sent["gradients"]) / sent["state"] if sent["state"] else None
        ),
        "durable_s": row["latency_s"]["durable"],
        "memory_bytes": row["memory_bytes"],
        "full_memory_bytes_predicted": _full_memory(task, row["strategy"], interval),
        "device_bytes": _device_bytes(task),
    }


def _full_memory(task: Task, strategy: str, interval: int) -> int | None:
    """Host bytes of slots and ring of the full model, by the plan."""
    if task.profile is None or strategy != "gockpt":
        return None
    return planned(task, interval).memory_bytes


def _device_bytes(task: Task) -> Json:
    """What training takes of the accelerator by itself, in the model's true size, and what there
    is; None where it is no modelled one."""
    profile = task.profile
    return {
        "needed": device_bytes(task.preset, task.tokens),
        "there": None if profile is None else profile.device_memory_bytes,
    }


def sheets(rows: Sequence[Json]) -> list[Sheet]:
    """One row for each model and strategy."""
    if not rows:
        return []
    return [
        Sheet(
            title="What a checkpoint costs, by the size of the model",
            columns=("model", "strategy", "times", "parameters", "every", "throughput of none",
                     "blocked", "excess", "predicted", "K", "traffic", "durable after", "memory",
                     "full memory, predicted"),
            left=3,
            rows=[
                [
                    f"{row['model']}{'*' if _too_large(row) else ''}",
                    row["strategy"],
                    times(row),
                    output.count(row["params"]),
                    str(row["interval"]),
                    output.percent(row["relative_throughput"], 2),
                    output.seconds(row["blocked_s"]),
                    output.seconds(row["excess_s"]),
                    output.seconds(row["predicted_s"]),
                    str(row["windows"] or "–"),
                    "–" if row["traffic_factor"] is None else f"{row['traffic_factor']:.2f}×",
                    output.seconds(row["durable_s"]),
                    output.size(_added(row["memory_bytes"])),
                    output.size(row["full_memory_bytes_predicted"]),
                ]
                for row in rows
            ],
            valid=[row["valid"] for row in rows],
            notes=[*_remarks(rows), *labelled(rows[0])],
        )
    ]  # fmt: skip


def _added(sizes: Json) -> int | None:
    parts = (sizes["trainer_added"], sizes["agent_added"])
    return None if None in parts else sum(parts)


def _too_large(row: Json) -> bool:
    there = row["device_bytes"]["there"]
    return there is not None and row["device_bytes"]["needed"] > there


def _remarks(rows: Sequence[Json]) -> list[str]:
    large = {row["model"]: row["device_bytes"] for row in rows if _too_large(row)}
    return [
        f"* {model}: its training needs {output.size(sizes['needed'])} of device memory and one "
        f"such device has {output.size(sizes['there'])}; gradients find no room on it while they "
        "wait."
        for model, sizes in large.items()
    ]


SUITE = Suite(
    name="scale",
    summary="gpt-125m to gpt-13b: how stall, throughput, windows and memory grow",
    takes=frozenset({"device", "strategies", "profile_file"}),
    members=members,
    rows=rows,
    sheets=sheets,
)
