"""How far a run has come, in the results database, for those who look at it from elsewhere.

Runs in the parent of a bench or crash test, on its main thread. What always holds: the database is
written at most once in :data:`SECONDS` but when a row is finished, a database that cannot be
written never harms the run, and nothing of this is left when the run has ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any

from gockpt.errors import GockptError
from gockpt.results import Store

SECONDS = 1.0
"""Between two writings: each takes about a millisecond from a core under test."""

FORGOTTEN = timedelta(hours=1)
"""What is left of a run that was killed is removed by the next one after this time."""


class Follower:
    """Shows one run while it is being made. Used in a ``with`` statement."""

    def __init__(self, store: Store, document: Mapping[str, Any]) -> None:
        """
        Args:
            document: what is known of the run from the start.
        """
        now = datetime.now(UTC)
        self._store = store
        self._shown = 0.0
        self._document = {
            **document,
            "run_id": f"live-{now:%Y%m%d-%H%M%S-%f}",
            "created": now.isoformat(timespec="seconds"),
        }

    def show(self, part: Mapping[str, Any], *, now: bool = False) -> None:
        """Add or replace parts of the document.

        Args:
            now: write it at once; else when the last writing is old enough.
        """
        self._document.update(part)
        if now or time.monotonic() - self._shown >= SECONDS:
            self._shown = time.monotonic()
            updated = datetime.now(UTC).isoformat(timespec="seconds")
            with suppress(GockptError):
                self._store.show_live({**self._document, "updated": updated})

    def __enter__(self) -> Follower:
        with suppress(GockptError):
            old = (datetime.now(UTC) - FORGOTTEN).isoformat(timespec="seconds")
            for run in self._store.live():
                if str(run.config.get("updated", "")) < old:
                    self._store.end_live(run.run_id)
        self.show({}, now=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(GockptError):
            self._store.end_live(str(self._document["run_id"]))
