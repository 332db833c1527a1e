"""``gockpt inspect``: what is in a checkpoint, how it came about, and where each byte lies."""

from __future__ import annotations

import difflib
import fnmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gockpt.cli import checkpoints, options, output
from gockpt.errors import ConfigError

if TYPE_CHECKING:
    from gockpt.contents import Contents
    from gockpt.storage import Checkpoint

_EXTENTS = 8
"""Most extents listed for people; the document has all."""
_GROUPS = 6


def inspect(
    path: checkpoints.Which,
    step: checkpoints.Step = None,
    tensor: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Tensors of these names, and where their bytes lie."),
    ] = None,
    volume: checkpoints.Volumes = None,
    json: options.Json = None,
) -> None:
    """Show what is in a checkpoint: tensors, optimizer groups, extras, and how it was taken.

    --tensor 'model.*.bias' lists tensors with the bytes of the file that hold them; a name that
    fits one tensor shows its values and the hashes that cover it too.
    """
    from gockpt.cli.inspect_facts import facts, own_names, tensor_facts, values
    from gockpt.contents import contents

    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    found = contents(checkpoints.open_one(path, step, volume))
    checkpoint = found.checkpoint
    names = own_names(checkpoint) if tensor is None else _matching(checkpoint, tensor)
    known = facts(found)
    listed = [tensor_facts(checkpoint, name) for name in names]
    if tensor is not None and len(listed) == 1:
        listed[0]["values"] = values(checkpoint.tensor(names[0]))
        _show_one(console, known, listed[0])
    elif tensor is not None:
        _show_list(console, known, listed)
    else:
        _show_all(console, known, found)
    if json is not None:
        document = {"schema": 1, "kind": "inspect", **known, "tensors": listed}
        output.write_document(document, json)


def _matching(checkpoint: Checkpoint, glob: str) -> list[str]:
    """The tensors that have a name like this.

    Raises:
        ConfigError: there are none.
    """
    fits = [name for name in checkpoint.names() if fnmatch.fnmatchcase(name, glob)]
    if not fits:
        near = difflib.get_close_matches(glob, checkpoint.names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "'*' lists them all"
        raise ConfigError(f"--tensor {glob!r} fits no tensor of step {checkpoint.step}; {hint}")
    return list(dict.fromkeys(checkpoint.record(name).name for name in fits))


# -- the whole -------------------------------------------------------------------------------------


def _show_all(console: Console, known: dict[str, Any], found: Contents) -> None:
    _show_origin(console, known)
    console.print(_tree(found))
    console.print(_sizes(known["bytes"]))
    _show_optimizer(console, known, found)
    _show_extras(console, known["extras"])


def _show_origin(console: Console, known: dict[str, Any]) -> None:
    created = known["created"][:19].replace("T", " ")
    lines = [
        ("path", known["path"]),
        ("step", f"{known['step']} (checkpoint number {known['sequence']}), {created} UTC"),
        *(("file", _file(file)) for file in known["files"]),
        ("run", f"{known['run_id']}, launch {known['launch_id']}, {_ranks(known['world_size'])}"),
        ("taken by", _taken(known)),
        ("proof", _proof(known["proof"])),
    ]
    if known["fallback"] is not None:
        lines.insert(-1, ("fallback", known["fallback"]))
    console.print(_pairs(lines))


def _file(file: dict[str, Any]) -> str:
    size = output.size(file["bytes"])
    return f"{file['name']}, {size}, tensors from byte {file['data_start']:,} on"


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _taken(known: dict[str, Any]) -> str:
    windows, recipe = known["windows"], known["recipe"]
    text = f"{known['strategy']}, {windows} window{'s' * (windows != 1)}"
    if windows > 1:
        text += f" from step {known['base']} on"
    updates, replayed = recipe.get("updates"), recipe.get("replayed")
    if updates and replayed:
        text += f"; {updates} update{'s' * (updates != 1)} replayed, {replayed:,} elements in all"
    return text


def _proof(proof: dict[str, Any]) -> str:
    outcome = str(proof.get("outcome", "off"))
    figures = []
    if proof.get("runs"):
        figures.append(f"{proof['runs']:,} runs of 512 words compared")
        figures.append(f"{proof.get('different', 0):,} sampled words differ")
    if proof.get("detail"):
        figures.append(str(proof["detail"]))
    return outcome + (f": {', '.join(figures)}" if figures else "")


def _tree(found: Contents) -> Table:
    from gockpt.cli.inspect_tree import rows

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("tensor", no_wrap=True, overflow="ellipsis")
    table.add_column("shape", justify="right", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("state", justify="right", no_wrap=True)
    for row in rows(found):
        whole = not row.dtype
        state = output.size(row.state_bytes) if row.state_bytes else ""
        size = output.size(row.nbytes)
        style = "bold" if not row.label.startswith(("├", "└", "│", " ")) else "dim" * whole
        table.add_row(Text(row.label), row.shape, row.dtype, size, state, style=style or None)
    return table


def _sizes(nbytes: dict[str, int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("of the files")
    table.add_column("size", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for name, count in nbytes.items():
        share = output.percent(count / max(1, nbytes["total"]))
        style = "bold" if name == "total" else None
        table.add_row(name, output.size(count), f"{count:,}", share, style=style)
    return table


def _show_optimizer(console: Console, known: dict[str, Any], found: Contents) -> None:
    from gockpt.cli.inspect_tree import state_kinds

    for text, count in state_kinds(found):
        console.print(Text(f"optimizer state of {count} parameters: {text}"))
    groups = known["groups"]
    if not groups:
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("option", no_wrap=True)
    for number, group in enumerate(groups[:_GROUPS]):
        name = f"{group['optimizer']} " if group["optimizer"] else ""
        table.add_column(f"{name}group {number}", justify="right", overflow="fold")
    table.add_row("parameters", *(str(len(group["params"])) for group in groups[:_GROUPS]))
    for option in dict.fromkeys(key for group in groups for key in group["options"]):
        cells = (_brief(group["options"].get(option)) for group in groups[:_GROUPS])
        table.add_row(Text(option), *(Text(cell) for cell in cells))
    console.print(table)
    if len(groups) > _GROUPS:
        console.print(f"  and {len(groups) - _GROUPS} more groups; --json has them all")


def _show_extras(console: Console, extras: Any) -> None:
    if isinstance(extras, str):
        console.print(Text(f"extras: {extras}"), style="red")
        return
    lines = [(name, _brief(value, 400)) for name, value in extras.items()]
    if lines:
        console.print(Text("extras"), style="bold")
        console.print(_pairs(lines))


def _brief(value: Any, limit: int = 60) -> str:
    """A value of JSON in one line."""
    if isinstance(value, dict):
        text = ", ".join(f"{key} {_brief(item)}" for key, item in value.items())
    elif isinstance(value, list):
        text = f"[{', '.join(_brief(item) for item in value[:8])}{', …' * (len(value) > 8)}]"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _pairs(lines: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(Text(f" {name}"), Text(text))
    return table


# -- tensors ---------------------------------------------------------------------------------------


def _show_list(console: Console, known: dict[str, Any], listed: list[dict[str, Any]]) -> None:
    from gockpt.cli.inspect_facts import shape_text

    table = Table(box=box.SIMPLE_HEAD, title=f"step {known['step']}", title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", justify="right")
    table.add_column("dtype", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    several = len(known["files"]) > 1
    for one in listed:
        places = [
            f"{place['file']} " * several + f"{place['start']:,} – {place['stop']:,}"
            for place in one["places"]
        ]
        table.add_row(
            Text(" = ".join((one["name"], *one["aliases"]))),
            shape_text(one["shape"]),
            one["dtype"],
            "\n".join(places) or "none",
        )
    console.print(table)
    if not several:
        console.print(f"  bytes of {known['files'][0]['name']}, counted from its start")


def _show_one(console: Console, known: dict[str, Any], one: dict[str, Any]) -> None:
    from gockpt.cli.inspect_facts import shape_text

    found = one["values"]
    lines = [
        ("tensor", one["name"]),
        ("of step", str(known["step"])),
        ("dtype", one["dtype"]),
        ("shape", shape_text(one["shape"])),
        ("size", f"{output.size(one['bytes'])} ({one['bytes']:,} bytes)"),
    ]
    if one["aliases"]:
        lines.insert(1, ("tied with", ", ".join(one["aliases"])))
    if one["order"] != sorted(one["order"]):
        order = ", ".join(map(str, one["order"]))
        lines.append(("in memory", f"dimensions from the outermost: {order}"))
    numbers = ", ".join(f"{key} {_brief(found[key])}" for key in ("min", "max", "mean", "nan"))
    lines.append(("values", numbers))
    lines.append(("first", "  ".join(_brief(value) for value in found["first"]) or "none"))
    console.print(_pairs(lines))
    for place in one["places"]:
        console.print(_place(place))


def _place(place: dict[str, Any]) -> Table:
    where = f"bytes {place['start']:,} to {place['stop']:,} of {place['file']}"
    table = Table(box=box.SIMPLE_HEAD, title=where, title_justify="left", title_style="")
    table.add_column("extent", justify="right", no_wrap=True)
    table.add_column("xxh3-128", no_wrap=True)
    extents = place["extents"]
    for extent in extents[:_EXTENTS]:
        table.add_row(f"{extent['start']:,} – {extent['stop']:,}", extent["xxh3"])
    if len(extents) > _EXTENTS:
        table.add_row(f"and {len(extents) - _EXTENTS} more", "(--json has them all)")
    return table
