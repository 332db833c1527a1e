"""Opening the results database: SQLite in WAL mode, of a schema that this version knows.

Used by :class:`gockpt.results.store.Store`, from any thread. What always holds: a file that is not
ours is never changed, writers take the write lock when they begin (so they wait for one another
instead of failing half-way), every wait for a lock ends after :data:`BUSY_SECONDS`, and whatever
SQLite says becomes one of gockpt's errors with the path in it.
"""

from __future__ import annotations

import functools
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, inspect
from sqlalchemy.exc import DBAPIError
from sqlmodel import Session

from gockpt.errors import ConfigError, CorruptError, GockptError, SpaceError, StorageError
from gockpt.results.models import SCHEMA_VERSION, Base, Meta

BUSY_SECONDS = 10.0
"""How long to wait for another process that is writing."""


class NoResultsError(ConfigError):
    """There is nothing to read yet."""


class SchemaError(ConfigError):
    """Results of another version of gockpt."""


class Database:
    """An open results database; hands out sessions."""

    def __init__(
        self, path: str | Path, *, read_only: bool = False, busy_s: float | None = None
    ) -> None:
        """Open the database, making it and its directory if they do not exist.

        Args:
            read_only: change nothing and make nothing; there must be results already.
            busy_s: seconds to wait for another process that is writing; None: the usual.

        Raises:
            ConfigError: another program's database, one of another schema version, or (to be read
                only) none at all.
            CorruptError: not a database, or a damaged one.
            StorageError: it cannot be opened or made.
        """
        self.path = Path(path)
        busy_s = BUSY_SECONDS if busy_s is None else busy_s
        self._engine = self._reader(busy_s) if read_only else self._writer(busy_s)
        try:
            with self.reading() if read_only else self.writing() as session:
                self._check_schema(session, read_only)
            if not read_only:
                self._use_write_ahead_log()
        except GockptError:
            self.close()
            raise

    def _writer(self, busy_s: float) -> Engine:
        self._make_directory()
        url = URL.create("sqlite", database=str(self.path))
        return _listened(create_engine(url, connect_args={"timeout": busy_s}))

    def _reader(self, busy_s: float) -> Engine:
        if not self.path.is_file():
            raise NoResultsError(f"{self.path}: there are no results yet; run `gockpt bench` first")
        # A log of changes is shared through a file beside the database, which SQLite makes where
        # there is none. Where it cannot, nobody can write, and the file is all there is.
        log = self.path.with_name(f"{self.path.name}-wal")
        fixed = not os.access(self.path.parent, os.W_OK) and not log.exists()
        uri = f"{self.path.absolute().as_uri()}?mode=ro{'&immutable=1' if fixed else ''}"
        return _reading_engine(uri, busy_s)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that sees one state of the database throughout."""
        with self._session(immediate=False) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session that is committed at the end of the body, or rolled back if it raises."""
        with self._session(immediate=True) as session:
            yield session
            session.commit()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def _session(self, *, immediate: bool) -> Iterator[Session]:
        try:
            with self._engine.connect() as connection:
                options = connection.execution_options(immediate=immediate)
                with Session(options, expire_on_commit=False) as session:
                    yield session
        except DBAPIError as error:
            raise _translate(error, self.path) from error
        except json.JSONDecodeError as error:
            message = (
                f"{self.path}: a row is damaged ({error}); move the file away, or name another"
            )
            raise CorruptError(message, path=self.path) from error

    def _make_directory(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self.path.parent}: cannot make the directory of the results "
                f"({error.strerror}); name another place",
                path=self.path,
                errno=error.errno,
            ) from error

    def _use_write_ahead_log(self) -> None:
        """Let readers go on while another process writes. The mode stays in the file."""
        connection = self._engine.raw_connection()
        try:
            # Busy: another process is using the file. Then that one switches, or the next to open.
            with suppress(sqlite3.OperationalError):
                connection.cursor().execute("PRAGMA journal_mode=WAL").close()
        finally:
            connection.close()

    def _check_schema(self, session: Session, read_only: bool) -> None:
        tables = set(inspect(session.connection()).get_table_names())
        if not tables and read_only:
            raise NoResultsError(f"{self.path}: an empty file; run `gockpt bench` first")
        if not tables:
            Base.metadata.create_all(session.connection())
            session.add(Meta(key="schema_version", value=str(SCHEMA_VERSION)))
            return
        if not {"meta", "runs"} <= tables:
            raise ConfigError(
                f"{self.path}: a database of another program; name another file for the results"
            )
        found = session.get(Meta, "schema_version")
        if found is None or found.value != str(SCHEMA_VERSION):
            version = "unknown" if found is None else found.value
            raise SchemaError(
                f"{self.path}: results of schema version {version}, this gockpt reads version "
                f"{SCHEMA_VERSION}; use the gockpt that wrote them, or name another file"
            )


@functools.lru_cache(maxsize=8)
def _reading_engine(uri: str, busy_s: float) -> Engine:
    """Kept when it is closed, as it knows the queries that it has compiled; connections are not."""
    return _listened(
        create_engine(
            "sqlite://",
            creator=lambda: sqlite3.connect(uri, uri=True, timeout=busy_s, check_same_thread=False),
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=-1,
        )
    )


def _listened(engine: Engine) -> Engine:
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin in _begin, not behind our back
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA synchronous=NORMAL")


def _begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _translate(error: DBAPIError, path: Path) -> StorageError:
    """SQLite's complaint as one of ours."""
    reason = error.orig
    code = getattr(reason, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        message = f"{path}: another process holds the results ({reason}); try again"
        return StorageError(message, path=path)
    if primary == sqlite3.SQLITE_FULL:
        message = f"{path}: no room for the results ({reason}); free some, or name another file"
        return SpaceError(message, path=path)
    if primary in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        message = f"{path}: no readable results ({reason}); move it away, or name another file"
        return CorruptError(message, path=path)
    message = f"{path}: the results cannot be read or written ({reason}); name another file"
    return StorageError(message, path=path)
