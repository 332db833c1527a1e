"""The ways to save that ``crash-test`` puts to the test, behind one small protocol.

Runs in trainers, on the training thread. :class:`PlainSave` is what people commonly do:
``torch.save`` in place, over the file of before. It is here so that it can be seen what that
protects against.
"""

from __future__ import annotations

import io
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import gockpt
from gockpt import faults
from gockpt.cli.crash_job import Job
from gockpt.cli.crash_lesson import Lesson
from gockpt.devices import Device

log = logging.getLogger("gockpt")

PLAIN_FILE = "checkpoint.pt"

PLAIN = "torch-save"
"""Name of the method that saves in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a trainer goes on from."""

    step: int
    source: str
    read_s: float
    apply_s: float


class Method(Protocol):
    """A way to save. Its steps are counted as gockpt counts them."""

    def restore(self) -> Found | None:
        """Put the newest state back."""
        ...

    @property
    def current_step(self) -> int: ...

    @property
    def should_stop(self) -> bool: ...

    def step(self) -> None:
        """A pass has ended."""
        ...

    def durable(self) -> list[int]:
        """Steps that became durable since the last call."""
        ...

    @property
    def failed(self) -> int:
        """Checkpoints that failed."""
        ...

    def close(self) -> None: ...


class Gockpt:
    """One of gockpt's own strategies."""

    def __init__(self, job: Job, lesson: Lesson, device: Device, pace: object) -> None:
        self._told = 0
        self.checkpointer = gockpt.Checkpointer(
            lesson.workload.model,
            lesson.workload.optimizer,
            job.directory,
            every=job.interval,
            strategy=job.strategy or "none",
            keep=job.keep,
            tier=job.tier,
            extras=lesson.extras,
            windows=job.windows,
            on_error="warn",
            agent="thread" if job.record else "process",
            device=device,
            pace=pace,  # type: ignore[arg-type]
            linger=job.linger,
            faults=job.agent_faults,
        )

    def restore(self) -> Found | None:
        restored = self.checkpointer.restore()
        if restored is None:
            return None
        return Found(
            step=restored.step,
            source=restored.source,
            read_s=restored.read_seconds,
            apply_s=restored.apply_seconds,
        )

    @property
    def current_step(self) -> int:
        return self.checkpointer.current_step

    @property
    def should_stop(self) -> bool:
        return self.checkpointer.should_stop

    def step(self) -> None:
        self.checkpointer.step()

    def durable(self) -> list[int]:
        client = self.checkpointer.client
        known = client.totals.latencies if client is not None else []
        fresh = [step for step, stage, _ in known[self._told :] if stage == "durable"]
        self._told = len(known)
        return fresh

    @property
    def failed(self) -> int:
        client = self.checkpointer.client
        return client.totals.failed if client is not None else 0

    def close(self) -> None:
        self.checkpointer.close()


class PlainSave:
    """``torch.save`` to one file, again and again."""

    should_stop = False
    failed = 0

    def __init__(self, job: Job, lesson: Lesson) -> None:
        self._path = Path(job.directory) / PLAIN_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._every, self._lesson = job.interval, lesson
        self._durable: list[int] = []
        self.current_step = 0

    def restore(self) -> Found | None:
        if not self._path.exists():
            return None
        began = time.monotonic()
        state = torch.load(self._path, weights_only=True)
        read = time.monotonic()
        workload = self._lesson.workload
        workload.model.load_state_dict(state["model"])
        workload.optimizer.load_state_dict(state["optimizer"])
        workload.scheduler.load_state_dict(state["scheduler"])
        workload.loader.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        self.current_step = state["step"]
        applied = time.monotonic() - read
        return Found(step=state["step"], source="ssd", read_s=read - began, apply_s=applied)

    def step(self) -> None:
        self.current_step += 1
        if self.current_step % self._every:
            return
        workload = self._lesson.workload
        state = {
            "step": self.current_step,
            "model": workload.model.state_dict(),
            "optimizer": workload.optimizer.state_dict(),
            "scheduler": workload.scheduler.state_dict(),
            "data": workload.loader.state_dict(),
            "rng": torch.get_rng_state(),
        }
        half = sum(one.nbytes for one in workload.model.parameters())  # of thrice as much
        with _Written(self._path, half) as file:
            torch.save(state, file)
        self._durable.append(self.current_step)

    def durable(self) -> list[int]:
        fresh, self._durable = self._durable, []
        return fresh

    def close(self) -> None:
        """Nothing is open."""


class _Written(io.FileIO):
    """The file that is written over, with a fault point in its middle."""

    def __init__(self, path: Path, half: int) -> None:
        super().__init__(os.fspath(path), "wb")
        self._left = half

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        before, self._left = self._left, self._left - count
        if before > 0 >= self._left:
            faults.point("plain.half")
        return count
