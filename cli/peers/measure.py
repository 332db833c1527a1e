"""One measured run of somebody else's engine: the same loop, clock and comparison as for our own.

Runs in a worker of its own, on its main thread; see :mod:`gockpt.cli.bench_loop`.
"""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from pathlib import Path

import msgspec
import torch

from gockpt import inventory
from gockpt.cli import bench_loop
from gockpt.cli.bench_golden import Hashes
from gockpt.cli.bench_job import Job, Measured, Progress, SavedCheckpoint
from gockpt.cli.bench_loop import Clock, Say
from gockpt.cli.peers import catalog
from gockpt.cli.peers.engine import Engine, State, place, size
from gockpt.cli.peers.host import Host
from gockpt.cli.peers.saver import Reached, Saver
from gockpt.cli.task import real_workload, task_device
from gockpt.devices import Device
from gockpt.workloads import Workload


def run(job: Job, say: Say) -> Measured:
    """Train under the job's engine and account for every promised checkpoint.

    Raises:
        GockptError: the engine failed.
    """
    warnings = bench_loop.listen()
    say(Progress(stage="starting"))
    workload = real_workload(job, tokens=job.measured_tokens)
    device, _ = task_device(job)
    host = Host.of(device)
    directory = Path(job.directory) / "checkpoints"
    directory.mkdir(parents=True)
    engine = catalog.start(job.strategy or "", directory, host)
    saver = Saver(
        engine=engine,
        take=partial(state_of, workload),
        device=device,
        directory=directory,
        every=job.interval,
        rehearse=job.warmup >= 1,
    )
    hook = workload.optimizer.register_step_pre_hook(saver.before_update)
    clock = bench_loop.train(job, workload, device, saver, say)
    say(Progress(stage="draining", step=job.passes, of=job.passes))
    saver.wait()
    drained = time.monotonic()
    measured = _figures(job, saver, host, device, clock, drained, warnings)
    say(Progress(stage="verifying"))
    checkpoints = _account(job, engine, state_of(workload), clock, saver.reached)
    engine.close()
    device.close()
    hook.remove()
    del engine, saver
    gc.unfreeze()
    gc.collect()  # this process ends without finalizers, which would unlink shared semaphores
    return msgspec.structs.replace(measured, checkpoints=checkpoints)


def state_of(workload: Workload) -> State:
    """Everything that a checkpoint of now must hold; the tensors are named as in the golden run."""
    found = inventory.take(workload.model, {"": workload.optimizer})
    entries = found.layout.entries
    extras = {name: one.state_dict() for name, one in workload.extras.items()}
    return State(
        tensors={entries[index].name: tensor.detach() for index, tensor in found.present()},
        objects={"extras": extras, "rng": torch.get_rng_state()},
    )


def _figures(
    job: Job,
    saver: Saver,
    host: Host,
    device: Device,
    clock: Clock,
    drained: float,
    warnings: list[str],
) -> Measured:
    over = bench_loop.overruns(clock, job.warmup)
    return Measured(
        steps=clock.steps(),
        loop_s=clock.ends[-1] - clock.ends[job.warmup],
        blocked_s=clock.blocked[-1] - clock.blocked[job.warmup],
        drain_s=drained - clock.ends[-1],
        hook_s=statistics.median(clock.hooks()[job.warmup + 1 :]),
        checkpoints=[],
        in_flight_max=saver.in_flight_max,
        state_bytes=host.link.nbytes,
        gradient_bytes=0,
        persisted_bytes=sum(size(place(saver.directory, step)) for step in job.targets),
        predicted_bytes=None,
        overruns=None if over is None else over[0],
        overrun_s=0.0 if over is None else over[1],
        worst_overrun_s=0.0 if over is None else over[2],
        events={},
        warnings=warnings,
        spans=device.recorder.drain(),
    )


def _account(
    job: Job, engine: Engine, state: State, clock: Clock, reached: dict[int, Reached]
) -> list[SavedCheckpoint]:
    golden = msgspec.json.decode(Path(job.golden).read_bytes(), type=Hashes)
    return [
        _saved(engine, target, state, golden[target], clock, reached[target])
        for target in job.targets
    ]


def _saved(
    engine: Engine,
    target: int,
    state: State,
    golden: dict[str, str],
    clock: Clock,
    reached: Reached,
) -> SavedCheckpoint:
    differs = check(engine, target, state, golden)
    opened = clock.trained[target]
    return SavedCheckpoint(
        step=target,
        committed=True,  # the engine said so; whether it is there is part of the comparison
        identical=differs is None,
        difference=differs,
        blocked_s=clock.blocked[target + 1] - clock.blocked[target - 1],
        consistent_s=None if reached.staged is None else reached.staged - opened,
        durable_s=None if reached.saved is None else reached.saved - opened,
    )


def check(engine: Engine, step: int, state: State, golden: dict[str, str]) -> str | None:
    """Load a checkpoint by the engine's own reader; how it differs from the golden run, or None."""
    try:
        found = engine.load(step, state.empty())
    except Exception as error:  # noqa: BLE001 - a reader that fails is what is looked for
        reason = " ".join(str(error).split())
        return f"step {step}: cannot be loaded: {type(error).__name__}: {reason}"
    return bench_loop.difference(found, golden, step)
