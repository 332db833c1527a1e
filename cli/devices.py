"""``gockpt devices``: where it can be trained, really or emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from gockpt.cli import options, output

if TYPE_CHECKING:
    from gockpt.devices import Profile


def devices(json: options.Json = None) -> None:
    """List the devices of this machine and the accelerators that can be emulated."""
    from gockpt.devices import load_profile, profile_names

    output.check_target(json)
    real = _real()
    emulated = [_emulated(load_profile(name)) for name in profile_names()]
    if json is not None:
        document = {"schema": 1, "kind": "devices", "real": real, "emulated": emulated}
        output.write_document(document, json)
    console = output.people(stderr=json == output.STDOUT)
    console.print(_real_table(real))
    console.print(_emulated_table(emulated))


def _real() -> list[dict[str, Any]]:
    import torch

    from gockpt import hostmemory

    found: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "title": f"{torch.get_num_threads()} threads",
            "memory_bytes": hostmemory.available(),
        }
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "title": about.name,
                "memory_bytes": int(about.total_memory),
            }
        )
    return found


def _emulated(profile: Profile) -> dict[str, Any]:
    from gockpt.devices.profiles import FIGURES

    figures = {
        name: {"value": getattr(profile, name), "source": profile.sources[name]} for name in FIGURES
    }
    return {
        "device": f"emulated:{profile.name}",
        "title": profile.title,
        "figures": figures,
        "calibrated_models": sorted(profile.models),
    }


def _real_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="On this machine", title_justify="left")
    table.add_column("device")
    table.add_column("what it is")
    table.add_column("memory", justify="right")
    for row in rows:
        table.add_row(row["device"], row["title"], output.size(row["memory_bytes"]))
    return table


def _emulated_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="Emulated: modelled figures, each with its source in --json",
        title_justify="left",
    )
    table.add_column("device", no_wrap=True)
    table.add_column("models")
    for name in ("FLOP/s", "memory", "link\nB/s", "SSD\nB/s", "replay\nparams/s"):
        table.add_column(name, justify="right")
    for row in rows:
        value = {name: figure["value"] for name, figure in row["figures"].items()}
        table.add_row(
            row["device"],
            row["title"],
            output.count(value["flops_achieved"]),
            output.size(value["device_memory_bytes"]),
            output.count(value["link_alone"]),
            output.count(value["ssd_write"]),
            output.count(value["host_replay"]),
        )
    return table
