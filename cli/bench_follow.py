"""A bench as others see it while it runs: the table's view, and the database beside it.

Runs in the parent, on its main thread.
"""

from __future__ import annotations

from typing import Any

from gockpt.cli.bench_document import Outcome, Reference, environment, row, workload
from gockpt.cli.bench_job import Progress
from gockpt.cli.bench_run import View
from gockpt.cli.bench_setup import Setup
from gockpt.cli.follow import Follower


def beginning(setup: Setup) -> dict[str, Any]:
    """What is known of a bench before its first step."""
    return {
        "of": "bench",
        "environment": environment(setup.task),
        "workload": workload(setup),
        "strategies": list(setup.strategies),
        "results": [],
    }


class FollowedView:
    """See :class:`gockpt.cli.bench_run.View`; tells the follower whatever the table is told."""

    def __init__(self, view: View, setup: Setup, follower: Follower) -> None:
        self._view, self._setup, self._follower = view, setup, follower

    def progress(self, position: int | None, progress: Progress) -> None:
        self._view.progress(position, progress)
        name = "golden run" if position is None else self._setup.strategies[position]
        self._follower.show(
            {"progress": {"strategy": name, "stage": progress.stage,
                          "step": progress.step, "of": progress.of}}
        )  # fmt: skip

    def finished(self, outcomes: list[Outcome], against: Reference) -> None:
        self._view.finished(outcomes, against)
        rows = [row(self._setup, one, against) for one in outcomes]
        self._follower.show({"results": rows}, now=True)

    def note(self, line: str) -> None:
        self._view.note(line)

    def tick(self) -> None:
        self._view.tick()
        self._follower.show({})
