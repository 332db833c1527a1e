"""``gockpt train``: train a model with checkpoints, and go on where the last run ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gockpt.cli import options, output
from gockpt.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from gockpt.checkpointer import Checkpointer
    from gockpt.cli.task import Task
    from gockpt.devices import Device
    from gockpt.workloads import Workload

REPORT = 1.0
"""Seconds between two lines."""


def train(
    dir: Annotated[
        str, typer.Option(metavar="DIR", help="Of the checkpoints; made if it is not there.")
    ] = "checkpoints",
    model: options.Model = "gpt-tiny",
    device: options.Device = "auto",
    steps: Annotated[int, typer.Option(help="Train until this step.")] = 100,
    interval: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 20,
    strategy: Annotated[str, typer.Option(help="How checkpoints are taken.")] = "gockpt",
    keep: Annotated[int, typer.Option(help="How many checkpoints stay.")] = 2,
    tokens: options.Tokens = None,
    windows: options.Windows = None,
    precision: options.Precision = None,
    seed: options.Seed = 0,
    data: options.Data = None,
    json: options.Json = None,
    profile_file: options.ProfileFile = None,
) -> None:
    """Train with checkpoints; the newest valid one in DIR is where it goes on."""
    from gockpt.cli.bench_setup import check_counts, check_room
    from gockpt.cli.task import real_workload, resolve, task_device
    from gockpt.strategies.policy import policy

    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    policy(strategy)
    check_counts(steps=steps, interval=min(interval, steps), windows=windows)
    if keep < 1:
        raise ConfigError(f"--keep must be at least 1, not {keep}")
    task, note = resolve(
        model=model,
        device=device,
        tokens=tokens,
        precision=precision,
        seed=seed,
        data=data,
        profile_file=profile_file,
    )
    root = Path(dir)
    check_room(task, _existing(root), checkpoints=keep + 1)
    if note:
        console.print(note)
    workload = real_workload(task)
    opened, pace = task_device(task)
    import gockpt

    with gockpt.Checkpointer(
        workload.model,
        workload.optimizer,
        root,
        every=interval,
        strategy=strategy,
        keep=keep,
        extras=workload.extras,
        windows=windows,
        device=opened,
        pace=pace,
    ) as ckpt:
        restored = ckpt.restore() if policy(strategy).saves else None
        start = f"goes on at step {restored.step}" if restored else "starts"
        console.print(f"{task.model} on {task.device} {start}, until step {steps}")
        run = _Run(task, workload, opened, ckpt)
        run.to(steps, console.print)
    opened.close()
    if json is not None:
        output.write_document(run.document(restored.step if restored else None), json)


def _existing(path: Path) -> Path:
    """The directory itself, or the nearest above it that is there.

    Raises:
        ConfigError: something that is no directory is in the way, or it cannot be written.
    """
    from gockpt.cli.bench_setup import check_directory

    there = next((one for one in (path, *path.absolute().parents) if one.exists()), path)
    check_directory(there)
    return there


class _Run:
    """A loop, and what it has come to."""

    def __init__(self, task: Task, workload: Workload, device: Device, ckpt: Checkpointer) -> None:
        self._task = task
        self._workload = workload
        self._device = device
        self._ckpt = ckpt
        self._loss: Tensor | None = None
        self._began = time.monotonic()
        self._seconds = 0.0
        self._steps = 0

    def to(self, last: int, say: Any) -> None:
        """Train until this step, with a line now and then."""
        from gockpt.workloads import train_step

        self._began = reported = time.monotonic()
        while (step := self._ckpt.current_step + 1) <= last:
            self._loss = train_step(self._workload, self._device, step)
            self._ckpt.step()
            self._steps += 1
            now = time.monotonic()
            if now - reported >= REPORT or step == last:
                reported = now
                self._seconds = now - self._began
                say(self._line(step))
        if not self._steps:
            say(f"nothing to do: it is at step {self._ckpt.current_step}")

    def _line(self, step: int) -> str:
        rate = self._task.tokens * self._steps / self._seconds
        emulated = " (emulated)" if self._device.emulated else ""
        return f"step {step}  loss {self._loss_value():.4f}  {rate:,.0f} tokens/s{emulated}"

    def _loss_value(self) -> float:
        return float("nan") if self._loss is None else float(self._loss)

    def document(self, restored: int | None) -> dict[str, Any]:
        """The document of ``--json``."""
        return {
            "schema": 1,
            "kind": "train",
            "model": self._task.model,
            "device": self._task.device,
            "emulated": self._device.emulated,
            "restored_step": restored,
            "step": self._ckpt.current_step,
            "loss": None if self._loss is None else float(self._loss),
            "newest_checkpoint": self._ckpt.latest,
            "seconds": self._seconds,
        }
