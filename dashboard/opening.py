"""The results, opened for one request, and what a page says where they cannot be read.

Used on the server's worker threads. What always holds: nothing is written, no database is made, no
wait is longer than :data:`BUSY_SECONDS`, and whatever is wrong with the file becomes one
:class:`Problem` with a title and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gockpt.errors import ConfigError, CorruptError, DeviceError, GockptError, StorageError
from gockpt.results import Store
from gockpt.results.database import NoResultsError, SchemaError

BUSY_SECONDS = 3.0
"""A page is waited for by a person."""


class Problem(Exception):
    """Why there is nothing to show: for a person, with the status for a program."""

    def __init__(self, status: int, title: str, message: str, command: str | None = None) -> None:
        """
        Args:
            command: what to run, where a command helps.
        """
        super().__init__(message)
        self.status, self.title, self.message, self.command = status, title, message, command


@contextmanager
def opened(path: Path) -> Iterator[Store]:
    """The results, to be read.

    Raises:
        Problem: they cannot be read, or what is asked for is not there.
    """
    try:
        with Store(path, read_only=True, busy_s=BUSY_SECONDS) as store:
            yield store
    except GockptError as error:
        raise problem_of(error) from error


def problem_of(error: GockptError) -> Problem:
    """What a page says of an error."""
    text = str(error)
    if isinstance(error, NoResultsError):
        return Problem(404, "No results yet", text, "gockpt bench --model gpt-tiny")
    if isinstance(error, SchemaError):
        return Problem(409, "Results of another version", text)
    if isinstance(error, ConfigError | DeviceError):
        return Problem(404, "Not there", text)
    if isinstance(error, CorruptError):
        return Problem(500, "The results are damaged", text)
    if isinstance(error, StorageError) and "another process holds" in text:
        return Problem(503, "The results are in use", text)
    return Problem(500, "The results cannot be read", text)
