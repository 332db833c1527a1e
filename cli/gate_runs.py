"""The documents that the gate compares: a run of the database, a baseline's name, or a file.

And where its verdict is kept. What always holds: a document that comes back is of a kind and schema
that this version knows, with the lists that the gate goes through; and no database is made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gockpt.cli.database import database_path
from gockpt.errors import ConfigError, GockptError
from gockpt.results import DOCUMENT_SCHEMA, Store

KINDS = ("bench", "crash-test")
LARGEST = 64 << 20
"""Bytes of a file that is read; documents have a few thousand."""

Json = dict[str, Any]


def find_run(reference: str, db: str | None) -> Json:
    """The document of a run: ``latest``, a run's id (or a unique beginning), or a file.

    Raises:
        ConfigError: there is none, or it is no document of a bench or crash test.
    """
    if _is_file(reference):
        return read(Path(reference))
    with open_existing(db) as store:
        return checked(store.document(reference), f"run {reference}")


def find_baseline(reference: str, db: str | None) -> Json:
    """The document to compare with: a file, a baseline's name, or a run as above.

    Raises:
        ConfigError: there is none, or it is no document of a bench or crash test.
    """
    if _is_file(reference):
        return read(Path(reference))
    with open_existing(db) as store:
        if any(one.name == reference for one in store.baselines()):
            return checked(store.baseline(reference).document, f"baseline {reference}")
        try:
            return checked(store.document(reference), f"run {reference}")
        except ConfigError as error:
            names = ", ".join(one.name for one in store.baselines()) or "none"
            raise ConfigError(f"{error}; of baselines there are {names}") from error


def open_existing(db: str | None) -> Store:
    """The results database, to be read; it must be there.

    Raises:
        ConfigError: it is not.
    """
    path = database_path(db)
    if not path.is_file():
        raise ConfigError(f"{path}: no results database; run `gockpt bench` first, or give --db")
    return Store(path, read_only=True)


def keep(verdict: Json, judged: Json, db: str | None) -> str | None:
    """Keep a verdict in the results database, if there is one.

    Returns:
        What became of it, for people; None where there is no database.
    """
    try:
        path = database_path(db)
        if not path.is_file():
            return None
        with Store(path) as store:
            return f"Kept as {store.add_gate(verdict, judged)} in {path}."
    except GockptError as error:  # what was found holds all the same
        return f"note: the verdict is not kept: {error}"


def read(path: Path) -> Json:
    """A document that ``--json`` or ``baseline export`` wrote.

    Raises:
        ConfigError: it cannot be read, or is no such document.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"{path}: too large for a document; name one of `bench --json`")
        document = json.loads(path.read_bytes(), parse_float=_finite, parse_constant=_finite)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a document of `bench --json`") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); name one of `bench --json`") from error
    return checked(document, str(path))


def _finite(text: str) -> float:
    """What JSON has: no NaN, and nothing that is infinite here."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number


def checked(document: object, what: str) -> Json:
    """The document, if it has the parts that the gate needs.

    Raises:
        ConfigError: it has not; ``what`` is how the user knows it.
    """
    if not isinstance(document, dict) or document.get("kind") not in KINDS:
        raise ConfigError(f"{what}: not a document of bench or crash-test; name another one")
    if document.get("schema") != DOCUMENT_SCHEMA or not isinstance(document.get("run_id"), str):
        raise ConfigError(
            f"{what}: a document of schema {document.get('schema')!r}, and this gockpt knows "
            f"schema {DOCUMENT_SCHEMA}; make it again"
        )
    if document["kind"] == "bench" and not _are_rows(document.get("results")):
        raise ConfigError(f"{what}: its results are not a list of rows; make it again")
    for name in ("environment", "workload", "summary"):
        if not isinstance(document.get(name) or {}, Mapping):
            raise ConfigError(f"{what}: its {name} has no fields; make it again")
    return document


def _are_rows(results: object) -> bool:
    return isinstance(results, list) and all(
        isinstance(row, dict)
        and isinstance(row.get("strategy"), str)
        and isinstance(row.get("problems", []), list)
        and isinstance(row.get("samples", {}), dict)
        and all(isinstance(values, list) for values in row.get("samples", {}).values())
        for row in results
    )


def _is_file(reference: str) -> bool:
    """Whether it names a file: ids and names of baselines have no dot or slash."""
    return "/" in reference or reference.endswith(".json") or Path(reference).is_file()
