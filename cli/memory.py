"""How much memory a process really takes.

The parent samples its workers with this; nothing here needs the process to cooperate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_COUNTED = ("Pss_Anon:", "Pss_Shmem:")
"""Mapped files are left out: how much of torch's library is a process's own share depends on how
many others happen to have it loaded."""

EVERY_S = 0.25
"""Seconds between two looks at a worker's memory."""


def pss(pid: int) -> int | None:
    """Proportional set size of anonymous and shared memory, in bytes; None if it can't be known."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    found = [line.split() for line in text.splitlines() if line.startswith(_COUNTED)]
    return sum(int(line[1]) for line in found) * 1024 if found else None


def children(pid: int) -> list[int]:
    """Processes that this one has started and that still run."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


@dataclass(slots=True)
class Peak:
    """The moment at which a trainer and its agent together took the most.

    Both are taken from one moment: memory that they share wanders from one to the other's account
    as they touch it, so two peaks of different moments would count it twice.
    """

    trainer: int = 0
    agent: int = 0
    samples: int = field(default=0)
    _due: float = 0.0
    _agents: list[int] = field(default_factory=list)

    def sample(self, pid: int) -> None:
        """Look at the trainer and its children, unless that was done a moment ago.

        A look costs processor time that the two may need themselves, so there are few.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + EVERY_S
        trainer = pss(pid)
        if trainer is None:
            return
        if self.samples % 8 == 0 or not all(map(psutil.pid_exists, self._agents)):
            self._agents = children(pid)
        agent = sum(pss(child) or 0 for child in self._agents)
        self.samples += 1
        if trainer + agent > self.trainer + self.agent:
            self.trainer, self.agent = trainer, agent
