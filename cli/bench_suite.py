"""Suites of ``gockpt bench``: several ordinary benches, and one comparison over them all.

What always holds: a suite measures nothing itself. Each of its benches is set up, run, checked and
stored as any other, and its rows in the comparison are figures of that run, or say from which of
them they are derived.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gockpt.cli import bench_setup
from gockpt.cli.bench_setup import Options, Setup
from gockpt.cli.bench_suite_sheet import Sheet
from gockpt.errors import ConfigError, GockptError, suggestion
from gockpt.results.documents import DOCUMENT_SCHEMA

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for."""

    options: Options
    given: frozenset[str] = frozenset()
    """Names of the parameters that he gave; the others hold the defaults of a single bench."""
    only: str | None = None
    """Labels, separated by commas, of the benches that he wants; None: all."""

    @property
    def steps(self) -> int | None:
        """Steps of each bench, if he said so."""
        return self.options.steps if "steps" in self.given else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One bench of a suite, not yet checked."""

    label: str
    """What ``--only`` calls it."""
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A bench of the suite that was run to its end."""

    label: str
    setup: Setup
    document: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What is run, and how it is compared."""

    name: str
    summary: str
    takes: frozenset[str]
    """Parameters of a bench that may be given with it, next to :data:`ALWAYS`."""
    members: Callable[[Request], list[Member]]
    rows: Callable[[Sequence[Ran]], list[Json]]
    """The comparison: one row for each bench and strategy."""
    sheets: Callable[[Sequence[Json]], list[Sheet]]
    checks: Callable[[Sequence[Json]], list[Json]] = lambda rows: []
    """What the suite claims, and whether it holds."""


ALWAYS = frozenset(
    {"suite", "only", "markdown", "steps", "repeats", "seed", "data", "dir", "db", "json"}
)
"""Parameters that every suite takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A suite that can be run."""

    suite: Suite
    setups: list[tuple[str, Setup]]
    left_out: list[Json] = field(default_factory=list)
    """Label and reason of each bench that cannot run here."""


def prepare(suite: Suite, request: Request) -> Prepared:
    """Check and resolve all benches of the suite before the first is run.

    Raises:
        ConfigError: an option that the suite fixes, a label that it lacks, or what is wrong with
            every one of its benches.
    """
    _check_given(suite, request)
    setups: list[tuple[str, Setup]] = []
    errors: list[tuple[str, GockptError]] = []
    for member in _chosen(suite.members(request), request.only):
        try:
            setups.append((member.label, bench_setup.prepare(member.options)))
        except GockptError as error:
            errors.append((member.label, error))
    if not setups:
        raise errors[0][1]
    left_out = [{"label": label, "reason": str(error)} for label, error in errors]
    return Prepared(suite=suite, setups=setups, left_out=left_out)


def _check_given(suite: Suite, request: Request) -> None:
    fixed = sorted(request.given - ALWAYS - suite.takes)
    if fixed:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise ConfigError(
            f"{names}: fixed by --suite {suite.name}; leave it out, or choose among the suite's "
            "benches with --only"
        )


def _chosen(members: list[Member], only: str | None) -> list[Member]:
    if only is None:
        return members
    known = [one.label for one in members]
    wanted = [label.strip() for label in only.split(",") if label.strip()]
    unknown = [label for label in wanted if label not in known]
    if unknown or not wanted:
        label = unknown[0] if unknown else ""
        hint = suggestion(label, known, otherwise="choose from")
        raise ConfigError(f"--only {label}: the suite has no such bench; {hint}")
    return [one for one in members if one.label in wanted]


def run(prepared: Prepared, measure: Callable[[Setup], Json], say: Callable[[str], object]) -> Json:
    """Run one bench after the other, and compare.

    Args:
        measure: run and store one bench, and return its document.
        say: tell the user where it is.

    Returns:
        The document of kind ``bench-suite`` (docs/metrics.md).
    """
    created = datetime.now(UTC)
    ran: list[Ran] = []
    failed: list[Json] = []
    for number, (label, setup) in enumerate(prepared.setups, 1):
        say(f"suite {prepared.suite.name}, {number} of {len(prepared.setups)}: {label}")
        try:
            ran.append(Ran(label=label, setup=setup, document=measure(setup)))
        except GockptError as error:  # the others may well run; it is in the document, and exit 1
            failed.append({"label": label, "reason": str(error)})
            say(f"{label}: {error}")
    rows = prepared.suite.rows(ran)
    return {
        "schema": DOCUMENT_SCHEMA,
        "kind": "bench-suite",
        "suite": prepared.suite.name,
        "run_id": f"suite-{created:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        "created": created.isoformat(timespec="seconds"),
        "environment": ran[0].document["environment"] if ran else None,
        "runs": [_member(one) for one in ran],
        "left_out": prepared.left_out,
        "failed": failed,
        "rows": rows,
        "checks": prepared.suite.checks(rows),
    }


def _member(one: Ran) -> Json:
    document = one.document
    return {
        "label": one.label,
        "run_id": document["run_id"],
        "workload": document["workload"],
        "valid": all(row["valid"] for row in document["results"]),
    }


def passed(document: Json) -> bool:
    """Whether every bench was run, and every row of it counts."""
    return not document["failed"] and all(one["valid"] for one in document["runs"])
