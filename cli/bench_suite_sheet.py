"""A table of a suite, for a terminal and for Markdown. Pure.

What always holds: a sheet of an emulated device says so in each row and below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from gockpt.cli.gate_output import cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Texts in rows and columns."""

    title: str
    columns: tuple[str, ...]
    left: int
    """How many columns, from the first, hold words; the others hold figures."""
    rows: list[list[str]]
    valid: list[bool]
    """Of each row: whether its figures count."""
    notes: list[str] = field(default_factory=list)


def times(environment: dict[str, object]) -> str:
    """What a row says of its times."""
    return "emulated" if environment["emulated"] else "measured"


def labelled(environment: dict[str, object]) -> list[str]:
    """What stands below a sheet of an emulated device."""
    if not environment["emulated"]:
        return []
    return [
        f"Emulated by the profile {environment['profile']}: times model that hardware and were not "
        "measured on it; bytes are of the shrunk model unless predicted."
    ]


def table(sheet: Sheet) -> Table:
    """For a terminal; rows that do not count are red."""
    body = Table(
        title=sheet.title,
        title_justify="left",
        caption=" ".join(sheet.notes),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for number, name in enumerate(sheet.columns):
        body.add_column(name, justify="left" if number < sheet.left else "right")
    for row, valid in zip(sheet.rows, sheet.valid, strict=True):
        body.add_row(*row, style=None if valid else "red")
    return body


def markdown(sheets: Sequence[Sheet]) -> str:
    """For a document; what does not count is marked."""
    return "\n".join(line for sheet in sheets for line in _lines(sheet)).rstrip() + "\n"


def _lines(sheet: Sheet) -> list[str]:
    marks = [" --- |" if number < sheet.left else " ---: |" for number in range(len(sheet.columns))]
    lines = [f"**{sheet.title}**", "", _row(sheet.columns), "|" + "".join(marks)]
    for row, valid in zip(sheet.rows, sheet.valid, strict=True):
        lines.append(_row(row if valid else [row[0], f"{row[1]} (invalid)", *row[2:]]))
    return [*lines, "", *sheet.notes, ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"
