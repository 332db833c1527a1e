"""The suites by name, and how one is run from the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from gockpt.cli import (
    bench_suite,
    bench_suite_paper,
    bench_suite_scale,
    bench_suite_sheet,
    bench_suite_sweep,
    output,
)
from gockpt.cli.bench_setup import Setup
from gockpt.cli.bench_suite import Prepared, Request, Suite
from gockpt.cli.bench_suite_figures import seconds_of
from gockpt.errors import ConfigError, suggestion

Json = dict[str, Any]

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (bench_suite_paper.SUITE, bench_suite_sweep.SUITE, bench_suite_scale.SUITE)
}


def find_suite(name: str) -> Suite:
    """The suite of that name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    if name in SUITES:
        return SUITES[name]
    hint = suggestion(name, SUITES)
    raise ConfigError(f"--suite {name}: there is no such suite; {hint}")


def prepare(name: str, request: Request) -> Prepared:
    """See :func:`gockpt.cli.bench_suite.prepare`."""
    return bench_suite.prepare(find_suite(name), request)


def run(
    prepared: Prepared,
    measure: Callable[[Setup], Json],
    console: Console,
    *,
    markdown: str | None = None,
) -> Json:
    """Say what will be run, run it, and show the comparison.

    Args:
        measure: run and store one bench, and return its document.
        markdown: file that the comparison is written to as well.
    """
    console.print(_outlook(prepared))
    document = bench_suite.run(prepared, measure, console.print)
    show(prepared.suite, document, console)
    if markdown is not None:
        sheets = prepared.suite.sheets(document["rows"])
        output.write_text(bench_suite_sheet.markdown(sheets), markdown, option="--markdown")
    return document


def _outlook(prepared: Prepared) -> str:
    number = len(prepared.setups)
    many = f"{number} bench{'es' if number > 1 else ''}"
    text = f"suite {prepared.suite.name}: {many}{_about([one for _, one in prepared.setups])}"
    left = [f"\n  left out: {one['label']}: {one['reason']}" for one in prepared.left_out]
    return text + "".join(left)


def _about(setups: Sequence[Setup]) -> str:
    each = [
        seconds_of(one.task, rows=len(one.strategies) * one.repeats, steps=one.steps)
        for one in setups
    ]
    known = [seconds for seconds in each if seconds is not None]
    return f", about {sum(known) / 60:.0f} min" if len(known) == len(each) else ""


def show(suite: Suite, document: Json, console: Console) -> None:
    """The comparison, and below it what the suite claims and what is missing."""
    for sheet in suite.sheets(document["rows"]):
        console.print(bench_suite_sheet.table(sheet))
    for one in document["checks"]:
        said = {
            True: "holds",
            False: "does not hold",
            None: "not decided, as a row is missing or does not count",
        }
        style = "red" if one["holds"] is False else None
        console.print(f"{one['model']}: {one['check']}: {said[one['holds']]}", style=style)
    for kind in ("left_out", "failed"):
        for one in document[kind]:
            console.print(f"{one['label']}: {kind.replace('_', ' ')}: {one['reason']}", style="red")
