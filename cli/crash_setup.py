"""Before the first trial of a crash test: every argument checked, the trials drawn.

Runs in the parent. What always holds: what cannot work is refused here, in one line, and nothing
has been created by then; the same seed draws the same trials.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gockpt.cli.bench_setup import check_directory, check_room
from gockpt.cli.crash_methods import PLAIN
from gockpt.cli.crash_sabotage import Sabotage, find
from gockpt.cli.crash_scenarios import QUICK, SCENARIOS, Scenario, chosen
from gockpt.cli.task import Task, resolve
from gockpt.errors import ConfigError, suggestion
from gockpt.strategies.policy import POLICIES, Policy

STEPS, INTERVAL, KEEP, WINDOWS = 24, 4, 3, 3
"""Of every trial: six checkpoints, each over three windows where the strategy has several."""

PACE = 0.05
"""Seconds that a pass takes at least on a CPU, so that there are moments to strike at."""

MARKER = ".gockpt-crash-test"
"""In a directory that crash tests may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for; None: choose for me."""

    scenario: str | None
    point: str | None
    strategies: str
    trials: int | None
    seed: int
    model: str
    device: str
    tokens: int | None
    quick: bool
    sabotage: str | None
    directory: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trial, as it can be asked for again."""

    scenario: Scenario
    point: str
    strategy: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A crash test that can be run."""

    task: Task
    note: str
    cases: tuple[Case, ...]
    strategies: tuple[str, ...]
    seed: int
    sabotage: Sabotage | None
    directory: Path | None
    quick: bool

    @property
    def pace(self) -> float:
        """Seconds that a pass takes at least."""
        return PACE if self.task.device == "cpu" else 0.0


def prepare(options: Options) -> Setup:
    """Check, resolve and draw.

    Raises:
        ConfigError, DeviceError: what cannot work, and what to do.
    """
    if options.trials is not None and options.trials < 1:
        raise ConfigError(f"--trials must be at least 1, not {options.trials}")
    sabotage = None if options.sabotage is None else find(options.sabotage)
    strategies = _strategies(options.strategies)
    cases = _cases(options, sabotage)
    task, note = resolve(
        model=options.model,
        device=options.device,
        tokens=options.tokens,
        precision=None,
        seed=options.seed,
    )
    directory = own_directory(options.directory)
    there = directory if directory is not None and directory.exists() else None
    check_room(task, there or Path(tempfile.gettempdir()), checkpoints=2 * (KEEP + 2))
    drawn = draw(cases, strategies, options.trials, options.seed)
    return Setup(
        task=task,
        note=note,
        cases=drawn,
        strategies=strategies,
        seed=options.seed,
        sabotage=sabotage,
        directory=directory,
        quick=options.quick,
    )


def _cases(options: Options, sabotage: Sabotage | None) -> Sequence[tuple[Scenario, str]]:
    if options.scenario is not None or options.point is not None:
        return chosen(options.scenario or "all", options.point)
    if sabotage is not None:
        return [(SCENARIOS[name], point) for name, point in sabotage.cases]
    if options.quick:
        return [(SCENARIOS[name], point) for name, point in QUICK]
    return chosen("all", None)


def draw(
    cases: Sequence[tuple[Scenario, str]],
    strategies: Sequence[str],
    trials: int | None,
    seed: int,
) -> tuple[Case, ...]:
    """The trials: every case with every strategy once, or as many as were asked for.

    Fewer than there are cases: a sample. More: further rounds, each with the next seed. So the
    first trial of its scenario, point and strategy alone is the same one.
    """
    once = [(one, point, strategy) for one, point in cases for strategy in strategies]
    number = len(once) if trials is None else trials
    chance = random.Random(seed)
    picked = []
    for first in range(0, number, len(once)):
        some = min(number - first, len(once))
        indices = sorted(chance.sample(range(len(once)), some))
        picked += [(*once[index], seed + first // len(once)) for index in indices]
    return tuple(Case(scenario=a, point=b, strategy=c, seed=d) for a, b, c, d in picked)


def _strategies(names: str) -> tuple[str, ...]:
    known = [*(name for name, one in POLICIES.items() if one.saves), PLAIN]
    if names.strip() == "all":
        return tuple(known)
    found = list(dict.fromkeys(one.strip() for one in names.split(",") if one.strip()))
    if not found:
        raise ConfigError(f"--strategies names none; choose from {', '.join(known)}")
    for name in found:
        if name not in known:
            hint = suggestion(name, known, otherwise="choose from")
            raise ConfigError(f"--strategies {name}: cannot be tested; {hint}")
    return tuple(found)


def policy_of(strategy: str) -> Policy | None:
    """gockpt's own strategy of that name; None: somebody else's method."""
    return POLICIES.get(strategy)


def own_directory(path: str | None) -> Path | None:
    """A directory that may be filled: new, empty, or one that an earlier crash test has made.

    Raises:
        ConfigError: it holds other data, or cannot be written.
    """
    if path is None:
        return None
    directory = Path(path)
    if not directory.exists():
        check_directory(directory.absolute().parent)
        return directory
    check_directory(directory)
    if any(directory.iterdir()) and not (directory / MARKER).is_file():
        raise ConfigError(
            f"--dir {directory}: it holds other data, which a crash test would damage; "
            "name a new or empty directory"
        )
    return directory
