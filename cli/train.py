"""``gockpt train``: train a model with checkpoints, and go on where the last run ended."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from gockpt.cli import options, output
from gockpt.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from gockpt.checkpointer import Checkpointer
    from gockpt.cli.task import Task
    from gockpt.devices import Device
    from gockpt.restore import Restored
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
    keep_every: Annotated[
        int | None,
        typer.Option(
            help="Keep those of multiples of so many steps for ever.", show_default="none"
        ),
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Copy them to a second, slower directory behind it all."),
    ] = None,
    volume: options.Volumes = None,
    tokens: options.Tokens = None,
    windows: options.Windows = None,
    precision: options.Precision = None,
    seed: options.Seed = 0,
    data: options.Data = None,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="From SIGTERM until the last one is written.")
    ] = 25.0,
    linger: Annotated[
        float, typer.Option(help="Seconds that memory waits for a new start after a crash.")
    ] = 60.0,
    json: options.Json = None,
    profile_file: options.ProfileFile = None,
) -> int:
    """Train with checkpoints; the newest valid one in DIR is where it goes on.

    At SIGTERM it saves the step it is at, and ends with exit code 143.
    """
    from gockpt.cli import errors
    from gockpt.cli.bench_setup import check_counts, check_room
    from gockpt.cli.same_run import NAME, Options
    from gockpt.cli.task import real_workload, resolve, task_device
    from gockpt.strategies.policy import policy

    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    policy(strategy)
    check_counts(steps=steps, interval=min(interval, steps), windows=windows)
    if keep < 1:
        raise ConfigError(f"--keep must be at least 1, not {keep}")
    if keep_every is not None and keep_every < 1:
        raise ConfigError(f"--keep-every must be at least 1, not {keep_every}")
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
    places = {"--volume": list(map(Path, volume))} if volume else {"--dir": [root]}
    for option, paths in places.items():
        for path in paths:
            there = _existing(path, option)
            check_room(task, there, checkpoints=keep + 1, option=option, parts=len(paths))
    same = Options(task)
    if policy(strategy).saves:
        same.check(root, volume or ())
    workload = real_workload(task)
    opened, pace = task_device(task)
    import gockpt

    began = time.time()
    # The Checkpointer takes it over; a second one is to end the process at once, as it does others.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with gockpt.Checkpointer(
        workload.model,
        workload.optimizer,
        root,
        every=interval,
        strategy=strategy,
        keep=keep,
        keep_every=keep_every,
        tier=tier,
        extras={NAME: same} | workload.extras,
        volumes=volume or (),
        windows=windows,
        device=opened,
        linger=linger,
        pace=pace,
        grace=grace,
    ) as ckpt:
        opening = time.time() - began
        if note:
            console.print(note)  # only now: all options are good
        restored = ckpt.restore() if policy(strategy).saves else None
        start = f"goes on at step {restored.step}" if restored else "starts"
        if restored and restored.source == "tier":
            start += f" (from its tier {tier})"
        console.print(f"{task.model} on {task.device} {start}, until step {steps}")
        recovery = None if restored is None else Recovery.of(restored, began, opening)
        run = _Run(task, workload, opened, ckpt, recovery)
        run.to(steps, console.print)
    opened.close()
    if json is not None:
        output.write_document(run.document(), json)
    stopped = ckpt.should_stop and ckpt.current_step < steps
    return errors.TERMINATED if stopped else errors.GOOD


def _existing(path: Path, option: str) -> Path:
    """The directory itself, or the nearest above it that is there.

    Raises:
        ConfigError: something that is no directory is in the way, or it cannot be written.
    """
    from gockpt.cli.bench_setup import check_directory

    there = next((one for one in (path, *path.absolute().parents) if one.exists()), path)
    check_directory(there, option=option)
    return there


@dataclass(slots=True, kw_only=True)
class Recovery:
    """What it took from the start of this process to the first new step, in seconds."""

    step: int
    source: str
    start_s: float
    """Until there was a model on the device: imports included."""
    open_s: float
    """To find the agent, or to start one, and to get the memory."""
    read_s: float
    apply_s: float
    first_step_s: float = 0.0

    @classmethod
    def of(cls, restored: Restored, began: float, opening: float) -> Recovery:
        """The part that is known before the first step.

        Args:
            began: when the Checkpointer was made (epoch seconds), which took ``opening`` seconds.
        """
        return cls(
            step=restored.step,
            source=restored.source,
            start_s=began - psutil.Process().create_time(),
            open_s=opening,
            read_s=restored.read_seconds,
            apply_s=restored.apply_seconds,
        )

    @property
    def total_s(self) -> float:
        """Of all."""
        return self.start_s + self.open_s + self.read_s + self.apply_s + self.first_step_s

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "total_s": self.total_s}

    def __str__(self) -> str:
        return (
            f"recovered from {self.source} in {output.seconds(self.total_s)}: "
            f"start {output.seconds(self.start_s)}, agent {output.seconds(self.open_s)}, "
            f"read {output.seconds(self.read_s)}, to device {output.seconds(self.apply_s)}, "
            f"first step {output.seconds(self.first_step_s)}"
        )


class _Run:
    """A loop, and what it has come to."""

    def __init__(
        self,
        task: Task,
        workload: Workload,
        device: Device,
        ckpt: Checkpointer,
        recovery: Recovery | None,
    ) -> None:
        self._task = task
        self._recovery = recovery
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
        while (step := self._ckpt.current_step + 1) <= last and not self._ckpt.should_stop:
            self._loss = train_step(self._workload, self._device, step)
            self._ckpt.step()
            self._steps += 1
            now = time.monotonic()
            if self._steps == 1 and self._recovery is not None:
                self._recovery.first_step_s = now - self._began
                say(str(self._recovery))
            if now - reported >= REPORT or step == last or self._ckpt.should_stop:
                reported = now
                self._seconds = now - self._began
                say(self._line(step))
        if self._ckpt.should_stop:
            say(self._farewell())
        if not self._steps:
            say(f"nothing to do: it is at step {self._ckpt.current_step}")

    def _farewell(self) -> str:
        step, newest = self._ckpt.current_step, self._ckpt.latest
        if newest == step:
            return f"stopped by SIGTERM at step {step}, checkpoint committed"
        stands = "there is none" if newest is None else f"the newest one is of step {newest}"
        return f"stopped by SIGTERM at step {step}, which has no checkpoint; {stands}"

    def _line(self, step: int) -> str:
        rate = self._task.tokens * self._steps / self._seconds
        emulated = " (emulated)" if self._device.emulated else ""
        return f"step {step}  loss {self._loss_value():.4f}  {rate:,.0f} tokens/s{emulated}"

    def _loss_value(self) -> float:
        return float("nan") if self._loss is None else float(self._loss)

    def document(self) -> dict[str, Any]:
        """The document of ``--json``."""
        return {
            "schema": 1,
            "kind": "train",
            "model": self._task.model,
            "device": self._task.device,
            "emulated": self._device.emulated,
            "restored_step": self._recovery and self._recovery.step,
            "recovery": self._recovery and self._recovery.document(),
            "step": self._ckpt.current_step,
            "stopped": self._ckpt.should_stop,
            "loss": None if self._loss is None else float(self._loss),
            "newest_checkpoint": self._ckpt.latest,
            "seconds": self._seconds,
        }
