"""From the figures of a job to its workload and its device. Runs in the workers."""

from __future__ import annotations

import torch

from gockpt.agent.protocol import Pace
from gockpt.cli.bench_job import Job
from gockpt.devices import Device, EmulatedDevice, ModelledWork, load_profile, model_work, open_device
from gockpt.devices.profiles import Profile
from gockpt.workloads import Workload, build, find_precision, find_preset, param_count, shrunk

FEWEST_TOKENS = 4
"""Of a workload that is only built to be measured."""


def real_device(device: str) -> torch.device:
    """Where the tensors of a device really are."""
    return torch.device(device if device.startswith("cuda") else "cpu")


def real_workload(job: Job, *, tokens: int | None = None) -> Workload:
    """What is really trained."""
    return build(
        job.model,
        precision=job.precision,
        seed=job.seed,
        shrink=job.shrink,
        device=real_device(job.device),
        tokens=tokens or job.real_tokens or FEWEST_TOKENS,
        data=job.data,
    )


def profile_of(job: Job) -> Profile | None:
    """The profile of an emulated device, else None."""
    kind, _, name = job.device.partition(":")
    return load_profile(job.profile_file or name) if kind == "emulated" else None


def modelled_work(job: Job) -> ModelledWork | None:
    """The times of a step of the full model on an emulated device, else None."""
    profile = profile_of(job)
    if profile is None:
        return None
    preset = find_preset(job.model)
    params = param_count(preset)
    return model_work(
        profile,
        params=params,
        tokens=job.tokens,
        layers=preset.layers,
        d_model=preset.d_model,
        context=min(preset.context, job.tokens),
        update_bytes_per_param=find_precision(job.precision).update_bytes,
        # The true ratio of the sizes, not w²: what does not shrink with w² must not cost time.
        shrink=round(params / param_count(shrunk(preset, job.shrink))),
        model=preset.name if job.calibrated else None,
    )


def job_device(job: Job) -> tuple[Device, Pace | None]:
    """The device of a job, opened, and the modelled rates of its host."""
    device = open_device(job.device, work=modelled_work(job), profile_path=job.profile_file)
    if not isinstance(device, EmulatedDevice):
        return device, None
    rates = device.rates
    pace = Pace(
        write=rates.ssd_write, replay=rates.host_replay, memory=rates.host_memory_bandwidth
    )
    return device, pace
