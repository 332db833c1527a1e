"""``gockpt models``: what there is to train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from gockpt.cli import options, output

if TYPE_CHECKING:
    from gockpt.workloads import Preset


def models(json: options.Json = None) -> None:
    """List the models, in their true sizes and as they are emulated."""
    from gockpt.workloads import PRESETS

    output.check_target(json)
    rows = [_row(preset) for preset in PRESETS.values()]
    if json is not None:
        output.write_document({"schema": 1, "kind": "models", "models": rows}, json)
    output.people(stderr=json == output.STDOUT).print(_table(rows))


def _row(preset: Preset) -> dict[str, Any]:
    from gockpt.workloads import find_precision, param_count, shrunk

    number = find_precision(preset.precision)
    small = preset if preset.shrink == 1 else shrunk(preset)
    return {
        "name": preset.name,
        "family": preset.family,
        "layers": preset.layers,
        "d_model": preset.d_model,
        "vocab": preset.vocab,
        "context": preset.context,
        "params": param_count(preset),
        "precision": preset.precision,
        "tokens_per_step": preset.tokens,
        "state_bytes": param_count(preset) * number.state_bytes,
        "shrink": preset.shrink,
        "emulated_params": param_count(small),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption="Emulated: what is really trained on emulated:…")
    table.caption_justify = "left"
    table.add_column("model")
    for name in ("family", "layers", "width", "parameters", "state", "tokens\na step"):
        table.add_column(name, justify="left" if name == "family" else "right")
    table.add_column("precision")
    table.add_column("emulated", justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            row["family"],
            str(row["layers"]),
            str(row["d_model"]),
            output.count(row["params"]),
            output.size(row["state_bytes"]),
            f"{row['tokens_per_step']:,}",
            row["precision"],
            output.count(row["emulated_params"]),
        )
    return table
