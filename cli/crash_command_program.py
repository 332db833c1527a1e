"""A program under test: started in a session of its own, killed with all that it has started.

Every process of a trial carries the trial's directory in its environment, inherited by whatever it
starts, in whatever session. By this mark they are found and ended, those included that outlive
their parent on purpose. What always holds:
after :func:`end_all` no process of that directory is left. Runs on the main thread of the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from gockpt.cli.crash_command_log import Log
from gockpt.cli.crash_leftovers import Mark
from gockpt.errors import ConfigError, GockptError

DIRECTORY_VARIABLE = "GOCKPT_TRIAL_DIR"
"""By which a program may ask for its directory."""

END_WITHIN = 30.0
"""Seconds in which killed processes must be gone (the system may still be writing for them)."""

_LOOK = 0.02


class Program:
    """One run of the command. Killed by :meth:`kill`, or ends by itself."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        directory: Path,
        cwd: Path,
        environment: Mapping[str, str],
        log: Path,
        step: re.Pattern[str] | None,
    ) -> None:
        """Start it.

        Raises:
            ConfigError: there is no such program, or it cannot be run.
        """
        self._directory = directory
        self.started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env={
                    **os.environ,
                    **environment,
                    **_mark(directory).environ(),
                    DIRECTORY_VARIABLE: str(directory),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"--command: {command[0]!r} cannot be run ({error.strerror}); name a program that "
                "is on the PATH, or its file"
            ) from error
        if self._process.stdout is None:
            raise GockptError("the program was started without a pipe")
        self.log = Log(self._process.stdout, log, step)

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.started

    def ended(self) -> int | None:
        """Its exit code (negative: the signal that ended it), or None while it runs."""
        return self._process.poll()

    def kill(self, *, everything: bool) -> None:
        """SIGKILL its process group, or every process that it has started, and wait for the end.

        Args:
            everything: also what left the group: as when its container or machine goes down.
        """
        if everything:
            for one in _below(self._process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        if self._process.poll() is None:  # else the number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(END_WITHIN)
        except subprocess.TimeoutExpired as error:
            raise GockptError(
                f"process {self._process.pid} does not die of SIGKILL; its disk may be stuck"
            ) from error
        if everything:
            end_all(self._directory)


def end_all(directory: Path) -> None:
    """Kill every process of a trial, wherever it is, and wait until none is left.

    Raises:
        GockptError: one does not die.
    """
    mark, deadline = _mark(directory), time.monotonic() + END_WITHIN
    while found := mark.processes():  # again, as one may have started another just before
        if time.monotonic() > deadline:
            raise GockptError(f"process {found[0].pid} does not die of SIGKILL; end it by hand")
        for one in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        time.sleep(_LOOK)


def _mark(directory: Path) -> Mark:
    return Mark(str(directory))


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
