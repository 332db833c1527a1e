"""The runs of the results database that the paper's Table 1 is made of.

What always holds: the database is only read; what is missing is refused in one line, with the
commands that make it; a figure of an invalid row, a failed trial or a planted bug is not taken.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gockpt.cli.crash_table1 import STRATEGIES, Taken
from gockpt.cli.database import database_path
from gockpt.cli.paper_figures import TABLE1_DEVICE, TABLE1_MODEL, TABLE1_STEP_S
from gockpt.errors import ConfigError
from gockpt.results import Store

JOB = f"--model {TABLE1_MODEL} --device {TABLE1_DEVICE}"
BENCH = f"gockpt bench {JOB} --steps 36 --interval 18"
"""Eighteen steps are 8 s, in which a checkpoint becomes durable: none waits for the one before."""

CRASH_TEST = (
    f"gockpt crash-test {JOB} --scenario reboot --point random --strategies {','.join(STRATEGIES)}"
    f" --trials {2 * len(STRATEGIES)}"
)
"""Trainer and agent die with what is in memory, so that the state comes from the SSD."""

TOLERANCE = 0.02
"""By which a step may differ from the paper's; another job (``--tokens``) is further away."""

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the table is made of."""

    bench: str
    crash_test: str
    """Ids of the runs."""
    step_s: float
    """The median of a step without checkpoints."""
    interval: int
    """Of the bench, in steps."""
    taken: dict[str, Taken]


def find(db: str | None) -> Found:
    """The newest bench and crash test of the paper's model and device that have every strategy.

    Raises:
        ConfigError: there are none; the message has the commands.
    """
    path = database_path(db)
    if not path.is_file():
        raise _missing(f"{path}: no results database", db, BENCH, CRASH_TEST)
    with Store(path, read_only=True) as store:
        bench = _newest(store, "bench", lambda one: rows(one) is not None)
        crash = _newest(store, "crash-test", lambda one: recoveries(one) is not None)
    if bench is None or crash is None:
        lacking = [
            *([("bench", BENCH)] if bench is None else []),
            *([("crash test (with restarts from the SSD)", CRASH_TEST)] if crash is None else []),
        ]
        raise _missing(
            f"{path}: no {' and no '.join(what for what, _ in lacking)} of {TABLE1_MODEL} on "
            f"{TABLE1_DEVICE} that counts for all of {', '.join(STRATEGIES)}",
            db,
            *(command for _, command in lacking),
        )
    return found(bench, crash)


def found(bench: Document, crash: Document) -> Found:
    """Both documents together; each must have every strategy."""
    measured, back = rows(bench) or {}, recoveries(crash) or {}
    return Found(
        bench=bench["run_id"],
        crash_test=crash["run_id"],
        step_s=measured["none"]["step_s"]["median"],
        interval=bench["workload"]["interval"],
        taken={name: _taken(measured[name], back[name]) for name in STRATEGIES},
    )


def rows(bench: Document) -> dict[str, Document] | None:
    """The rows of a bench by strategy, if it is of the paper's job and all those needed count."""
    rows = {one["strategy"]: one for one in bench["results"] if one["valid"]}
    if not {"none", *STRATEGIES} <= rows.keys() or bench["workload"].get("windows") is not None:
        return None
    step = rows["none"]["step_s"]["median"]
    whole = all(_figures(rows[name]) for name in STRATEGIES)
    return rows if whole and math.isclose(step, TABLE1_STEP_S, rel_tol=TOLERANCE) else None


def recoveries(crash: Document) -> dict[str, list[float]] | None:
    """Seconds from each crash to the next step by strategy, where the state came from the SSD.

    What survives in memory says nothing of a machine that is lost, which is what the time to
    durable is counted for.
    """
    if crash.get("sabotage") is not None:
        return None
    taken: dict[str, list[float]] = {}
    for one in crash["trials"]:
        if one["passed"] and one.get("source") == "ssd" and one.get("recovery_s") is not None:
            taken.setdefault(one["strategy"], []).append(one["recovery_s"])
    return taken if set(STRATEGIES) <= taken.keys() else None


def _figures(row: Document) -> bool:
    return row["stall"]["excess_s_per_checkpoint"] is not None and (
        row["latency_s"]["durable"] is not None
    )


def _taken(row: Document, recoveries: list[float]) -> Taken:
    # Of the two stalls the one that sees everything (docs/metrics.md); below zero it is noise.
    return Taken(
        stall_s=max(0.0, row["stall"]["excess_s_per_checkpoint"]),
        durable_s=row["latency_s"]["durable"],
        windows=row["windows"] or 1,
        recovery_s=fmean(recoveries),
        trials=len(recoveries),
    )


def _newest(store: Store, kind: str, good: Callable[[Document], bool]) -> Document | None:
    runs = store.runs(kind=kind, model=TABLE1_MODEL, device=TABLE1_DEVICE)
    documents = (store.document(one.run_id) for one in runs)
    return next((one for one in documents if good(one)), None)


def _missing(what: str, db: str | None, *commands: str) -> ConfigError:
    place = "" if db is None else f" --db {shlex.quote(db)}"
    return ConfigError(f"{what}; run " + ", then ".join(f"`{one}{place}`" for one in commands))
