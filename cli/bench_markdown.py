"""A bench as a page of Markdown: what docs/comparison.md is made by.

What always holds: of an emulated device the page says so above, in and below its table.
"""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil

from gockpt.cli import bench_table, output
from gockpt.cli.bench_document import reference_of
from gockpt.results.noise import least

Json = Mapping[str, Any]

HEADS = (
    "strategy",
    "throughput of none",
    "blocked each",
    "excess each",
    "saved after",
    "drain",
    "in flight",
    "identical",
    "memory added",
    "synced, atomic, verified",
)


def machine() -> str:
    """This machine, in a few words; not its name."""
    memory = output.size(psutil.virtual_memory().total)
    return f"{os.cpu_count()} cores ({platform.machine()}), {memory} of memory, {platform.system()}"


def page(document: Json, host: str) -> str:
    """The whole page, of a bench that was run on a machine like ``host``."""
    parts = [
        "# Comparison",
        _badge(document),
        f"```\n{_command(document)}\n```",
        _made_by(document, host),
        _table(document),
        *_notes(document),
    ]
    return "\n\n".join(parts) + "\n"


def _badge(document: Json) -> str:
    environment, job = document["environment"], document["workload"]
    if not environment["emulated"]:
        return f"**Measured on `{environment['device']}`.**"
    ratio = round(job["params"] / job["device_params"])
    return (
        f"**Emulated by the profile `{environment['profile']}`**: the times of computing, link and "
        "disk model that hardware and were not measured on it; the model that is really trained "
        f"has {ratio} times fewer parameters, and every rate is as much lower "
        "([emulation.md](emulation.md))."
    )


def _made_by(document: Json, host: str) -> str:
    environment, job = document["environment"], document["workload"]
    return _wrapped(
        f"Made by this command on {host}: {job['model']}, {job['precision']}, "
        f"{job['tokens_per_step']:,} tokens a step, {job['steps']} steps, a checkpoint every "
        f"{job['interval']}, seed {job['seed']}; run `{document['run_id']}`, Python "
        f"{environment['python']}, torch {environment['torch']}, commit "
        f"{(environment['git_sha'] or 'unknown')[:12]}. Every engine is really run, in a process "
        "of its own, with the same limit of two checkpoints in flight (one, where it has but one "
        "set of buffers); what the columns mean is in [metrics.md](metrics.md)."
    )


def _command(document: Json) -> str:
    job = document["workload"]
    names = dict.fromkeys(one["strategy"] for one in document["results"])
    return (
        f"gockpt bench --model {job['model']} --device {document['environment']['device']} "
        f"--precision {job['precision']} --tokens {job['tokens_per_step']} --steps {job['steps']} "
        f"--interval {job['interval']} --seed {job['seed']} "
        f"--strategies {','.join(name for name in names if name != 'none')} "
        + ("--peers " if document.get("not_run") else "")
        + "--markdown FILE"
    )


def _table(document: Json) -> str:
    against = reference_of(document)
    engines = {one["strategy"]: one for one in document.get("engines", [])}
    rows = [_row(one, engines, against) for one in document["results"]]
    return "\n".join(
        _line(cells) for cells in (HEADS, ("---", *("---:",) * (len(HEADS) - 2), "---"), *rows)
    )


def _row(one: Json, engines: Mapping[str, Json], against: Any) -> Sequence[str]:
    name = one["strategy"]
    cells = bench_table.cells(one, against)
    if "blocked" not in cells:
        return (name, cells["throughput"], *("",) * (len(HEADS) - 2))
    return (
        f"**{name}**" if name == "gockpt" else name,
        cells["throughput"],
        cells["blocked"],
        cells["excess"],
        cells["durable"],
        cells["drain"],
        str(one["checkpoints"]["in_flight_max"]),
        cells["identical"],
        cells["memory"].partition(",")[0],
        _promise(engines.get(name)),
    )


def _promise(engine: Json | None) -> str:
    if engine is None:
        return "–"
    return ", ".join("yes" if engine[key] else "**no**" for key in ("fsync", "atomic", "verified"))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _notes(document: Json) -> Iterable[str]:
    environment, against = document["environment"], reference_of(document)
    yield _wrapped(
        ("Seconds are of the emulation" if environment["emulated"] else "Seconds are measured")
        + "; blocked and excess are for each checkpoint. *Saved after* is when the engine says so, "
        "and the last column is what that means: **synced** to the disk before, **atomic** by a "
        "rename at the end, and **verified**, so that an altered byte is noticed when it is read. "
        "*Identical*: read back by the engine's own reader, every tensor is compared with the "
        "golden run's."
    )
    if against.spread is not None:
        yield _wrapped(
            f"The two runs of none differ by {against.spread:.2%}, so a difference in throughput "
            f"below {least(against.spread):.2%} is not decided: in brackets."
        )
    problems = [
        f"- {one['strategy']}: {problem}"
        for one in document["results"]
        for problem in one["problems"]
    ]
    if problems:
        yield "Rows that do not count:\n\n" + "\n".join(problems)
    if document.get("engines"):
        yield "## What saved means"
        yield "\n".join(
            f"- {_titled(names, one)}: {bench_table.promises(one)}; {one['note']}."
            for names, one in bench_table.alike(document["engines"])
        )
    if document.get("not_run"):
        yield "## Did not run"
        yield "\n".join(f"- {one['strategy']}: {one['reason']}." for one in document["not_run"])


def _titled(names: Sequence[str], engine: Json) -> str:
    version = f" ({engine['version']})" if engine["version"] else ""
    return ", ".join(f"**{name}**" for name in names) + version


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)
