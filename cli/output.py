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
from gockpt.units import count, percent, seconds, size

__all__ = [
    "PLAIN_WIDTH",
    "STDOUT",
    "check_target",
    "count",
    "people",
    "percent",
    "seconds",
    "size",
    "write_document",
]

STDOUT = "-"
PLAIN_WIDTH = 120
"""Columns where there is no terminal to fit into (a log file, CI)."""


def people(*, stderr: bool = False) -> Console:
    """Where tables go."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def check_target(target: str | None, *, option: str = "--json") -> None:
    """Make sure, ahead of long work, that a document can be written there.

    Raises:
        ConfigError: it cannot.
    """
    if target is None or target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise ConfigError(f"{option} {target}: that is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {target}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {target}: cannot be written; name another file")


def write_document(document: Mapping[str, Any], target: str) -> None:
    """Write a JSON document to a file, or to stdout for ``-``.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", target)


def write_text(text: str, target: str, *, option: str = "--json") -> None:
    """Write a text to a file, or to stdout for ``-``.

    Raises:
        ConfigError: the file cannot be written.
    """
    if target == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {target}: {error.strerror}; name another file") from error
