"""The lives of a program in one directory: started, killed, started again, until it ends by itself.

What always holds: every wait has a deadline, the number of restarts is bounded, and when
:func:`live` returns or raises, no process that it has started is left. Main thread of the command.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gockpt.cli.crash_command_program import Program, end_all

RESTARTS = 5
"""How often a program that fails by itself is started again, as whoever runs a cluster does it."""

PAUSE = 0.5
"""Seconds before the first of these restarts; each further pause is twice as long."""

PLACE = "{dir}"
"""What stands for the directory in a command or a result path."""

_POLL = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is started, again and again."""

    words: tuple[str, ...]
    """Program and arguments; :data:`PLACE` in them is replaced."""
    here: bool
    """Whether it runs where the user is, and not in the directory itself."""
    module_path: str
    """Added to PYTHONPATH, so that ``python -m`` finds what it finds where the user is."""
    step: re.Pattern[str] | None
    """In the line that tells the end of a step; its first group is the number."""

    def start(self, directory: Path, log: Path) -> Program:
        """Start it in this directory; its temporary files go to a place beside that."""
        temporary = directory.with_name(f"{directory.name}.tmp")
        temporary.mkdir(exist_ok=True)
        environment = {"TMPDIR": str(temporary)}
        if not self.here:
            environment["PYTHONPATH"] = self.module_path
        return Program(
            [word.replace(PLACE, str(directory)) for word in self.words],
            directory=directory,
            cwd=Path.cwd() if self.here else directory,
            environment=environment,
            log=log,
            step=self.step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL at a moment of a launch."""

    after: float
    """Seconds since the program was started."""
    everything: bool
    """Every process that it has started dies, and not only its process group."""

    def due(self, seconds: float, directory: Path) -> bool:
        """Whether it is time."""
        return seconds >= self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of the program, and how it ended."""

    seconds: float
    code: int | None
    """None: it had to be stopped, as its deadline had passed."""
    killed: Kill | None
    ready_s: float | None
    """Until its first step (its first output, where steps are not told), None if there is none."""
    steps: tuple[int, ...]
    log: Path
    last_lines: str

    @property
    def completed(self) -> bool:
        """Whether it has ended by itself, and says that all is well."""
        return self.code == 0

    def __str__(self) -> str:
        if self.code is None:
            return f"did not end within {self.seconds:.1f} s"
        if self.killed is not None:
            whole = ", with all it had started" if self.killed.everything else ""
            return f"was killed after {self.seconds:.1f} s{whole}"
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"
        return f"ended after {self.seconds:.1f} s with {how}"


def live(
    command: Command, directory: Path, kills: Sequence[Kill], *, deadline: float
) -> list[Launch]:
    """Make ``directory`` and run the command in it until it has ended by itself.

    Each kill waits for its moment in a launch of its own. A launch that fails by itself is tried
    again, at most :data:`RESTARTS` times in all; one that takes longer than ``deadline`` seconds is
    the last.

    Raises:
        ConfigError: the program cannot be started.
        GockptError: a process that does not die.
    """
    directory.mkdir()
    launches: list[Launch] = []
    left, failures = list(kills), 0
    try:
        while failures <= RESTARTS:
            log = directory.with_name(f"{directory.name}.{len(launches) + 1}.log")
            launch = _launch(command, directory, log, left[0] if left else None, deadline)
            launches.append(launch)
            if launch.completed or launch.code is None:
                break
            if launch.killed is not None:
                left.pop(0)
                continue
            failures += 1
            if failures <= RESTARTS:
                time.sleep(PAUSE * 2 ** (failures - 1))
    finally:
        end_all(directory)
    return launches


def once(command: Command, directory: Path, *, deadline: float) -> Launch:
    """Make ``directory`` and run the command in it once, with nobody killing it."""
    directory.mkdir()
    try:
        log = directory.with_name(f"{directory.name}.log")
        return _launch(command, directory, log, None, deadline)
    finally:
        end_all(directory)


def _launch(
    command: Command, directory: Path, log: Path, kill: Kill | None, deadline: float
) -> Launch:
    program = command.start(directory, log)
    try:
        killed = _watch(program, directory, kill, deadline)
    except BaseException:
        program.kill(everything=True)
        raise
    seconds, code = program.seconds, program.ended()
    if code is None:
        program.kill(everything=killed is None or killed.everything)
        code = program.ended() if killed else None
    if code is not None and code >= 0:  # it came to its end just before the kill
        killed = None
    program.log.join(1.0)
    steps = program.log.steps
    first = program.log.first_output if command.step is None else steps[0][0] if steps else None
    return Launch(
        seconds=seconds,
        code=code,
        killed=killed,
        ready_s=None if first is None else first - program.started,
        steps=tuple(number for _, number in steps),
        log=log,
        last_lines=program.log.last_lines(),
    )


def _watch(program: Program, directory: Path, kill: Kill | None, deadline: float) -> Kill | None:
    """Wait for the end, the moment of the kill (which is returned then), or the deadline."""
    while program.ended() is None and program.seconds < deadline:
        if kill is not None and kill.due(program.seconds, directory):
            return kill
        time.sleep(_POLL)
    return None
