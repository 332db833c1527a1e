"""``gockpt export``: a checkpoint for other tools, in a format of theirs.

What always holds: every byte that is read is checked; the output is there whole or not at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gockpt.cli import checkpoints, options, output
from gockpt.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from gockpt.contents import Contents

SAFETENSORS, TORCH, DCP = "safetensors", "torch", "dcp"
FORMATS = (SAFETENSORS, TORCH, DCP)
SCOPES = ("model", "all")
OURS = {
    SAFETENSORS: ("model*.safetensors", "model.safetensors.index.json"),
    TORCH: (),
    DCP: ("*.distcp", ".metadata"),
}
"""What an exported directory holds, and may hold if it is to be replaced."""

OVERHEAD = 2048
"""Bytes counted for each tensor beside its own, and for the whole 512 times that."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What is to be written, and where."""

    contents: Contents
    out: Path
    format: str
    only: str
    max_shard: int

    @property
    def sources(self) -> list[str]:
        """Names in the checkpoint of the tensors to write, tied ones once."""
        checkpoint = self.contents.checkpoint
        names = checkpoint.names()
        if self.only == "model":
            names = list(self.contents.model_names().values())
        return list(dict.fromkeys(checkpoint.record(name).name for name in names))

    @property
    def nbytes(self) -> int:
        checkpoint = self.contents.checkpoint
        return sum(checkpoint.record(name).entry.nbytes for name in self.sources)

    @property
    def room(self) -> int:
        return self.nbytes + OVERHEAD * (512 + len(self.sources))


def export(
    path: checkpoints.Which,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="Where to: a file for torch, a directory for dcp; for safetensors a file if its "
            "name ends in .safetensors, else a directory.",
        ),
    ],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="safetensors, torch or dcp.")
    ] = SAFETENSORS,
    step: checkpoints.Step = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="model|all",
            help="The model alone, or the optimizer and everything else too.",
            show_default="model for safetensors, else all",
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of safetensors files in a directory.")
    ] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace what is at OUT.")] = False,
    volume: checkpoints.Volumes = None,
    json: options.Json = None,
) -> None:
    """Write a checkpoint as plain safetensors, a torch.save file or a DCP directory.

    safetensors: the model's own tensor names, as Hugging Face libraries load them. torch: the
    state dicts of model and optimizer, for torch.load(weights_only=True). dcp: a directory for
    torch.distributed.checkpoint.load.
    """
    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    target = _Order(
        contents=_open(path, step, volume),
        out=Path(os.path.abspath(out)),
        format=_choice("--to", to, FORMATS),
        only=_choice("--only", only, SCOPES) if only else "model" if to == SAFETENSORS else "all",
        max_shard=_bytes(max_shard_size),
    )
    files = _write(target, force, console)
    size = sum(file.stat().st_size for file in files)
    checkpoint = target.contents.checkpoint
    console.print(
        f"step {checkpoint.step}: {len(target.sources)} tensors, {output.size(size)}, "
        f"as {to} in {out}",
        soft_wrap=True,
    )
    for note in _notes(target):
        console.print(f"  {note}", soft_wrap=True)
    if json is not None:
        document = {
            "schema": 1,
            "kind": "export",
            "path": str(checkpoint.path),
            "step": checkpoint.step,
            "format": to,
            "only": target.only,
            "out": out,
            "files": [str(file) for file in files],
            "tensors": len(target.sources),
            "bytes": size,
        }
        output.write_document(document, json)


def _open(path: str, step: int | None, volume: list[str] | None) -> Contents:
    from gockpt.contents import contents

    return contents(checkpoints.open_one(path, step, volume))


def _write(order: _Order, force: bool, console: Any) -> list[Path]:
    """Check, write, rename; returns the files there are now."""
    from gockpt.cli.replacing import check_place, check_room, replacing

    write = _WRITERS[order.format]
    check_place(order.out, force=force, ours=OURS[order.format])
    if order.out.is_dir() and order.format == TORCH:
        raise ConfigError(f"{order.out} is a directory, and --to torch makes a file; name another")
    check_room(order.out, order.room)
    with (
        replacing(order.out) as temporary,
        checkpoints.reading(console, f"writing {order.out.name}", order.nbytes) as tick,
    ):
        write(order, temporary, tick)
    out = order.out
    return sorted(one for one in out.iterdir()) if out.is_dir() else [out]


def _write_safetensors(order: _Order, path: Path, tick: Callable[[int], object]) -> None:
    from gockpt.cli.export_safetensors import items, write_directory, write_file

    checkpoint = order.contents.checkpoint
    names = order.contents.model_names()
    if order.only == "all":
        names = {name: name for name in checkpoint.names()}
    made = items(checkpoint, names)
    if order.out.name.endswith(".safetensors"):
        write_file(checkpoint, made, path, tick)
    else:
        write_directory(checkpoint, made, path, order.max_shard, tick)


def _write_torch(order: _Order, path: Path, tick: Callable[[int], object]) -> None:
    from gockpt import hostmemory
    from gockpt.cli.export_torch import whole_state, write_file

    there = hostmemory.available()
    if order.nbytes > there:
        raise ConfigError(
            f"--to torch needs {output.size(order.nbytes)} of memory, and {output.size(there)} are "
            "available; use --to safetensors or --to dcp"
        )
    checkpoint = order.contents.checkpoint
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.in_file_order(order.sources)}
    write_file(whole_state(order.contents, tensors.__getitem__, only=order.only), path, tick)


def _write_dcp(order: _Order, path: Path, tick: Callable[[int], object]) -> None:
    from gockpt import hostmemory
    from gockpt.cli.export_dcp import write_directory

    fits = order.nbytes < hostmemory.available() // 2
    write_directory(order.contents, path, tick, only=order.only, one_file=fits)


_WRITERS = {SAFETENSORS: _write_safetensors, TORCH: _write_torch, DCP: _write_dcp}


def _notes(order: _Order) -> list[str]:
    """What a user should know of what was not written."""
    notes = []
    extra = order.contents.model_extra
    if order.format == SAFETENSORS and extra:
        notes.append(f"left out, as they are no tensors: {', '.join(extra)}")
    if order.format == SAFETENSORS and order.only == "all":
        notes.append("left out, as they are no tensors: hyper-parameters and extras")
    return notes


def _choice(option: str, value: str, known: tuple[str, ...]) -> str:
    if value in known:
        return value
    hint = suggestion(value, known, cutoff=0.4)
    raise ConfigError(f"{option} {value!r} is unknown; {hint}")


def _bytes(text: str) -> int:
    """``5GB`` → 5 000 000 000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"--max-shard-size {text!r} is no size; write it like 5GB or 500MB")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))
