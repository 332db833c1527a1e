"""What to train and where: one record that bench, its workers, train and plan all begin with.

:func:`resolve` makes it from what the user said; whichever process trains then builds workload and
device from it.
"""

from __future__ import annotations

import msgspec
import torch

from gockpt.agent.protocol import Pace
from gockpt.cli.device_choice import choose_device
from gockpt.devices import (
    Device,
    EmulatedDevice,
    ModelledWork,
    Profile,
    load_profile,
    model_work,
    open_device,
)
from gockpt.errors import ConfigError
from gockpt.workloads import (
    Precision,
    Preset,
    Workload,
    build,
    find_precision,
    find_preset,
    param_count,
    shrunk,
)
from gockpt.workloads.build import batch_shape
from gockpt.workloads.data import Loader, read_text

MOST_REAL_TOKENS = 64
"""A step that is emulated really trains on no more than this."""

FEWEST_REAL_TOKENS = 4


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its precision and data, on a device."""

    model: str
    device: str
    """``cpu``, ``cuda:0``, ``emulated:a100-pcie4``."""
    profile_file: str | None
    precision: str
    seed: int
    data: str | None
    tokens: int
    """Of a step of the full model."""
    calibrated: bool
    """Whether the profile's own times of this model hold: they are of its usual job."""

    @property
    def preset(self) -> Preset:
        """The model in its true size."""
        return find_preset(self.model)

    @property
    def number_format(self) -> Precision:
        return find_precision(self.precision)

    @property
    def profile(self) -> Profile | None:
        """Of the emulated accelerator; None on a real device."""
        kind, _, name = self.device.partition(":")
        return load_profile(self.profile_file or name) if kind == "emulated" else None

    @property
    def shrink(self) -> int:
        """The factor w by which the model is really smaller; 1 on a real device."""
        return self.preset.shrink if self.device.startswith("emulated:") else 1

    @property
    def real_preset(self) -> Preset:
        """The model that is really trained."""
        return self.preset if self.shrink == 1 else shrunk(self.preset)

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors really are."""
        return torch.device(self.device if self.device.startswith("cuda") else "cpu")

    @property
    def real_tokens(self) -> int:
        """Of a step as it is really computed, where nobody has measured what is affordable."""
        return self.tokens if self.profile is None else FEWEST_REAL_TOKENS


def resolve(
    *,
    model: str,
    device: str,
    tokens: int | None,
    precision: str | None,
    seed: int = 0,
    data: str | None = None,
    profile_file: str | None = None,
) -> tuple[Task, str]:
    """Check what the user said, and fill in what he left open.

    Returns:
        The task, and a line that says how the device was chosen (empty if he named it).

    Raises:
        ConfigError, DeviceError: what cannot work, and what to do.
    """
    preset = find_preset(model)
    if tokens is not None and tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, not {tokens}")
    if seed < 0:
        raise ConfigError(f"--seed must not be negative, not {seed}")
    number = find_precision(precision or preset.precision)
    size = preset.tokens if tokens is None else tokens
    batch_shape(preset, size)
    choice = choose_device(device, preset, size, profile_file=profile_file)
    task = Task(
        model=preset.name,
        device=choice.device,
        profile_file=profile_file,
        precision=number.name,
        seed=seed,
        data=data,
        tokens=size,
        calibrated=tokens is None and number.name == preset.precision,
    )
    _check_data(task)
    return task, choice.note


def _check_data(task: Task) -> None:
    real = task.real_preset
    if task.profile is None:
        rows, length = batch_shape(real, task.tokens)
    else:
        rows, length = 1, min(real.context, MOST_REAL_TOKENS)
    Loader(read_text(task.data), rows=rows, length=length, seed=task.seed)


def real_workload(task: Task, *, tokens: int | None = None) -> Workload:
    """What is really trained, with this many tokens a step (default: ``task.real_tokens``)."""
    return build(
        task.preset,
        precision=task.precision,
        seed=task.seed,
        shrink=task.shrink,
        device=task.torch_device,
        tokens=tokens or task.real_tokens,
        data=task.data,
    )


def modelled_work(task: Task) -> ModelledWork | None:
    """The times of a step of the full model on an emulated device, else None."""
    profile, preset = task.profile, task.preset
    if profile is None:
        return None
    params = param_count(preset)
    return model_work(
        profile,
        params=params,
        tokens=task.tokens,
        layers=preset.layers,
        d_model=preset.d_model,
        context=min(preset.context, task.tokens),
        update_bytes_per_param=task.number_format.update_bytes,
        # The true ratio of the sizes, not w²: what does not shrink with w² must not cost time.
        shrink=round(params / param_count(task.real_preset)),
        model=preset.name if task.calibrated else None,
    )


def task_device(task: Task) -> tuple[Device, Pace | None]:
    """The device, opened, and the modelled rates of its host (None: as fast as it goes)."""
    device = open_device(task.device, work=modelled_work(task), profile_path=task.profile_file)
    if not isinstance(device, EmulatedDevice):
        return device, None
    rates = device.rates
    pace = Pace(write=rates.ssd_write, replay=rates.host_replay, memory=rates.host_memory_bandwidth)
    return device, pace
