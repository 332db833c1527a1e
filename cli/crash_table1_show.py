"""``crash-test --table1``: the table for people, and its document.

What always holds: title and document say that the figures are emulated, and what is assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gockpt.cli import output
from gockpt.cli.crash_table1 import Line, calibrated_restart_s, lines
from gockpt.cli.crash_table1_find import Found
from gockpt.cli.paper_figures import (
    TABLE1_ASSUMED_LAG_S,
    TABLE1_DEVICE,
    TABLE1_IDEAL_TOKENS_PER_S,
    TABLE1_MODEL,
    TABLE1_NAMES,
    TABLE1_OTHERS_TOKENS_PER_S,
)

COLUMNS = (
    "strategy\n",
    "in the\npaper",
    "stall\n",
    "paper's\nstall",
    "lag\n",
    "recovery\n(trials)",
    "best\nevery",
    "tok/s\n",
    "tok/s*\n",
    "paper's\ntok/s",
    "tok/s* to\npaper's",
    "formula*\n",
)


def document(found: Found, mtbf: float) -> dict[str, Any]:
    """As ``--json`` writes it; docs/crash-test.md describes it."""
    return {
        "schema": 1,
        "kind": "table1",
        "model": TABLE1_MODEL,
        "device": TABLE1_DEVICE,
        "emulated": True,
        "mtbf_s": mtbf,
        "bench": found.bench,
        "crash_test": found.crash_test,
        "step_s": found.step_s,
        "assumed": {
            "ideal_tokens_per_s": TABLE1_IDEAL_TOKENS_PER_S,
            "paper_restart_s": calibrated_restart_s(),
            "paper_lag_s": TABLE1_ASSUMED_LAG_S,
        },
        "rows": [
            {**asdict(one), "difference": one.difference}
            for one in lines(found.taken, found.step_s, mtbf)
        ],
    }


def show(found: Found, mtbf: float, console: Console) -> None:
    """The table, and below it what a reader of it must know."""
    console.print(table(lines(found.taken, found.step_s, mtbf), mtbf))
    for line in notes(found):
        console.print(line, soft_wrap=True)


def table(rows: Sequence[Line], mtbf: float) -> Table:
    """One row a strategy."""
    body = Table(
        box=box.SIMPLE_HEAD,
        title=f"{TABLE1_MODEL} on {TABLE1_DEVICE} (emulated), a crash every {mtbf:g} s",
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    for name in COLUMNS:
        left = name == COLUMNS[0]
        body.add_column(name, justify="left" if left else "right", no_wrap=left)
    for one in rows:
        body.add_row(*_cells(one))
    return body


def _cells(one: Line) -> tuple[str, ...]:
    taken = one.taken
    return (
        one.strategy,
        TABLE1_NAMES.get(one.strategy, "–"),
        output.seconds(taken.stall_s),
        output.seconds(one.paper_stall_s),
        output.seconds(one.lag_s),
        f"{output.seconds(taken.recovery_s)} ({taken.trials})",
        str(one.interval),
        _tokens(one.tokens_per_s),
        _tokens(one.tokens_per_s_paper_restart),
        _tokens(one.paper_tokens_per_s),
        "–" if one.difference is None else f"{one.difference:+.1%}",
        _tokens(one.formula_tokens_per_s),
    )


def _tokens(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def notes(found: Found) -> list[str]:
    """Where each figure comes from."""
    others = ", ".join(f"{name} {value}" for name, value in TABLE1_OTHERS_TOKENS_PER_S.items())
    restart, lag = calibrated_restart_s(), TABLE1_ASSUMED_LAG_S
    return [
        "Taken here, in emulation: stall and lag (from a checkpoint's step until it is durable) "
        f"by bench {found.bench}; recovery by crash test {found.crash_test}, of the shrunk model, "
        "on this machine and its disk, without importing torch or waiting for a node.",
        "Calculated: the best interval in steps, and tok/s as a share of the "
        f"{TABLE1_IDEAL_TOKENS_PER_S:g} that the paper has without checkpoints and crashes.",
        f"*: with {output.seconds(restart)} for the restart in place of the recovery. "
        "The paper does not say what it takes there; this is calibrated so that the formula gives "
        "the paper's tok/s from its stalls (last column), with an assumed "
        f"{output.seconds(lag)} until durable.",
        f"In the paper's table and not run here: {others}.",
        *_waiting(found),
    ]


def _waiting(found: Found) -> list[str]:
    pause = found.interval * found.step_s
    late = [name for name, one in found.taken.items() if one.durable_s > pause]
    if not late:
        return []
    return [
        f"The bench saved every {output.seconds(pause)}, before the checkpoint of before was "
        f"durable: stalls of {', '.join(late)} may hold waiting for it."
    ]
