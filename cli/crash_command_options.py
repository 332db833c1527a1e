"""What the user said of ``gockpt crash-test --command``, checked before anything is started."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from gockpt.cli.crash_command_lives import PLACE, Command
from gockpt.errors import ConfigError

TRIALS = 10
QUICK_TRIALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command, as given."""

    command: str
    """Split as a shell would, and run without one. Where ``{dir}`` stands in it, the directory of
    the run is put, and it runs where the user is; else it runs in that directory."""
    results: tuple[Path, ...]
    """Files (or directories of them) that it makes, relative to the directory of the run."""
    trials: int | None = None
    """None: :data:`TRIALS`."""
    seed: int = 0
    directory: str | None = None
    """New or empty; the directories of the runs are made in it. None: the system's."""
    quick: bool = False
    first_kill_after: float | None = None
    """Seconds; None: as soon as the golden run was ready."""
    step_regex: str | None = None
    """Finds the line that tells the end of a step; its first group is the number."""
    timeout: float = 3600.0
    """Seconds that the golden run may take."""
    keep: Path | None = None
    """Where the logs of failed trials are put; None: in the user's data directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be tried. Made by :func:`prepare`."""

    text: str
    """The command as the user wrote it."""
    command: Command
    results: tuple[str, ...]
    trials: int
    seed: int
    first_kill_after: float | None
    timeout: float
    root: Path | None
    """Where the directories of the runs are made."""
    keep: Path


def prepare(options: Options) -> Order:
    """Check it.

    Raises:
        ConfigError: what cannot work, and what to do.
    """
    from gockpt.cli.crash_setup import own_directory

    first = options.first_kill_after
    trials = options.trials
    if trials is None:
        trials = QUICK_TRIALS if options.quick else TRIALS
    if trials < 1:
        raise ConfigError(f"--trials must be at least 1, not {trials}")
    if options.seed < 0:
        raise ConfigError(f"--seed must not be negative, not {options.seed}")
    if first is not None and first < 0:
        raise ConfigError(f"--first-kill-after must not be negative, not {first:g}")
    if options.timeout <= 0:
        raise ConfigError(f"--timeout must be above 0, not {options.timeout:g}")
    return Order(
        text=options.command,
        command=_command(options.command, _pattern(options.step_regex)),
        results=_results(options.results),
        trials=trials,
        seed=options.seed,
        first_kill_after=first,
        timeout=options.timeout,
        root=own_directory(options.directory),
        keep=options.keep or Path(platformdirs.user_data_dir("gockpt")) / "crash-test",
    )


def _command(text: str, step: re.Pattern[str] | None) -> Command:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--command {text!r}: {error}; close the quotation") from error
    if not words:
        raise ConfigError("--command is missing or empty; give the program and its arguments")
    here = any(PLACE in word for word in words)
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Command(
        words=tuple(words if here else map(_located, words)),
        here=here,
        module_path=os.pathsep.join(paths),
        step=step,
    )


def _located(word: str) -> str:
    """A script or program beside the user is meant, wherever it is run."""
    is_script = word.endswith((".py", ".sh")) or (os.sep in word and os.access(word, os.X_OK))
    return os.path.abspath(word) if is_script and os.path.isfile(word) else word


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(f"--step-regex {text!r}: {error}") from error
    if pattern.groups < 1:
        raise ConfigError(rf"--step-regex {text!r} has no group; write it like 'step (\d+)'")
    return pattern


def _results(given: Sequence[Path]) -> tuple[str, ...]:
    if not given:
        raise ConfigError("--command needs a --result: a file that the command makes at its end")
    cleaned = []
    for one in given:
        path = os.path.normpath(str(one).replace(PLACE, "."))
        if os.path.isabs(path) or path.split(os.sep)[0] == "..":
            raise ConfigError(
                f"--result {one}: must lie in the directory of its run; give it relative to that, "
                f"or as {PLACE}/…"
            )
        cleaned.append(path)
    return tuple(cleaned)
