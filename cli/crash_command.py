"""``gockpt crash-test --command``: any program ends as it should, however often it is killed.

The command is run once with nobody killing it (the golden run), then in each trial in a fresh
directory, killed at random times and started again until it ends by itself; the files that it has
made must be those of the golden run. What always holds: a trial in which no kill landed is skipped,
never passed; a command whose own results do not repeat is refused, not judged; and what was made
for the trials is gone at the end, but for the logs of failed ones.
"""

from __future__ import annotations

import random
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from gockpt.cli import output
from gockpt.cli.crash_command_document import Golden, Json, Trial, document, lost_s, verdict
from gockpt.cli.crash_command_files import Compared, compare, files_of
from gockpt.cli.crash_command_lives import Kill, Launch, live, once
from gockpt.cli.crash_command_options import Options, Order, prepare
from gockpt.errors import ConfigError

__all__ = ["Options", "prepare", "run"]

AGAIN = 0.3
"""The chance that a killed program is killed once more."""

MOST_KILLS = 3
LAST_KILL = 0.95
"""No kill is planned later than at this share of the golden run: the program might have ended."""


def run(order: Order, console: Console) -> Json:
    """Run the golden run and all trials, and tell of each as it ends.

    Returns:
        The document of ``--json``.

    Raises:
        ConfigError: a command that fails, or whose results differ, with nobody killing it.
    """
    created = datetime.now(UTC)
    run_id = f"{created:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    with _place(order.root) as place:
        golden = _first_run(order, place / "golden", console)
        trials = []
        for trial in _trials(order, golden, place, order.keep / run_id, console):
            trials.append(trial)
            console.print(trial.line, markup=False, soft_wrap=True)
    made = document(order, golden, trials, run_id=run_id, created=created)
    if all(one.passed is None for one in trials):
        raise ConfigError(
            "--command: it ended before it could be killed in every trial; let it do more, or "
            "give a shorter --first-kill-after"
        )
    console.print(verdict(made), markup=False, soft_wrap=True)
    return made


@contextmanager
def _place(root: Path | None) -> Iterator[Path]:
    """A new directory, for as long as the body runs; ``root`` is made, and removed, if need be."""
    made = root is not None and not root.exists()
    if root is not None:
        root.mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="gockpt-crash-", dir=root)).resolve()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if root is not None and made:
            root.rmdir()


def _first_run(order: Order, directory: Path, console: Console) -> Golden:
    with _busy(console, "the golden run"):
        golden = _golden(order, directory)
    took, ready = output.seconds(golden.launch.seconds), output.seconds(golden.launch.ready_s)
    console.print(f"golden run: {took}, ready after {ready}")
    first = order.first_kill_after
    if first is not None and first >= LAST_KILL * golden.launch.seconds:
        raise ConfigError(
            f"--first-kill-after {first:g}: the whole run takes only {golden.launch.seconds:.1f} s;"
            " kill it earlier, or let it do more"
        )
    return golden


@contextmanager
def _busy(console: Console, what: str) -> Iterator[None]:
    """On a terminal, that something goes on."""
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def _golden(order: Order, directory: Path) -> Golden:
    launch = once(order.command, directory, deadline=order.timeout)
    if launch.code is None:
        raise ConfigError(
            f"--command: it did not end within {order.timeout:g} s with nobody killing it; let it "
            f"do less, or give a longer --timeout; its last lines: {launch.last_lines}"
        )
    if not launch.completed:
        raise ConfigError(
            f"--command: it {launch} with nobody killing it; make it work first; its last lines: "
            f"{launch.last_lines}"
        )
    for result in order.results:
        if not files_of(directory, result):
            raise ConfigError(
                f"--result {result}: the command made no such file in its directory; its last "
                f"lines: {launch.last_lines}"
            )
    return Golden(directory=directory, launch=launch)


def draw_kills(chance: random.Random, golden: Golden, first_after: float) -> list[Kill]:
    """When a trial's program is killed: the first time between ``first_after`` seconds and the end
    of its run, then, by chance, in the first half of a later launch.

    Half of the kills take the process group only, the others everything that was started.
    """
    length = LAST_KILL * golden.launch.seconds
    moments = [chance.uniform(min(first_after, length), length)]
    while len(moments) < MOST_KILLS and chance.random() < AGAIN:
        moments.append(chance.uniform(0, length / 2))
    return [Kill(after=one, everything=chance.random() < 0.5) for one in moments]


def _trials(
    order: Order, golden: Golden, place: Path, keep: Path, console: Console
) -> Iterator[Trial]:
    first_after = golden.ready_s if order.first_kill_after is None else order.first_kill_after
    repeats = False
    for number in range(1, order.trials + 1):
        kills = draw_kills(random.Random(f"{order.seed}/{number}"), golden, first_after)
        directory = place / f"trial-{number:03d}"
        with _busy(console, f"trial {number} of {order.trials}"):
            launches = live(order.command, directory, kills, deadline=golden.deadline)
            trial = _judge(order, golden, number, directory, launches)
            if trial.passed is False and trial.compared and not repeats:
                _check_repeats(order, golden, place / "again")
                repeats = True
        if trial.passed is False:
            trial = _with_logs(trial, keep / directory.name)
        shutil.rmtree(directory, ignore_errors=True)
        yield trial


def _judge(
    order: Order, golden: Golden, number: int, directory: Path, launches: Sequence[Launch]
) -> Trial:
    last = launches[-1]
    compared: tuple[Compared, ...] = ()
    passed: bool | None = None
    lost = lost_s(golden, launches)
    killed = any(launch.killed for launch in launches)
    if not last.completed:
        after = "after the kill" if killed else "with nobody killing it"
        passed, detail = False, f"{after} it {last}: {last.last_lines}"
    elif not killed:
        detail = "skipped, as it ended before it was to be killed"
    else:
        compared = tuple(compare(golden.directory, directory, order.results))
        difference = _difference(compared)
        passed = not difference
        detail = difference or f"the same result, {output.seconds(lost)} of work lost"
    return Trial(
        number=number,
        launches=tuple(launches),
        passed=passed,
        detail=detail,
        compared=compared,
        lost_s=lost,
    )


def _difference(compared: Sequence[Compared]) -> str:
    """The first difference of each file, and how many more there are; empty if there is none."""
    return "; ".join(
        f"{one.name}: {one.differences[0]}"
        + (f" (and {one.count - 1} more differences)" if one.count > 1 else "")
        for one in compared
        if one.count
    )


def _check_repeats(order: Order, golden: Golden, directory: Path) -> None:
    """Before a kill is blamed: without one, the command must give the same again.

    Raises:
        ConfigError: it does not.
    """
    again = _golden(order, directory)
    difference = _difference(compare(golden.directory, again.directory, order.results))
    shutil.rmtree(directory, ignore_errors=True)
    if difference:
        raise ConfigError(
            f"--command: two runs that nobody killed end differently ({difference}); fix its "
            "seeds and threads, or name results that repeat"
        )


def _with_logs(trial: Trial, target: Path) -> Trial:
    """The trial, the output of its launches kept in ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    for number, launch in enumerate(trial.launches, 1):
        shutil.copyfile(launch.log, target / f"launch-{number}.log")
    return replace(trial, logs=target)
