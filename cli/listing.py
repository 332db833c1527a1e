"""``gockpt ls``, ``gockpt verify``: what a directory holds, and whether it is still as it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from gockpt.cli import errors, options, output
from gockpt.errors import CorruptError, NoCheckpointError

if TYPE_CHECKING:
    from gockpt.storage import Found

Directory = Annotated[
    str, typer.Argument(metavar="PATH", help="A directory of checkpoints, or one checkpoint.")
]


def ls(path: Directory, json: options.Json = None) -> None:
    """List the checkpoints of a directory, newest first.

    The exit code is 1 if one that was finished cannot be used.
    """
    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    found = _find(Path(path))
    rows = [_row(one) for one in found]
    if json is not None:
        document = {"schema": 1, "kind": "ls", "path": path, "checkpoints": rows}
        output.write_document(document, json)
    if rows:
        console.print(_table(rows))
    else:
        console.print(f"{path} has no checkpoints")
    if any(one.problem is not None and one.committed for one in found):
        raise typer.Exit(errors.FAILED)


def verify(
    path: Directory,
    step: Annotated[
        int | None, typer.Option(help="Only the newest of this step.", show_default="all")
    ] = None,
    json: options.Json = None,
) -> None:
    """Read checkpoints whole and check every byte against its recorded hash.

    The exit code is 1 if anything is damaged; the lines say what and where.
    """
    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    rows = []
    for one in _chosen(Path(path), step):
        with console.status(f"reading {one.path.name}"):
            problems = _problems(one)
        rows.append({"path": str(one.path), "step": one.step, "problems": problems})
        console.print(f"{one.path.name}: {'good' if not problems else 'DAMAGED'}")
        for problem in problems:
            console.print(f"  {problem}", style="red", soft_wrap=True)
    if json is not None:
        document = {"schema": 1, "kind": "verify", "path": path, "checkpoints": rows}
        output.write_document(document, json)
    if any(row["problems"] for row in rows):
        raise typer.Exit(errors.FAILED)


def _find(path: Path) -> list[Found]:
    """The checkpoint that this is, or all that are in it, unfinished ones included.

    Raises:
        NoCheckpointError: there is no such directory.
    """
    from gockpt.storage import examine, scan

    if not path.is_dir():
        raise NoCheckpointError(f"{path}: no such directory; name one with checkpoints", path=path)
    alone = examine(path)
    return [alone] if alone.manifests or alone.committed else scan(path)


def _chosen(path: Path, step: int | None) -> list[Found]:
    """Every finished checkpoint, or the newest of ``step``.

    Raises:
        NoCheckpointError: there are none.
    """
    finished = [one for one in _find(path) if one.committed]
    chosen = [one for one in finished if step in (None, one.step)]
    if chosen:
        return chosen if step is None else chosen[:1]
    if not finished:
        raise NoCheckpointError(f"{path} has no checkpoints to verify", path=path)
    steps = ", ".join(str(one) for one in sorted({one.step for one in finished}))
    raise NoCheckpointError(f"{path} has no checkpoint of step {step}, only of {steps}", path=path)


def _problems(found: Found) -> list[str]:
    from gockpt.storage import open as open_checkpoint

    if found.problem is not None:
        return [found.problem]
    try:
        return open_checkpoint(found.path).verify()
    except CorruptError as error:
        return [str(error)]


def _row(found: Found) -> dict[str, Any]:
    """One checkpoint; what a damaged manifest does not tell is None."""
    first = found.manifests[0] if found.manifests else None
    return {
        "path": str(found.path),
        "step": found.step,
        "sequence": found.sequence,
        "created": first.created if first else None,
        "strategy": first.strategy if first else None,
        "windows": first.windows if first else None,
        "fallback": first.fallback if first else None,
        "proof": str(first.proof.get("outcome", "off")) if first else None,
        "tensors": sum(len(one.tensors) for one in found.manifests) if first else None,
        "bytes": sum(file.size for one in found.manifests for file in one.files) if first else None,
        "finished": found.committed,
        "problem": found.problem,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("step", "seq", "created (UTC)", "strategy", "K", "proof", "tensors", "size"):
        table.add_column(name, justify="left" if name in ("created (UTC)", "strategy") else "right")
    table.add_column("state", overflow="fold")
    for row in rows:
        state = "valid" if row["problem"] is None else row["problem"]
        created = row["created"] and row["created"][:19].replace("T", " ")
        cells = (row["step"], row["sequence"], created, row["strategy"], row["windows"],
                 row["proof"], row["tensors"])  # fmt: skip
        table.add_row(
            *("–" if cell is None else str(cell) for cell in cells),
            output.size(row["bytes"]),
            state,
            style="red" if row["problem"] and row["finished"] else None,
        )
    return table
