"""One trial: its place on the disk, its lives, and what is known about it in the end.

Runs in the parent, on its main thread. What always holds: when a :class:`Trial` was closed, none of
its processes runs.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gockpt.cli.crash_job import Golden, Job
from gockpt.cli.crash_leftovers import LEAVE, Mark, left_in, left_in_checkpoints
from gockpt.cli.crash_process import Life
from gockpt.cli.crash_setup import INTERVAL, KEEP, STEPS, WINDOWS, Case, Setup, policy_of
from gockpt.storage import scan

LIFE = 240.0
"""Seconds that a life may take."""


class Skipped(Exception):
    """The scenario did not reach its point; the reason is the message."""


@dataclass(slots=True, kw_only=True)
class Facts:
    """What has happened in a trial."""

    injected_step: int | None = None
    injected_at: float | None = None
    promised: int | None = None
    """The newest step that must be there: committed before, or undamaged."""
    lost_most: int | None = None
    """Steps that may be lost; None: nothing is promised."""
    restarted: bool = True
    may_fail: bool = False
    """Whether checkpoints of the first life may have failed, as they were made to."""
    recurs_at: int | None = None
    """The step whose checkpoint may fail again in any life that makes it again."""
    must_break: tuple[str, ...] = ()
    """Exceptions of which one must end the first life."""
    detect_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Trial:
    """A trial in progress. Used in a ``with`` statement."""

    def __init__(self, setup: Setup, case: Case, golden: Path, place: Path) -> None:
        self.setup, self.case, self.place = setup, case, place
        self.policy = policy_of(case.strategy)
        self.chance = random.Random(
            f"{case.seed}/{case.scenario.name}/{case.point}/{case.strategy}"
        )
        self.golden_path = golden
        self.golden = msgspec.json.decode(golden.read_bytes(), type=Golden)
        self.facts = Facts()
        self.lives: list[Life] = []
        self.mark = Mark()
        self.directory = place / "disk" / "checkpoints"
        self.scratch = place / "scratch"
        self.tier: Path | None = None
        for path in (self.directory.parent, self.scratch):
            path.mkdir(parents=True)

    # -- lives -------------------------------------------------------------------------------------

    @property
    def windows(self) -> int:
        """Windows of each checkpoint."""
        several = self.policy is not None and self.policy.max_windows > 1
        return WINDOWS if several else 1

    def live(self, **changes: Any) -> Life:
        """Start a trainer."""
        sabotage = self.setup.sabotage
        job = Job(
            **{
                **msgspec.structs.asdict(self.setup.task),
                "seed": self.case.seed,
                "strategy": self.case.strategy,
                "steps": STEPS,
                "interval": INTERVAL,
                "keep": KEEP,
                "windows": self.windows,
                "directory": str(self.directory),
                "golden": str(self.golden_path),
                "environment": {**self.mark.environ(), "TMPDIR": str(self.scratch)},
                "log": str(self.place / f"life-{len(self.lives) + 1}.log"),
                "tier": None if self.tier is None else str(self.tier),
                "slow_link": sabotage is not None and sabotage.slow_link,
                **changes,
            }
        )
        if sabotage is not None:
            job = msgspec.structs.replace(
                job,
                trainer_faults=(*job.trainer_faults, *sabotage.faults("trainer")),
                agent_faults=(*job.agent_faults, *sabotage.faults("agent")),
            )
        life = Life(job, self.mark)
        self.lives.append(life)
        return life

    def finish(self, **changes: Any) -> Life:
        """The last life: train to the end, undisturbed."""
        life = self.live(**changes)
        life.until_over(LIFE)
        return life

    # -- striking ----------------------------------------------------------------------------------

    def moment(self, life: Life, earliest: int = INTERVAL + 1, latest: int = STEPS - 2) -> None:
        """Wait for a random moment of a life.

        Raises:
            Skipped: it ended before.
        """
        step = self.chance.randint(earliest, latest)
        part = self.chance.random()
        if not life.until(lambda: life.step >= step, LIFE):
            raise Skipped(f"the trainer had ended before step {step}: {why(life)}")
        until = time.monotonic() + part * (life.job.pace or 0.1)
        while time.monotonic() < until:
            life.poll(0.002)

    def strike(self, life: Life) -> None:
        """Now it happens: note what is promised by now."""
        life.poll(0)
        self.facts.injected_at = time.time()
        self.facts.injected_step = life.step
        self.promise(self.newest())

    def promise(self, step: int | None) -> None:
        """This step must be there after the restart."""
        if step is not None:
            self.facts.promised = max(step, self.facts.promised or 0)

    def newest(self) -> int | None:
        """The newest checkpoint of the directory, by its manifests."""
        if not self.directory.is_dir() or self.policy is None:
            return None
        return next((one.step for one in scan(self.directory) if one.problem is None), None)

    def kill(self, life: Life, *, agents: bool = True, apart: float = 0.0) -> None:
        """SIGKILL to the trainer, then to its agents, and wait until they are gone."""
        sent = time.time()
        life.send(signal.SIGKILL)
        life.until_over(LIFE)
        self.facts.detect_s += max(0.0, (life.died_at or sent) - sent)
        if life.durable:
            self.promise(max(life.durable))
        if agents:
            time.sleep(apart)
            self.mark.end()

    def gone(self) -> None:
        """Wait until no process is left, as a new trainer finds the directory locked else."""
        for process in self.mark.wait_gone(LEAVE):
            self.facts.problems.append(f"process {process.pid} did not leave")
            process.kill()

    # -- the end -----------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """What is left behind, after the last life has ended well."""
        left = [f"process {one.pid} still runs" for one in self.mark.wait_gone(LEAVE)]
        if self.policy is not None:
            left += left_in_checkpoints(self.directory, KEEP)
            if self.tier is not None:
                left += left_in_checkpoints(self.tier, None)
        return left + left_in(self.scratch)

    def close(self, *, keep_logs: bool) -> None:
        """End everything, and remove what was written."""
        for life in self.lives:
            life.close()
        self.mark.end()
        for path in (self.directory.parent, self.scratch):
            shutil.rmtree(path, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(self.place, ignore_errors=True)


def why(life: Life) -> str:
    """Why a life ended."""
    if life.broke is not None:
        return f"{life.broke.kind}: {life.broke.reason}"
    return f"at step {life.step}" if life.ended is not None else "it died"


Act = Callable[[Trial], None]
"""What a scenario does: from the first life to the last one's end."""


def tail(path: Path, lines: int = 15) -> list[str]:
    """The last lines of a log."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return []
