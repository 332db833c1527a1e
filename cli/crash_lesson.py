"""The training that is interrupted: a pass of a workload, and what may happen to it in the loop.

Runs in trainers and in the golden run, on the training thread. What always holds: what a pass
computes depends on the state and the step alone, so that two runs differ only if their states do.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gockpt.cli.crash_job import Event, Job, Pass
from gockpt.cli.task import real_workload
from gockpt.workloads import train_step
from gockpt.workloads.loop import Phases

HEADROOM = 8 << 20
"""Bytes of address space that a trainer gets beyond those it has, when memory is to run out."""


class Injected(Exception):
    """The exception that was to be raised in the loop."""


class Lesson:
    """A workload in training."""

    def __init__(self, job: Job, device: Phases, *, resumed: int) -> None:
        """Build it.

        Args:
            resumed: the step that it will go on from; its optimizer has the groups it had then.
        """
        self.workload = real_workload(job)
        self.scaler: torch.amp.GradScaler | None = None
        self._device = device
        self._event, self._failure = job.event, job.failure
        if self._event is not None and self._event.kind == "scaler-skip":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
        if self._event is not None and self._event.step <= resumed:
            self._restructure(self._event)

    @property
    def extras(self) -> dict[str, Any]:
        """What else a checkpoint must hold."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler}
        return {**self.workload.extras, **scaler}

    def train(self, step: int) -> Pass:
        """One pass."""
        batch = self.workload.loader.position
        if self._event is not None and self._event.step == step:
            self._restructure(self._event)
            self._happen(self._event)
        self._fail(step, "forward")
        scaled = self.scaler is not None
        loss = (self._scaled_step if scaled else self._step)(step)
        self._fail(step, "update")
        draw = float(torch.rand((), dtype=torch.float64))
        return Pass(step=step, batch=batch, loss=float(loss).hex(), draw=draw.hex())

    def _step(self, step: int) -> Tensor:
        return train_step(self.workload, self._device, step)

    def _scaled_step(self, step: int) -> Tensor:
        """As ``train_step``, under a loss scaler."""
        workload, scaler = self.workload, self.scaler
        if scaler is None:
            raise ValueError("there is no scaler")
        with self._device.phase("forward", step):
            inputs, targets = next(workload.loader)
            loss = workload.loss(inputs, targets)
        with self._device.phase("backward", step):
            workload.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if self._event is not None and self._event.step == step:
                self._overflow()
        with self._device.phase("update", step):
            scaler.step(workload.optimizer)
            scaler.update()
            workload.scheduler.step()
        return loss.detach()

    def _overflow(self) -> None:
        gradient = next(iter(self.workload.model.parameters())).grad
        if gradient is not None:
            gradient.view(-1)[0] = float("inf")

    # -- what may happen ---------------------------------------------------------------------------

    def _restructure(self, event: Event) -> None:
        """Give one parameter a group of its own."""
        if event.kind != "group-added":
            return
        optimizer = self.workload.optimizer
        group = optimizer.param_groups[-1]
        moved, name = group["params"].pop(), group["param_names"].pop()
        optimizer.add_param_group({"params": [(name, moved)], "weight_decay": 0.05})
        scheduler = self.workload.scheduler
        scheduler.lr_lambdas.append(scheduler.lr_lambdas[-1])
        scheduler.base_lrs.append(scheduler.base_lrs[-1])

    def _happen(self, event: Event) -> None:
        workload = self.workload
        if event.kind == "parameter-changed":
            with torch.no_grad():
                next(iter(workload.model.parameters())).mul_(1.01)
        elif event.kind == "state-loaded":
            state = workload.model.state_dict()
            workload.model.load_state_dict({name: one * 0.999 for name, one in state.items()})
        elif event.kind == "optimizer-replaced":
            workload.optimizer.state.clear()

    # -- failures ----------------------------------------------------------------------------------

    def _fail(self, step: int, place: str) -> None:
        failure = self._failure
        if failure is None or failure.step != step:
            return
        if failure.kind == place:
            raise Injected(f"to be raised in the {place} of step {step}")
        if place == "forward" and failure.kind == "memory":
            run_out_of_memory()
        if place == "forward" and failure.kind == "backward":
            first = next(iter(self.workload.model.parameters()))
            first.register_hook(_raise)  # type: ignore[no-untyped-call]


def _raise(gradient: Tensor) -> None:
    raise Injected("to be raised in the backward")


def run_out_of_memory() -> None:
    """Take memory until the system gives no more.

    Raises:
        RuntimeError, MemoryError: it does not.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    taken = []
    while True:
        taken.append(torch.ones(HEADROOM, dtype=torch.uint8))
