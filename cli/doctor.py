"""``gockpt doctor``: what this machine can do, and how near gockpt comes to it."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from gockpt.cli import errors, options, output
from gockpt.errors import ConfigError


def doctor(
    dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Where checkpoints would be written.", show_default="the system's"
        ),
    ] = None,
    megabytes: Annotated[int, typer.Option(help="Size of what is written, read and copied.")] = 256,
    json: options.Json = None,
) -> None:
    """Check what gockpt needs here, and measure its rates beside the raw ones."""
    from gockpt.cli import rates
    from gockpt.cli.bench_setup import check_directory

    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    directory = Path(dir or tempfile.gettempdir())
    check_directory(directory)
    if megabytes < 1:
        raise ConfigError(f"--megabytes must be at least 1, not {megabytes}")
    _check_room(directory, megabytes << 20)
    with _scratch(directory) as scratch:
        checks = _checks(scratch)
        measured = []
        for measure in (rates.write, rates.read, rates.replay, rates.copy):
            with console.status(f"measuring: {measure.__name__}"):
                measured.append(measure(scratch, megabytes << 20))
    rows = [rates.as_json(one) for one in measured]
    document = {"schema": 1, "kind": "doctor", "directory": str(directory), "checks": checks,
                "rates": rows}  # fmt: skip
    if json is not None:
        output.write_document(document, json)
    console.print(_check_table(checks))
    console.print(_rate_table(rows))
    if not all(check["ok"] for check in checks):
        raise typer.Exit(errors.FAILED)


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gockpt-doctor-", dir=directory) as scratch:
        yield Path(scratch)


def _check_room(directory: Path, size: int) -> None:
    from gockpt import hostmemory
    from gockpt.storage import fs

    free, there = fs.free_bytes(directory), hostmemory.available()
    if free < 2 * size:
        raise ConfigError(
            f"--dir {directory}: the measurement needs {output.size(2 * size)}, and "
            f"{output.size(free)} are free; give fewer --megabytes"
        )
    if there < 6 * size:
        raise ConfigError(
            f"the measurement needs {output.size(6 * size)} of memory, and {output.size(there)} "
            "are available; give fewer --megabytes"
        )


def _checks(scratch: Path) -> list[dict[str, Any]]:
    """What was looked at. ``ok`` is False only for what gockpt cannot do without."""
    from gockpt import hostmemory
    from gockpt.storage import fs

    found = [_system(), _processes()]
    fd, reason = fs.create_direct(scratch / "probe")
    fs.drop(fd, scratch / "probe")
    found.append(
        _check("direct writes (O_DIRECT)", "yes" if reason is None else "no, buffered", reason)
    )
    found.append(_check("free on the disk", output.size(fs.free_bytes(scratch))))
    found.append(_check("memory available", output.size(hostmemory.available())))
    found.append(_locked_memory())
    found.append(_cuda())
    return found


def _check(name: str, value: str, remark: str | None = None, *, ok: bool = True) -> dict[str, Any]:
    return {"name": name, "value": value, "remark": remark, "ok": ok}


def _system() -> dict[str, Any]:
    import torch

    system = platform.system()
    remark = {
        "Linux": None,
        "Darwin": "the agent is a thread; what it holds does not outlive the trainer",
    }.get(system, "not tested")
    value = f"{system} {platform.release()}, Python {platform.python_version()}, torch "
    value += f"{torch.__version__}, {torch.get_num_threads()} threads"
    return _check("system", value, remark, ok=system in ("Linux", "Darwin"))


def _processes() -> dict[str, Any]:
    """Whether an agent can be a process: memory by descriptor, and a safe way to watch it."""
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if not missing:
        return _check("agent", "as a process")
    return _check("agent", "as a thread", f"the system has no {' and no '.join(missing)}")


def _locked_memory() -> dict[str, Any]:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return _check("locked memory", "no limit")
    remark = "matters on CUDA only: slots are pinned; raise it with ulimit -l"
    return _check("locked memory", output.size(limit), remark)


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return _check("CUDA", "none", "bench emulates an accelerator instead")
    return _check(
        "CUDA", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    )


def _check_table(checks: list[dict[str, Any]]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="This machine", title_justify="left", show_header=False
    )
    for _ in range(3):
        table.add_column(overflow="fold")
    for one in checks:
        style = None if one["ok"] else "red"
        table.add_row(one["name"], one["value"], one["remark"] or "", style=style)
    return table


def _rate_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="Rates, measured here",
        title_justify="left",
        caption="Ratio: gockpt's rate over the raw one, both in this run.",
        caption_justify="left",
    )
    table.add_column("what")
    for name in ("gockpt", "raw", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("raw is")
    for row in rows:
        unit = row["unit"]
        table.add_row(
            row["name"],
            f"{output.count(row['rate'])}{unit}",
            f"{output.count(row['raw_rate'])}{unit}",
            f"{row['ratio']:.2f}",
            row["raw_is"],
        )
    return table
