"""A loop's checkpoints by somebody else's engine: when they begin, what training waits for.

Runs in a bench worker, on the training thread. What always holds: everything that the engine does
on this thread, and every wait for it, is inside ``device.hold``, as with gockpt's own strategies.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gockpt.cli.peers.engine import REHEARSAL, Engine, Saving, State, place
from gockpt.devices import Device
from gockpt.errors import GockptError

DEADLINE_S = 600.0
"""How long an engine may take for one checkpoint."""

POLL_S = 0.001


@dataclass(slots=True)
class Reached:
    """When a checkpoint got how far, on the monotonic clock; None: not yet."""

    staged: float | None = None
    saved: float | None = None


@dataclass(slots=True)
class Saver:
    """Calls the engine at every ``every``-th step."""

    engine: Engine
    take: Callable[[], State]
    """Gives the state, once there is all of it: behind the first update."""
    device: Device
    directory: Path
    every: int
    rehearse: bool
    """Make one checkpoint in the first pass and remove it, so that what an engine does once
    (processes, buffers) is in no figure, as it is not for gockpt."""
    current_step: int = 0
    in_flight_max: int = 0
    reached: dict[int, Reached] = field(default_factory=dict)
    _open: list[Saving] = field(default_factory=list)

    def step(self) -> None:
        """A pass has ended.

        Raises:
            GockptError: the engine failed, or is stuck.
        """
        self.current_step += 1
        self.engine.poll()
        self._forget()
        if self.rehearse and self.current_step == 1:
            self._rehearse()
        if self.current_step % self.every == 0:
            self._save(self.current_step)

    def before_update(self, *_: object) -> None:
        """The optimizer is about to change what an engine may still be copying."""
        for saving in self._open:
            if not saving.staged.done():
                with self.device.hold("staging", self.current_step):
                    self._await(saving.staged, "copy")

    def wait(self) -> None:
        """Until everything that was begun is saved."""
        while self._open:
            self._await(self._open[0].saved, "save")
            self._forget()

    def _rehearse(self) -> None:
        with self.device.hold("rehearsal", self.current_step):
            self._begin(REHEARSAL)
            self.wait()
        del self.reached[REHEARSAL]
        self.in_flight_max = 0
        there = place(self.directory, REHEARSAL)
        there.unlink() if there.is_file() else shutil.rmtree(there)

    def _save(self, step: int) -> None:
        with self.device.hold("save", step):
            while len(self._open) >= self.engine.in_flight:
                self._await(self._open[0].saved, "save")
                self._forget()
            self._begin(step)

    def _begin(self, step: int) -> None:
        state = self.take()
        try:
            saving = self.engine.save(state, step)
        except Exception as error:
            raise _failure("save", step, error) from error
        reached = self.reached[step] = Reached()
        saving.staged.add_done_callback(lambda _: _now(reached, "staged"))
        saving.saved.add_done_callback(lambda _: _now(reached, "saved"))
        self._open.append(saving)
        self.in_flight_max = max(self.in_flight_max, len(self._open))

    def _forget(self) -> None:
        """Let go of those that are saved."""
        for saving in self._open:
            if saving.saved.done():
                self._await(saving.saved, "save")  # raises what went wrong
        self._open = [one for one in self._open if not one.saved.done()]

    def _await(self, future: Future[Any], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not future.done():
            self.engine.poll()
            if time.monotonic() > deadline:
                raise GockptError(
                    f"step {self.current_step}: no {what} within {DEADLINE_S:.0f} s; it is stuck"
                )
            time.sleep(POLL_S)
        error = future.exception(0)
        if error is not None:
            raise _failure(what, self.current_step, error) from error


def _now(reached: Reached, stage: str) -> None:
    setattr(reached, stage, time.monotonic())


def _failure(what: str, step: int, error: BaseException) -> GockptError:
    reason = " ".join(str(error).split())
    return GockptError(f"its {what} failed by step {step}: {type(error).__name__}: {reason}")
