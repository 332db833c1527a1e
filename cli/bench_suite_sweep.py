"""``--suite sweep``: stall over the ratio of the state to what a window carries, beside the plan.

One model, whose tokens a step (so the length of its windows) are varied; once with gradients of 16
and once of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gockpt.cli import output
from gockpt.cli.bench_setup import Options
from gockpt.cli.bench_suite import Member, Ran, Request, Suite
from gockpt.cli.bench_suite_figures import (
    difference,
    interval_for,
    planned,
    predicted_stall_s,
    state_to_window,
    strategies_of,
    tokens_for,
    with_tokens,
)
from gockpt.cli.bench_suite_sheet import Sheet, labelled, times
from gockpt.cli.device_choice import DEFAULT_PROFILE, EMULATED
from gockpt.cli.task import resolve
from gockpt.errors import ConfigError

Json = dict[str, Any]

MODEL = "gpt-760m"

RATIOS = (0.2, 1.0, 3.0, 6.0, 8.0)
"""s·N/B ÷ T. Below 1 one window hides all; gradients alone fill the windows at s/g: 3 with 32 bits,
6 with 16."""

PRECISIONS = {"bf16-master": 16, "fp32": 32}
"""Precision → bits of its gradients. Both send 12 bytes of state a parameter."""

STRATEGIES = "async,async-o,gockpt"
LEAST = 3
"""Steps between checkpoints at the least: at low ratios a step is long, and one window enough."""


def members(request: Request) -> list[Member]:
    """A bench for each ratio and width of the gradients."""
    given = request.options
    device = given.device if "device" in request.given else f"{EMULATED}:{DEFAULT_PROFILE}"
    if not device.startswith(f"{EMULATED}:"):
        raise ConfigError(
            f"--device {device}: --suite sweep varies the length of a window, which only an "
            "emulated device has; name emulated:PROFILE"
        )
    options = replace(
        given,
        model=MODEL,
        device=device,
        strategies=given.strategies if "strategies" in request.given else STRATEGIES,
    )
    return [
        _member(replace(options, precision=precision), bits, ratio, request.steps)
        for precision, bits in PRECISIONS.items()
        for ratio in RATIOS
    ]


def _member(options: Options, bits: int, ratio: float, steps: int | None) -> Member:
    task, _ = resolve(
        model=MODEL,
        device=options.device,
        tokens=None,
        precision=options.precision,
        profile_file=options.profile_file,
    )
    tokens = tokens_for(task, ratio)
    interval = interval_for(with_tokens(task, tokens), least=LEAST, steps=steps)
    return Member(
        label=f"{bits}-bit/{ratio:g}",
        options=replace(options, tokens=tokens, interval=interval, steps=steps or 2 * interval),
    )


def rows(ran: Sequence[Ran]) -> list[Json]:
    """The stall of each strategy at each point, beside what the plan expects there."""
    return [_row(one, row) for one in ran for row in strategies_of(one.document)]


def _row(one: Ran, row: Json) -> Json:
    task, workload = one.setup.task, one.document["workload"]
    predicted = predicted_stall_s(task, row["strategy"], workload["interval"])
    blocked = row["stall"]["blocked_s_per_checkpoint"]
    return {
        "run_id": one.document["run_id"],
        "label": one.label,
        "strategy": row["strategy"],
        "valid": row["valid"],
        "emulated": one.document["environment"]["emulated"],
        "profile": one.document["environment"]["profile"],
        "gradient_bits": PRECISIONS[workload["precision"]],
        "state_to_window": state_to_window(task),
        "tokens_per_step": workload["tokens_per_step"],
        "interval": workload["interval"],
        "blocked_s": blocked,
        "excess_s": row["stall"]["excess_s_per_checkpoint"],
        "predicted_s": predicted,
        "difference_s": difference(blocked, predicted),
        "windows": row["windows"],
        "planned_windows": (
            planned(task, workload["interval"]).windows if row["strategy"] == "gockpt" else None
        ),
    }


def sheets(rows: Sequence[Json]) -> list[Sheet]:
    """The points, those of one width of gradients after those of the other."""
    if not rows:
        return []
    return [
        Sheet(
            title=f"Stall of a checkpoint of {MODEL} over the ratio of state to window",
            columns=("gradients", "strategy", "times", "s·N/B ÷ T", "tokens", "every", "blocked",
                     "excess", "predicted", "difference", "K", "planned K"),
            left=3,
            rows=[
                [
                    f"{row['gradient_bits']} bits",
                    row["strategy"],
                    times(row),
                    f"{row['state_to_window']:.2f}",
                    f"{row['tokens_per_step']:,}",
                    str(row["interval"]),
                    output.seconds(row["blocked_s"]),
                    output.seconds(row["excess_s"]),
                    output.seconds(row["predicted_s"]),
                    output.seconds(row["difference_s"]),
                    str(row["windows"] or "–"),
                    str(row["planned_windows"] or "–"),
                ]
                for row in rows
            ],
            valid=[row["valid"] for row in rows],
            notes=[
                "Predicted: by the cost model of `gockpt plan`. Difference: blocked − predicted.",
                *labelled(rows[0]),
            ],
        )
    ]  # fmt: skip


SUITE = Suite(
    name="sweep",
    summary="stall over the ratio of state to window, with gradients of 16 and 32 bits",
    takes=frozenset({"device", "strategies", "profile_file"}),
    members=members,
    rows=rows,
    sheets=sheets,
)
