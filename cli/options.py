"""Options that several commands share, so that one name means one thing."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="What to train; see `gockpt models`.")]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda[:N] or emulated:PROFILE; see `gockpt devices`.")
]
Tokens = Annotated[int | None, typer.Option(help="Tokens of a step.", show_default="the model's")]
Precision = Annotated[
    str | None, typer.Option(help="fp32 or bf16-master.", show_default="the model's")
]
Windows = Annotated[
    int | None, typer.Option(help="Force this many windows.", show_default="as planned")
]
Seed = Annotated[int, typer.Option(help="Of weights and data.")]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Text to train on.", show_default="the standard library's sources"
    ),
]
ProfileFile = Annotated[
    str | None, typer.Option(metavar="TOML", help="An emulation profile of your own.")
]
Volumes = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        metavar="DIR",
        help="A directory on a disk of its own that images are divided over; may be repeated.",
    ),
]
Json = Annotated[
    str | None, typer.Option(metavar="FILE|-", help="Write it as JSON too (-: to stdout).")
]
