"""Before the first step of a bench: every argument checked, everything resolved, room made sure of.

Runs in the parent. What always holds: what cannot work is refused here, in one line with numbers,
and nothing has been created by then.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gockpt import hostmemory
from gockpt.cli import output
from gockpt.cli.peers import catalog
from gockpt.cli.task import Task, resolve
from gockpt.errors import ConfigError
from gockpt.faults import Fault
from gockpt.strategies.policy import POLICIES
from gockpt.workloads import param_count

WARMUP = 2
"""Steps at the start that no figure counts: allocations, first touches, caches."""

SLOTS = 2
PROCESS_BYTES = 600 << 20
"""What a trainer and an agent take besides tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for; None: choose for me."""

    model: str
    device: str
    strategies: str | None
    steps: int
    interval: int
    tokens: int | None
    windows: int | None
    precision: str | None
    seed: int
    data: str | None
    directory: str | None
    profile_file: str | None
    repeats: int = 1
    peers: bool = False
    """Every engine of other people's that can run, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A bench that can be run."""

    task: Task
    note: str
    """How the device was chosen, for the user; empty if he named it."""
    strategies: tuple[str, ...]
    """In the order in which they run, ``none`` first and last."""
    steps: int
    interval: int
    windows: int | None
    directory: Path
    repeats: int = 1
    """How often all strategies run, one round after the other."""
    not_run: tuple[tuple[str, str], ...] = ()
    """(engine, reason) of those that were asked for as a whole and cannot run here."""
    faults: tuple[Fault, ...] = ()
    """Planted by a test; no option does."""

    @property
    def warmup(self) -> int:
        """Steps left out; fewer where no checkpoint would be left to count."""
        return min(WARMUP, self.steps // self.interval * self.interval - 1)


def prepare(options: Options) -> Setup:
    """Check and resolve.

    Raises:
        ConfigError, DeviceError: what cannot work, and what to do.
    """
    check_counts(steps=options.steps, interval=options.interval, windows=options.windows)
    if options.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, not {options.repeats}")
    strategies = order_strategies(options.strategies)
    task, note = resolve(
        model=options.model,
        device=options.device,
        tokens=options.tokens,
        precision=options.precision,
        seed=options.seed,
        data=options.data,
        profile_file=options.profile_file,
    )
    for name in strategies:
        catalog.check_runs(name, task)
    peers, not_run = catalog.sort_out(task) if options.peers else ([], [])
    strategies = ("none", *dict.fromkeys((*strategies[1:-1], *peers)), "none")
    directory = Path(options.directory or tempfile.gettempdir())
    check_directory(directory)
    check_room(task, directory, checkpoints=options.steps // options.interval)
    return Setup(
        task=task,
        note=note,
        strategies=strategies,
        steps=options.steps,
        interval=options.interval,
        windows=options.windows,
        directory=directory,
        repeats=options.repeats,
        not_run=tuple(not_run),
    )


def order_strategies(names: str | None) -> tuple[str, ...]:
    """All strategies and engines that were named, ``none`` first and last.

    Raises:
        ConfigError: an unknown name (with the nearest), or none at all.
    """
    wanted = list(POLICIES) if names is None else [one.strip() for one in names.split(",")]
    if not any(wanted):
        raise ConfigError(f"--strategies names none; choose from {', '.join(POLICIES)}")
    for name in filter(None, wanted):
        catalog.check_name(name)
    middle = [name for name in dict.fromkeys(wanted) if name and name != "none"]
    return ("none", *middle, "none")


def check_counts(*, steps: int, interval: int, windows: int | None) -> None:
    """
    Raises:
        ConfigError: a number with which there would be no checkpoint.
    """
    for name, value in (("--steps", steps), ("--interval", interval), ("--windows", windows)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if interval > steps:
        raise ConfigError(
            f"--interval {interval} is longer than --steps {steps}, so there would be no "
            "checkpoint; give more steps"
        )


def check_directory(directory: Path, *, option: str = "--dir") -> None:
    """
    Raises:
        ConfigError: checkpoints cannot be written there.
    """
    if not directory.is_dir():
        raise ConfigError(f"{option} {directory}: no such directory; make it or name another")
    try:
        os.rmdir(tempfile.mkdtemp(prefix="gockpt-probe-", dir=directory))
    except OSError as error:
        raise ConfigError(
            f"{option} {directory}: cannot be written ({error.strerror}); name another directory"
        ) from error


def check_room(
    task: Task, directory: Path, *, checkpoints: int, option: str = "--dir", parts: int = 1
) -> None:
    """Refuse what will not fit in memory, or this many checkpoints on the disk.

    Args:
        option: what named the directory.
        parts: over how many directories a checkpoint is divided.

    Raises:
        ConfigError: with the bytes needed and those there are.
    """
    params, number = param_count(task.real_preset), task.number_format
    image = params * number.state_bytes
    need, free = image * checkpoints // parts, shutil.disk_usage(directory).free
    if need > free:
        raise ConfigError(
            f"{option} {directory}: {checkpoints} checkpoints need {output.size(need)} there, and "
            f"{output.size(free)} are free; name a larger disk or keep fewer"
        )
    host = SLOTS * image + 2 * params * number.grad_bytes + PROCESS_BYTES
    if task.torch_device.type == "cpu":
        host += image + 2 * params * 4  # the training itself, with gradients
    there = hostmemory.available()
    if host > there:
        raise ConfigError(
            f"{task.model} on {task.device} needs {output.size(host)} of memory, and "
            f"{output.size(there)} are available; choose a smaller --model"
        )
