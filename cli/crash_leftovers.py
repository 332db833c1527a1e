"""Finding what a killed program leaves behind: processes by a mark in their environment, and files.

Runs in the parent. What always holds: a process is touched only if it carries the mark of this very
trial, which nobody else can have.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path

import psutil

from gockpt.storage import scan

VARIABLE = "GOCKPT_CRASH_TEST"
LEAVE = 20.0
"""Seconds that processes may take to leave by themselves after a clean end."""
_LOOK = 0.05


class Mark:
    """A mark that processes inherit."""

    def __init__(self, text: str | None = None) -> None:
        self.text = text or secrets.token_hex(8)

    def environ(self) -> dict[str, str]:
        """What to put into the environment."""
        return {VARIABLE: self.text}

    def processes(self) -> list[psutil.Process]:
        """All that carry the mark and are not dead."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(VARIABLE) == self.text and _alive(process):
                    found.append(process)
        return found

    def wait_gone(self, timeout: float) -> list[psutil.Process]:
        """Wait until all have left; those that have not."""
        deadline = time.monotonic() + timeout
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        return left

    def end(self) -> None:
        """Kill all, and wait until they are gone."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.wait_gone(LEAVE)  # (whose parent does not care for them stay zombies)


def _alive(process: psutil.Process) -> bool:
    return bool(process.status() != psutil.STATUS_ZOMBIE)


def stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


def left_in_checkpoints(directory: Path, keep: int | None) -> list[str]:
    """What a clean end should not have left in a directory of checkpoints."""
    if not directory.is_dir():
        return []
    found = scan(directory)
    left = [f"{one.path.name} was never finished" for one in found if not one.committed]
    good = [one for one in found if one.problem is None and not one.marks]
    if (
        keep is not None and len(good) > keep + 1
    ):  # one more: that which was restored from is protected
        left.append(f"{len(good)} checkpoints, {keep} were to be kept")
    left += [f"{path.name} is trash" for path in directory.iterdir() if ".trash" in path.name]
    left += [f"{path.name} is temporary" for path in directory.rglob("*.tmp")]
    return left


def left_in(directory: Path) -> list[str]:
    """Every file, socket or pipe below a directory that should have none."""
    if not directory.is_dir():
        return []
    return [f"{path.name} was left" for path in directory.rglob("*") if not path.is_dir()]
