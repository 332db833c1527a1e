"""``--suite paper``: the paper's models and strategies on its machine, beside its own figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gockpt.cli import output
from gockpt.cli.bench_suite import Member, Ran, Request, Suite
from gockpt.cli.bench_suite_figures import (
    difference,
    none_step_s,
    strategies_of,
    throughput_at,
)
from gockpt.cli.bench_suite_sheet import Sheet, labelled, times
from gockpt.cli.paper_figures import BESIDE, PAPER, PROFILE, SOURCE

Json = dict[str, Any]

INTERVAL = 50
"""Steps between checkpoints, the paper's shorter interval; the only one that is run."""

STEPS = 2 * INTERVAL

LEAD = 0.05
"""The most that ``gockpt`` may stall, as a share of its rivals…"""

SMALL_S = 0.005
"""…or in seconds."""

THROUGHPUT = 0.998
"""Of ideal, at every 50 steps."""


def members(request: Request) -> list[Member]:
    """One bench a model. With fewer steps than the interval it is half of them."""
    steps = STEPS if request.steps is None else request.steps
    options = replace(
        request.options,
        device=f"emulated:{PROFILE}",
        strategies=",".join(BESIDE),
        steps=steps,
        interval=INTERVAL if steps >= INTERVAL else max(1, steps // 2),
    )
    return [Member(label=model, options=replace(options, model=model)) for model in PAPER]


def rows(ran: Sequence[Ran]) -> list[Json]:
    """Each strategy of each model beside the paper's."""
    return [_row(one.document, row) for one in ran for row in strategies_of(one.document)]


def _row(document: Json, row: Json) -> Json:
    model, theirs = document["workload"]["model"], BESIDE[row["strategy"]]
    paper = PAPER[model]
    blocked = row["stall"]["blocked_s_per_checkpoint"]
    return {
        "run_id": document["run_id"],
        "model": model,
        "strategy": row["strategy"],
        "valid": row["valid"],
        "emulated": document["environment"]["emulated"],
        "profile": document["environment"]["profile"],
        "windows": row["windows"],
        "blocked_s": blocked,
        "excess_s": row["stall"]["excess_s_per_checkpoint"],
        "paper": {"source": SOURCE, "strategy": theirs, "stall_s": paper.stall_s[theirs]},
        "difference_s": difference(blocked, paper.stall_s[theirs]),
        "throughput": [
            _throughput(document, row, interval, theirs) for interval in paper.tokens_per_s
        ],
    }


def _throughput(document: Json, row: Json, interval: int, theirs: str) -> Json:
    paper = PAPER[document["workload"]["model"]]
    measured = interval == document["workload"]["interval"]
    excess = row["stall"]["excess_s_per_checkpoint"]
    ours = (
        row["relative_throughput"]
        if measured
        else throughput_at(interval, excess, none_step_s(document))
    )
    return {
        "interval": interval,
        "relative": ours,
        "basis": "measured" if measured else "derived",
        "paper_tokens_per_s": paper.tokens_per_s[interval][theirs],
        "paper_relative": paper.relative(theirs, interval),
        "difference": difference(ours, paper.relative(theirs, interval)),
    }


# -- what the suite claims -------------------------------------------------------------------------


def checks(rows: Sequence[Json]) -> list[Json]:
    """Whether each model has the paper's order of strategies, with ``gockpt`` ahead of all."""
    models = dict.fromkeys(row["model"] for row in rows)
    return [
        {"model": model, **check}
        for model in models
        for check in _checks({row["strategy"]: row for row in rows if row["model"] == model})
    ]


def _checks(rows: dict[str, Json]) -> Iterator[Json]:
    known = all(row["valid"] for row in rows.values()) and rows.keys() >= BESIDE.keys()
    stall = {name: row["blocked_s"] for name, row in rows.items()}
    order = [name for name in BESIDE if name != "gockpt"]
    yield {
        "check": f"stall falls from {' to '.join(order)}",
        "holds": sorted(order, key=lambda name: -stall[name]) == order if known else None,
    }
    for rival in ("async-o", "gockpt-o-paper"):
        yield {
            "check": f"gockpt stalls {1 - LEAD:.0%} less than {rival}, or at most "
            f"{output.seconds(SMALL_S)}",
            "holds": stall["gockpt"] <= max(LEAD * stall[rival], SMALL_S) if known else None,
        }
    yield {
        "check": f"gockpt keeps {THROUGHPUT:.1%} of the throughput at every {INTERVAL} steps",
        "holds": _at_interval(rows["gockpt"]) >= THROUGHPUT if known else None,
    }


def _at_interval(row: Json) -> float:
    found: float = next(one["relative"] for one in row["throughput"] if one["interval"] == INTERVAL)
    return found


# -- for people ------------------------------------------------------------------------------------


def sheets(rows: Sequence[Json]) -> list[Sheet]:
    """Stall and throughput."""
    return [_stall(rows), _throughputs(rows)] if rows else []


def _stall(rows: Sequence[Json]) -> Sheet:
    return Sheet(
        title="Stall of a checkpoint, beside the paper's",
        columns=("model", "strategy", "beside", "times", "blocked", "excess", "paper", "difference",
                 "K"),
        left=4,
        rows=[
            [
                row["model"],
                row["strategy"],
                row["paper"]["strategy"],
                times(row),
                output.seconds(row["blocked_s"]),
                output.seconds(row["excess_s"]),
                output.seconds(row["paper"]["stall_s"]),
                _signed(row["difference_s"], row["paper"]["stall_s"]),
                str(row["windows"] or "–"),
            ]
            for row in rows
        ],
        valid=[row["valid"] for row in rows],
        notes=[
            f"Paper: {SOURCE}. It sends 14 bytes of state a parameter; here 12 are sent, as the "
            "16-bit weights are derived from their masters.",
            *labelled(rows[0]),
        ],
    )  # fmt: skip


def _throughputs(rows: Sequence[Json]) -> Sheet:
    each = [(row, one) for row in rows for one in row["throughput"]]
    return Sheet(
        title="Throughput of none, beside the paper's of its ideal",
        columns=("model", "strategy", "beside", "times", "basis", "every", "ours", "paper",
                 "difference", "paper's tokens/s"),
        left=5,
        rows=[
            [
                row["model"],
                row["strategy"],
                row["paper"]["strategy"],
                times(row),
                one["basis"],
                str(one["interval"]),
                output.percent(one["relative"], 2),
                output.percent(one["paper_relative"], 2),
                _points(one["difference"]),
                f"{one['paper_tokens_per_s']:,.0f}",
            ]
            for row, one in each
        ],
        valid=[row["valid"] for row, _ in each],
        notes=[
            "Derived: from the excess measured at another interval and the step of none; it holds "
            "while no checkpoint waits for the one before.",
            *labelled(rows[0]),
        ],
    )  # fmt: skip


def _signed(seconds: float | None, of: float) -> str:
    if seconds is None:
        return "–"
    return f"{'+' if seconds >= 0 else '−'}{output.seconds(abs(seconds))} ({seconds / of:+.0%})"


def _points(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:+.2f} points"


SUITE = Suite(
    name="paper",
    summary="the paper's three V100S models and strategies beside its own figures",
    takes=frozenset(),
    members=members,
    rows=rows,
    sheets=sheets,
    checks=checks,
)
