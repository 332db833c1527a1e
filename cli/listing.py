"""``gockpt ls``, ``gockpt verify``: what a directory holds, and whether it is still as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from gockpt.cli import checkpoints, errors, options, output
from gockpt.errors import CorruptError, NoCheckpointError, StorageError

if TYPE_CHECKING:
    from gockpt.storage import FileRecord, Found

Directory = Annotated[
    str, typer.Argument(metavar="PATH", help="A directory of checkpoints, or one checkpoint.")
]

_MARKS = {"pinned": "pinned", "kept": "kept for ever"}


_LINES = 20
"""Most damages of one checkpoint told to people."""


def ls(path: Directory, volume: checkpoints.Volumes = None, json: options.Json = None) -> None:
    """List the checkpoints of a directory, newest first.

    The exit code is 1 if one that was finished cannot be used.
    """
    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    found = _find(checkpoints.directory_of(Path(path)), volume)
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
    every: Annotated[
        bool, typer.Option("--all/--newest", help="All checkpoints, or the newest one.")
    ] = True,
    volume: checkpoints.Volumes = None,
    json: options.Json = None,
) -> None:
    """Read checkpoints whole and check every byte against its recorded hash.

    The exit code is 1 if anything is damaged; each line then names a file, the bytes of it that
    are not those that were written, and the tensors that lie there.
    """
    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    rows = []
    chosen = _chosen(checkpoints.directory_of(Path(path)), step, volume)
    for one in chosen if every else chosen[:1]:
        nbytes = sum(file.size for manifest in one.manifests for file in manifest.files)
        with checkpoints.reading(console, f"step {one.step}", nbytes) as tick:
            damages = _damages(one, tick)
        rows.append(_verdict(one, damages))
        said = "DAMAGED" if damages else f"good, {output.size(nbytes)} read"
        console.print(f"{one.path.name}: {said}", soft_wrap=True)
        for damage in damages[:_LINES]:
            console.print(Text(f"  {damage}"), style="red", soft_wrap=True)
        if len(damages) > _LINES:
            console.print(f"  and {len(damages) - _LINES} more; --json has them all", style="red")
    if json is not None:
        document = {"schema": 1, "kind": "verify", "path": path, "checkpoints": rows}
        output.write_document(document, json)
    if any(row["problems"] for row in rows):
        raise typer.Exit(errors.FAILED)


def _find(path: Path, volume: list[str] | None) -> list[Found]:
    """The checkpoint that this is, or all that are in it, unfinished ones included."""
    from gockpt.storage import examine, scan

    volumes = [Path(one) for one in volume or ()]
    alone = examine(path, volumes)
    return [alone] if alone.manifests or alone.committed else scan(path, volumes)


def _chosen(path: Path, step: int | None, volume: list[str] | None) -> list[Found]:
    """Every finished checkpoint, or the newest of ``step``.

    Raises:
        NoCheckpointError: there are none.
    """
    finished = [one for one in _find(path, volume) if one.committed]
    chosen = [one for one in finished if step in (None, one.step)]
    if chosen:
        return chosen if step is None else chosen[:1]
    if not finished:
        raise NoCheckpointError(f"{path} has no checkpoints to verify", path=path)
    steps = ", ".join(str(one) for one in sorted({one.step for one in finished}))
    raise NoCheckpointError(f"{path} has no checkpoint of step {step}, only of {steps}", path=path)


def _damages(found: Found, tick: Callable[[int], None]) -> list[StorageError]:
    """What is wrong with the whole, and with each extent that the manifests tell of."""
    from gockpt.storage import Checkpoint

    whole: list[StorageError] = []
    if found.problem is not None:
        whole.append(CorruptError(f"{found.path}: {found.problem}", path=found.path))
    if not found.manifests or len(found.manifests) != found.manifests[0].world_size:
        return whole
    return whole + Checkpoint(found).damages(tick=tick)


def _verdict(found: Found, damages: list[StorageError]) -> dict[str, Any]:
    """One checkpoint in the document; a damage without ``start`` is one of a whole file."""
    return {
        "path": str(found.path),
        "step": found.step,
        "problems": [str(one) for one in damages],
        "damages": [
            {
                "file": str(one.path) if one.path else None,
                "start": one.extent[0] if one.extent else None,
                "stop": one.extent[1] if one.extent else None,
                "tensors": list(one.tensors),
            }
            for one in damages
        ],
    }


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
        "volumes": [_part(file) for one in found.manifests for file in one.files if file.volume],
        "finished": found.committed,
        "problem": found.problem,
        "marks": list(found.marks),
    }


def _part(file: FileRecord) -> dict[str, Any]:
    """A part of an image, and for how long its volume was busy with it."""
    volume = str(Path(file.volume).parent)
    return {"volume": volume, "bytes": file.size, "seconds": file.seconds}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("step", "seq", "created (UTC)", "strategy", "K", "proof", "tensors", "size"):
        table.add_column(name, justify="left" if name in ("created (UTC)", "strategy") else "right")
    table.add_column("state", overflow="fold")
    for row in rows:
        state = ", ".join([row["problem"] or "valid", *(_MARKS[mark] for mark in row["marks"])])
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
