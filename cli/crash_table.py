"""What a crash test shows: a live table while it runs, a matrix and the failures in the end."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gockpt.cli import output
from gockpt.cli.crash_document import FAILED, PASSED, SKIPPED, Outcome
from gockpt.cli.crash_run import Report
from gockpt.cli.crash_scenarios import POINTS, SCENARIOS
from gockpt.cli.crash_setup import Case, Setup
from gockpt.goodput import goodput
from gockpt.results.documents import DOCUMENT_SCHEMA

STYLES = {PASSED: "green", FAILED: "bold red", SKIPPED: "yellow"}
SHOWN = 12
"""Tensors that are named of a failed trial."""


class LiveView:
    """Scenario by outcome, while trials run. Used in a ``with`` statement."""

    def __init__(self, setup: Setup, console: Console) -> None:
        self._setup, self._console = setup, console
        self._outcomes: list[Outcome] = []
        self._now = ""
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def golden(self) -> None:
        self._say("the uninterrupted run")

    def begins(self, case: Case) -> None:
        self._say(f"{case.scenario.name} at {case.point}, {case.strategy}, seed {case.seed}")

    def ended(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if not self._console.is_terminal:
            self._console.print(_line(len(self._outcomes), len(self._setup.cases), outcome))
        self._say("")

    def _say(self, now: str) -> None:
        self._now = now
        if self._console.is_terminal:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        done, all_ = len(self._outcomes), len(self._setup.cases)
        table = matrix(self._outcomes)
        table.caption = f"trial {min(done + 1, all_)} of {all_}: {self._now}"
        return table


def _line(number: int, of: int, outcome: Outcome) -> Text:
    row, case = outcome.row, outcome.case
    text = Text(f"{number:3}/{of} ")
    text.append(f"{outcome.word:8}", STYLES[outcome.word])
    text.append(f"{case.scenario.name} at {case.point} ({case.strategy}, seed {case.seed})")
    if row["passed"] is None or not row["passed"]:
        text.append(f": {row['detail']}")
    return text


def matrix(outcomes: Iterable[Outcome]) -> Table:
    """Scenario × strategy: how many passed, failed, were skipped."""
    outcomes = list(outcomes)
    strategies = list(dict.fromkeys(one.case.strategy for one in outcomes))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("scenario")
    for name in strategies:
        table.add_column(name)
    for scenario in dict.fromkeys(one.case.scenario.name for one in outcomes):
        cells = []
        for strategy in strategies:
            here = [
                one
                for one in outcomes
                if (one.case.scenario.name, one.case.strategy) == (scenario, strategy)
            ]
            cells.append(_cell([one.word for one in here]))
        table.add_row(scenario, *cells)
    return table


def _cell(words: list[str]) -> Text:
    text = Text()
    for word in (PASSED, FAILED, SKIPPED):
        if number := words.count(word):
            text.append(f"{number} {word}  ", STYLES[word])
    return text if text else Text("–")


def show(report: Report, *, mtbf: float, console: Console) -> None:
    """The end: the matrix, what crashes cost, and the failures."""
    outcomes, document, logs = report.outcomes, report.document, report.logs
    console.print(matrix(outcomes))
    console.print(_costs(document, mtbf))
    for outcome in outcomes:
        if outcome.word == FAILED:
            _show_failure(outcome, console)
    if logs is not None:
        console.print(f"Logs of failed trials: {logs}", soft_wrap=True)
    skipped = {row["detail"] for row in document["trials"] if row["passed"] is None}
    for reason in sorted(skipped):
        console.print(f"skipped: {reason}", style="yellow")
    counts = document["summary"]
    console.print(
        f"{counts['trials']} trials: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['skipped']} skipped"
    )
    if report.setup.sabotage is not None:
        found = "was found" if counts["failed"] else "was NOT found: the trials have no teeth"
        console.print(f"The planted bug {report.setup.sabotage.name} {found}.")


def _costs(document: dict[str, Any], mtbf: float) -> Table:
    emulated = " (emulated)" if document["environment"]["emulated"] else ""
    table = Table(box=box.SIMPLE_HEAD, title=f"What a crash costs{emulated}", title_justify="left")
    table.add_column("strategy")
    for name in ("lost steps", "lost work", "recovery", f"goodput at {mtbf:g} s"):
        table.add_column(name, justify="right")
    for row in document["summary"]["strategies"]:
        if row["recovery_s"] is None:
            continue
        lost, back = row["lost_s"] or 0.0, row["recovery_s"]
        table.add_row(
            row["strategy"],
            "–" if row["lost_steps"] is None else f"{row['lost_steps']:.1f}",
            output.seconds(lost),
            output.seconds(back),
            output.percent(goodput(mtbf, lost, back)),
        )
    return table


def _show_failure(outcome: Outcome, console: Console) -> None:
    row = outcome.row
    console.print(_line(0, 0, outcome)[6:], soft_wrap=True)
    tensors = row["different_tensors"]
    if tensors:
        more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
        console.print(f"  differing tensors: {', '.join(tensors[:SHOWN])}{more}", soft_wrap=True)
    console.print(f"  to see it again: {row['command']}", soft_wrap=True)


def list_document() -> dict[str, Any]:
    """All scenarios and points, as JSON."""
    return {
        "schema": DOCUMENT_SCHEMA,
        "kind": "crash-list",
        "scenarios": [
            {
                "family": one.family,
                "scenario": one.name,
                "summary": one.summary,
                "points": list(one.points),
            }
            for one in SCENARIOS.values()
        ],
        "points": [{"point": name, "when": when} for name, when in POINTS.items()],
    }


def show_list(console: Console) -> None:
    """The same for people."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("family", "scenario", "what happens", "points"):
        table.add_column(name)
    for one in SCENARIOS.values():
        table.add_row(one.family, one.name, one.summary, ", ".join(one.points))
    console.print(table)
    points = Table(box=box.SIMPLE_HEAD)
    points.add_column("point")
    points.add_column("when")
    for name, when in POINTS.items():
        points.add_row(name, when)
    console.print(points)
