"""How commands speak: tables for people, documents for programs, numbers with their units.

What always holds: with ``--json -`` stdout carries the document and nothing else, so everything for
people then goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from gockpt.errors import ConfigError

STDOUT = "-"
PLAIN_WIDTH = 120
"""Columns where there is no terminal to fit into (a log file, CI)."""


def people(*, stderr: bool = False) -> Console:
    """Where tables go."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def check_target(target: str | None) -> None:
    """Make sure, ahead of long work, that a document can be written there.

    Raises:
        ConfigError: it cannot.
    """
    if target is None or target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise ConfigError(f"--json {target}: that is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--json {target}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json {target}: cannot be written; name another file")


def write_document(document: Mapping[str, Any], target: str) -> None:
    """Write a JSON document to a file, or to stdout for ``-``.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {target}: {error.strerror}; name another file") from error


def seconds(value: float | None) -> str:
    """``1.234 s``, ``12.3 ms``, ``45 µs``; a dash for nothing."""
    if value is None:
        return "–"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    if abs(value) >= 0.1:
        return f"{value:.3f} s"
    if abs(value) >= 0.001:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} µs"


def size(value: float | None) -> str:
    """Bytes in decimal units, as disks and links are sold: ``84.3 MB``."""
    if value is None:
        return "–"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor:
            return (
                f"{value / factor:.3g} {unit}"
                if value < 1e3 * factor
                else f"{value / factor:.0f} {unit}"
            )
    return f"{value:.0f} B"


def count(value: float | None) -> str:
    """``1.32 G``, ``5.18 M``."""
    if value is None:
        return "–"
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{value * 100:.{digits}f} %"
