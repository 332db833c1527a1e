"""The golden run: what every strategy's training, and every checkpoint, must be bit for bit.

Runs in a worker of its own, untimed, with no device model and no checkpoints. It also finds out how
many tokens a real step may have, and what an agent with nothing to do takes in memory, so that all
workers that follow are measured alike.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from gockpt import inventory
from gockpt.agent import launch
from gockpt.agent.protocol import PROTOCOL, Hello, Pace
from gockpt.cli import memory
from gockpt.cli.bench_job import REAL_SHARE, Golden, Job, Progress
from gockpt.cli.task import modelled_work, real_workload
from gockpt.errors import AgentError
from gockpt.workloads import Workload, measure_real_tokens, train_step

Hashes = dict[int, dict[str, str]]
"""Step → name of a tensor → hash of its bytes."""


START_TIMEOUT = 120.0
"""Seconds that an agent may take to start."""


class _Bare:
    """A device for ``train_step`` on which phases mean nothing."""

    def phase(self, name: str, step: int) -> AbstractContextManager[object]:
        return nullcontext()


def run(job: Job, say: Callable[[Progress], None]) -> Golden:
    """Train, and write the hashes of all tensors at each target."""
    with _idle_agent(Path(job.directory)) as idle:
        work = modelled_work(job)
        budget = None if work is None else REAL_SHARE * (work.forward_s + work.backward_s)
        real_s, tokens = None, job.measured_tokens or job.real_tokens
        if job.measured_tokens is None and budget is not None:
            found = measure_real_tokens(real_workload(job), budget)
            real_s, tokens = found.seconds, found.tokens
        workload = real_workload(job, tokens=tokens)
        Path(job.golden).write_bytes(msgspec.json.encode(_train(workload, job, say)))
        return Golden(
            real_tokens=tokens,
            real_s=real_s,
            modelled_s=None if work is None else work.forward_s + work.backward_s,
            idle_agent_bytes=idle(),
        )


def _train(workload: Workload, job: Job, say: Callable[[Progress], None]) -> Hashes:
    hashes: Hashes = {}
    for step in range(1, job.targets[-1] + 1):
        train_step(workload, _Bare(), step)
        if step in job.targets:
            hashes[step] = state_hashes(workload)
        say(Progress(stage="training", step=step, of=job.targets[-1]))
    return hashes


def state_hashes(workload: Workload) -> dict[str, str]:
    """Hash of every tensor that a checkpoint of now must hold, by its name there."""
    found = inventory.take(workload.model, {"": workload.optimizer})
    return {
        found.layout.entries[index].name: tensor_hash(tensor) for index, tensor in found.present()
    }


def tensor_hash(tensor: Tensor) -> str:
    """xxh3-128 of dtype, shape and the bytes in C order."""
    plain = tensor.detach().to("cpu").contiguous()
    digest = xxhash.xxh3_128(f"{plain.dtype} {tuple(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _idle_agent(directory: Path) -> Iterator[Callable[[], int | None]]:
    """An agent that starts while the golden run trains; gives a function that measures it."""
    running = launch.start("process", directory / ".gockpt" / "rank-00000.log")

    def measure() -> int | None:
        running.channel.send(_hello(directory))
        if running.channel.receive(START_TIMEOUT) is None:
            raise AgentError(f"the agent was not ready after {START_TIMEOUT:.0f} s")
        found = [size for pid in memory.children(os.getpid()) if (size := memory.pss(pid))]
        return max(found, default=None)

    try:
        yield measure
    finally:
        running.channel.close()
        running.kill()


def _hello(directory: Path) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        directory=str(directory.absolute()),
        rank=0,
        world_size=1,
        run_id=secrets.token_hex(8),
        launch_id=secrets.token_hex(4),
        threads=1,
        keep=None,
        pace=Pace(),
        proof=True,
        exact=True,
        require_exact=False,
        trainer=os.getpid(),
        started=0,
        linger=0.0,
        meeting=None,
        faults=[],
    )
