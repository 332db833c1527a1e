"""One measured run: a loop under one strategy, then its checkpoints against the golden run.

Runs in a worker of its own, on its main thread. What always holds: nothing but training and the
strategy happens between the clock's readings.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

import gockpt
from gockpt import faults
from gockpt.cli.bench_golden import Hashes, tensor_hash
from gockpt.cli.bench_job import Job, Measured, Progress, SavedCheckpoint
from gockpt.cli.task import real_workload, task_device
from gockpt.devices import Device, EmulatedDevice
from gockpt.storage import Checkpoint
from gockpt.workloads import Workload, train_step

Say = Callable[[Progress], None]


class Saver(Protocol):
    """Whatever makes checkpoints of a loop."""

    def step(self) -> object:
        """A pass has ended."""
        ...


@dataclass(slots=True)
class Clock:
    """Readings at the end of each pass; index 0 is the start."""

    trained: list[float] = field(default_factory=list)
    """Before ``ckpt.step()``: when the first window of a checkpoint opens."""
    ends: list[float] = field(default_factory=list)
    """Behind it."""
    blocked: list[float] = field(default_factory=list)
    overruns: list[tuple[int, float, float]] = field(default_factory=list)

    def read(self, device: Device) -> None:
        """A pass has ended."""
        self.ends.append(time.monotonic())
        self.blocked.append(device.blocked_seconds())
        if isinstance(device, EmulatedDevice):
            # The worst one starts afresh after each reading, so that the warm-up can be left out.
            self.overruns.append((device.overruns, device.overrun_s, device.worst_overrun_s))
            device.worst_overrun_s = 0.0

    def steps(self) -> list[tuple[int, float]]:
        return [(n, self.ends[n] - self.ends[n - 1]) for n in range(1, len(self.ends))]

    def hooks(self) -> list[float]:
        """Seconds of ``ckpt.step()`` in each pass."""
        return [end - trained for trained, end in zip(self.trained, self.ends, strict=True)]


def run(job: Job, say: Say) -> Measured:
    """Train under the job's strategy and account for every promised checkpoint."""
    warnings = listen()
    faults.arm(job.faults)
    say(Progress(stage="starting"))
    workload = real_workload(job, tokens=job.measured_tokens)
    device, pace = task_device(job)
    with gockpt.Checkpointer(
        workload.model,
        workload.optimizer,
        job.directory,
        every=job.interval,
        strategy=job.strategy or "none",
        keep=None,
        extras=workload.extras,
        windows=job.windows,
        on_error="warn",
        device=device,
        pace=pace,
    ) as ckpt:
        clock = train(job, workload, device, ckpt, say)
        say(Progress(stage="draining", step=job.passes, of=job.passes))
        ckpt.wait()
        drained = time.monotonic()
        measured = _figures(job, ckpt, device, clock, drained, warnings)
        saved = ckpt.client.totals.latencies if ckpt.client else []
    device.close()
    say(Progress(stage="verifying"))
    checkpoints = _account(job, clock, saved) if ckpt.engine is not None else []
    return msgspec.structs.replace(measured, checkpoints=checkpoints)


def train(job: Job, workload: Workload, device: Device, ckpt: Saver, say: Say) -> Clock:
    """The loop, with ``ckpt.step()`` at the end of each pass."""
    clock = Clock()
    # A full collection walks everything that torch has imported: not in the middle of a phase.
    gc.collect()
    gc.freeze()
    clock.trained.append(time.monotonic())
    clock.read(device)
    for step in range(1, job.passes + 1):
        train_step(workload, device, step)
        clock.trained.append(time.monotonic())
        ckpt.step()
        if step in (job.warmup, job.passes):
            _await_compute(workload)
        clock.read(device)
        say(Progress(stage="training", step=step, of=job.passes))
    return clock


def _await_compute(workload: Workload) -> None:
    """Let the clock's next reading be of finished work; copies may go on."""
    if workload.device.type == "cuda":
        torch.cuda.current_stream(workload.device).synchronize()


def _figures(
    job: Job,
    ckpt: gockpt.Checkpointer,
    device: Device,
    clock: Clock,
    drained: float,
    warnings: list[str],
) -> Measured:
    engine, client = ckpt.engine, ckpt.client
    totals = client.totals if client else None
    over = overruns(clock, job.warmup)
    return Measured(
        steps=clock.steps(),
        loop_s=clock.ends[-1] - clock.ends[job.warmup],
        blocked_s=clock.blocked[-1] - clock.blocked[job.warmup],
        drain_s=drained - clock.ends[-1] if client else 0.0,
        hook_s=statistics.median(clock.hooks()[job.warmup + 1 :]),
        checkpoints=[],
        in_flight_max=totals.in_flight_max if totals else 0,
        state_bytes=engine.state_bytes if engine else 0,
        gradient_bytes=engine.gradient_bytes if engine else 0,
        persisted_bytes=totals.persisted_bytes if totals else 0,
        predicted_bytes=engine.predicted_bytes if engine else 0,
        overruns=None if over is None else over[0],
        overrun_s=0.0 if over is None else over[1],
        worst_overrun_s=0.0 if over is None else over[2],
        events=dict(engine.events) if engine else {},
        warnings=warnings,
        spans=device.recorder.drain(),
    )


def overruns(clock: Clock, warmup: int) -> tuple[int, float, float] | None:
    """Count, seconds in all and seconds at worst of the overruns behind the warm-up."""
    if not clock.overruns:
        return None
    before, after = clock.overruns[warmup], clock.overruns[-1]
    worst = max((reading[2] for reading in clock.overruns[warmup + 1 :]), default=0.0)
    return after[0] - before[0], after[1] - before[1], worst


# -- the checkpoints -------------------------------------------------------------------------------


def _account(
    job: Job, clock: Clock, latencies: list[tuple[int, str, float]]
) -> list[SavedCheckpoint]:
    golden = msgspec.json.decode(Path(job.golden).read_bytes(), type=Hashes)
    reached = {(step, stage): when for step, stage, when in latencies}
    return [_saved(job, target, golden[target], clock, reached) for target in job.targets]


def _saved(
    job: Job,
    target: int,
    golden: dict[str, str],
    clock: Clock,
    reached: dict[tuple[int, str], float],
) -> SavedCheckpoint:
    try:
        checkpoint = gockpt.open(job.directory, target)
    except gockpt.NoCheckpointError as error:
        return SavedCheckpoint(step=target, committed=False, difference=str(error))
    info = checkpoint.info
    opened = clock.trained[info.base]

    def latency(stage: str) -> float | None:
        when = reached.get((target, stage))
        return None if when is None else when - opened

    differs = compare(checkpoint, golden)
    return SavedCheckpoint(
        step=target,
        committed=True,
        windows=info.windows,
        fallback=info.fallback,
        proof=str(info.proof.get("outcome", "off")),
        identical=differs is None,
        difference=differs,
        # From the opening of its first window to the update behind which its last one closed.
        blocked_s=clock.blocked[target + 1] - clock.blocked[max(0, info.base - 1)],
        consistent_s=latency("consistent"),
        durable_s=latency("durable"),
    )


def compare(checkpoint: Checkpoint, golden: dict[str, str]) -> str | None:
    """The first thing in which a checkpoint differs from the golden run, or None."""
    try:
        tensors = checkpoint.load(threads=1)
    except gockpt.StorageError as error:
        return str(error)
    return difference(tensors, golden, checkpoint.step)


def difference(tensors: Mapping[str, Tensor], golden: Mapping[str, str], step: int) -> str | None:
    """The first thing in which the tensors of a checkpoint differ from the golden run, or None."""
    missing = sorted(golden.keys() - tensors.keys())
    if missing:
        return f"step {step}: {missing[0]!r} is missing"
    for name, expected in golden.items():
        if tensor_hash(tensors[name]) != expected:
            return f"step {step}: {name!r} is not as in the golden run"
    return None


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listen() -> list[str]:
    """The list that gockpt's warnings of this process will be in."""
    handler = _Collect()
    logging.getLogger("gockpt").addHandler(handler)
    return handler.lines
