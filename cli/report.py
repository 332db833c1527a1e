"""``gockpt report``: one run as one HTML file, to send to somebody.

What always holds: the file is there whole or not at all; the database is only read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gockpt.cli import output
from gockpt.errors import ConfigError


def report(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, a beginning of it, or latest.")
    ] = "latest",
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to.")] = "report.html",
    db: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Results database.", show_default="in the user's data"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at FILE.")] = False,
) -> None:
    """Write a run of bench or crash-test, with its figures, to one file that needs no network."""
    from gockpt.cli.database import database_path
    from gockpt.cli.replacing import check_place
    from gockpt.results import Store

    target = Path(out).absolute()
    check_place(target, force=force, ours=())
    if target.is_dir():
        raise ConfigError(f"{out} is a directory, and a report is a file; name another place")
    with Store(database_path(db), read_only=True) as store:
        from gockpt.dashboard.report import render

        found, text = render(store, run)
    size = _write(text.encode(), target)
    output.people().print(
        f"{found.kind} {found.run_id}: {output.size(size)} in {out}; it needs no network",
        soft_wrap=True,
        markup=False,
    )


def _write(data: bytes, target: Path) -> int:
    """Durable, then at its place; returns its bytes."""
    from gockpt.cli.replacing import check_room, replacing
    from gockpt.cli.sink import new_file

    check_room(target, len(data))
    with replacing(target) as temporary, new_file(temporary, lambda done: None) as sink:
        sink.write(data)
    return len(data)
