"""A crash test as others see it while it runs: the table's view, and the database beside it.

Runs in the parent, on its main thread.
"""

from __future__ import annotations

from typing import Any

from gockpt.cli.crash_document import Outcome, environment, workload
from gockpt.cli.crash_run import View
from gockpt.cli.crash_setup import Case, Setup
from gockpt.cli.follow import Follower


def beginning(setup: Setup) -> dict[str, Any]:
    """What is known of a crash test before its first trial."""
    return {
        "of": "crash-test",
        "environment": environment(setup),
        "workload": workload(setup),
        "cases": len(setup.cases),
        "trials": [],
    }


class FollowedView:
    """See :class:`gockpt.cli.crash_run.View`; tells the follower whatever the table is told."""

    def __init__(self, view: View, follower: Follower) -> None:
        self._view, self._follower = view, follower
        self._trials: list[dict[str, Any]] = []

    def golden(self) -> None:
        self._view.golden()
        self._follower.show({"progress": {"stage": "the uninterrupted run"}})

    def begins(self, case: Case) -> None:
        self._view.begins(case)
        stage = f"{case.scenario.name} at {case.point}"
        self._follower.show({"progress": {"strategy": case.strategy, "stage": stage}}, now=True)

    def ended(self, outcome: Outcome) -> None:
        self._view.ended(outcome)
        self._trials.append(outcome.row)
        self._follower.show({"trials": self._trials}, now=True)
