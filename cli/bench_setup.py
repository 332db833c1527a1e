"""Before the first step of a bench: every argument checked, everything resolved, room made sure of.

Runs in the parent. What always holds: what cannot work is refused here, in one line with numbers,
and nothing has been created by then.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gockpt.cli import memory, output
from gockpt.cli.device_choice import choose_device, real_preset
from gockpt.devices import load_profile
from gockpt.devices.profiles import Profile
from gockpt.errors import ConfigError
from gockpt.strategies.policy import POLICIES, policy
from gockpt.workloads import Precision, Preset, find_precision, find_preset, param_count
from gockpt.workloads.build import batch_shape
from gockpt.workloads.data import Loader, read_text
from gockpt.workloads.measure import CANDIDATES

WARMUP = 2
"""Steps at the start that no figure counts: allocations, first touches, caches."""

SLOTS = 2
PROCESS_BYTES = 600 << 20
"""What a trainer and an agent take besides tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for; None: choose for me."""

    model: str
    device: str
    strategies: str | None
    steps: int
    interval: int
    tokens: int | None
    windows: int | None
    precision: str | None
    seed: int
    data: str | None
    directory: str | None
    profile_file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A bench that can be run."""

    preset: Preset
    device: str
    device_note: str
    """How the device was chosen, for the user; empty if he named it."""
    profile: Profile | None
    profile_file: str | None
    precision: Precision
    strategies: tuple[str, ...]
    """In the order in which they run, ``none`` first and last."""
    steps: int
    interval: int
    tokens: int
    calibrated: bool
    windows: int | None
    seed: int
    data: str | None
    directory: Path

    @property
    def shrink(self) -> int:
        """The factor w of the emulation, or 1."""
        return 1 if self.profile is None else self.preset.shrink

    @property
    def real_preset(self) -> Preset:
        """The model that is really trained."""
        return real_preset(self.preset, self.profile)

    @property
    def warmup(self) -> int:
        """Steps left out; fewer where no checkpoint would be left to count."""
        return min(WARMUP, self.steps // self.interval * self.interval - 1)


def prepare(options: Options) -> Setup:
    """Check and resolve.

    Raises:
        ConfigError, DeviceError: what cannot work, and what to do.
    """
    preset = find_preset(options.model)
    _check_numbers(options)
    precision = find_precision(options.precision or preset.precision)
    strategies = order_strategies(options.strategies)
    tokens = preset.tokens if options.tokens is None else options.tokens
    batch_shape(preset, tokens)
    profile_file = options.profile_file
    choice = choose_device(options.device, preset, tokens, profile_file=profile_file)
    profile = load_profile(profile_file or choice.profile) if choice.profile else None
    setup = Setup(
        preset=preset,
        device=choice.device,
        device_note=choice.note,
        profile=profile,
        profile_file=profile_file,
        precision=precision,
        strategies=strategies,
        steps=options.steps,
        interval=options.interval,
        tokens=tokens,
        calibrated=options.tokens is None and precision.master,
        windows=options.windows,
        seed=options.seed,
        data=options.data,
        directory=Path(options.directory or tempfile.gettempdir()),
    )
    _check_data(setup)
    _check_directory(setup.directory)
    check_room(setup)
    return setup


def order_strategies(names: str | None) -> tuple[str, ...]:
    """All strategies that run, ``none`` first and last.

    Raises:
        ConfigError: an unknown name (with the nearest), or none at all.
    """
    wanted = list(POLICIES) if names is None else [one.strip() for one in names.split(",")]
    if not any(wanted):
        raise ConfigError(f"no strategies given; choose from {', '.join(POLICIES)}")
    found = [policy(name).name for name in wanted if name]
    middle = [name for name in dict.fromkeys(found) if name != "none"]
    return ("none", *middle, "none")


def _check_numbers(options: Options) -> None:
    positive = {
        "--steps": options.steps,
        "--interval": options.interval,
        "--tokens": options.tokens,
        "--windows": options.windows,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if options.seed < 0:
        raise ConfigError(f"--seed must not be negative, not {options.seed}")
    if options.interval > options.steps:
        raise ConfigError(
            f"--interval {options.interval} is longer than --steps {options.steps}, so there would "
            "be no checkpoint; give more steps"
        )


def _check_data(setup: Setup) -> None:
    real = setup.real_preset
    if setup.profile is None:
        rows, length = batch_shape(real, setup.tokens)
    else:
        rows, length = 1, min(real.context, max(CANDIDATES))
    Loader(read_text(setup.data), rows=rows, length=length, seed=setup.seed)


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(f"--dir {directory}: no such directory; make it or name another")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--dir {directory}: cannot be written; name another directory")


def check_room(setup: Setup) -> None:
    """Refuse what will not fit in memory or on the disk.

    Raises:
        ConfigError: with the bytes needed and those there are.
    """
    params = param_count(setup.real_preset)
    image = params * setup.precision.state_bytes
    need = image * (setup.steps // setup.interval)
    free = shutil.disk_usage(setup.directory).free
    if need > free:
        raise ConfigError(
            f"--dir {setup.directory}: the checkpoints of one strategy need {output.size(need)} and "
            f"{output.size(free)} are free; name a larger disk or give fewer --steps"
        )
    host = SLOTS * image + 2 * params * setup.precision.grad_bytes + PROCESS_BYTES
    if not setup.device.startswith("cuda"):
        host += image + 2 * params * 4  # the training itself, with gradients
    there = memory.available()
    if host > there:
        raise ConfigError(
            f"{setup.preset.name} on {setup.device} needs {output.size(host)} of memory and "
            f"{output.size(there)} are available; choose a smaller --model"
        )
