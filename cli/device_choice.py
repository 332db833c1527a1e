"""Which device ``--device`` means, and whether the model fits on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gockpt.cli import output
from gockpt.devices import device_names, load_profile
from gockpt.devices.profiles import nearest
from gockpt.devices.work import ACTIVATION_BYTES, RESIDENT_BYTES_PER_PARAM
from gockpt.errors import ConfigError, DeviceError
from gockpt.workloads import Preset, param_count

AUTO = "auto"
DEFAULT_PROFILE = "a100-pcie4"
EMULATED = "emulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A device that can be opened."""

    device: str
    profile: str | None
    """Of an emulated device: its name, or the path of its file."""
    note: str = ""
    """Why this one, where the user left it open."""


def choose_device(
    wanted: str, preset: Preset, tokens: int, *, profile_file: str | None = None
) -> Choice:
    """Resolve ``auto``, ``cpu``, ``cuda[:N]`` or ``emulated:PROFILE``.

    ``auto`` is CUDA if there is one that the model fits on, else the emulated A100; a model that a
    CPU really trains runs on the CPU.

    Raises:
        DeviceError: no such device or profile (with the nearest name), or not there.
        ConfigError: the model does not fit, or a profile's file is given for a real device.
    """
    kind, _, detail = wanted.partition(":")
    if profile_file is not None:
        if kind not in (AUTO, EMULATED):
            raise ConfigError(
                f"--profile-file is for emulated devices; leave out --device {wanted}"
            )
        load_profile(profile_file)
        name = Path(profile_file).stem
        return Choice(device=f"{EMULATED}:{name}", profile=profile_file)
    if wanted == AUTO:
        return _automatic(preset, tokens)
    if kind == EMULATED and detail:
        load_profile(detail)
        return Choice(device=wanted, profile=detail)
    if wanted == "cpu":
        return Choice(device="cpu", profile=None)
    if wanted == "cuda" or (kind == "cuda" and detail.isdigit()):
        index = int(detail or 0)
        problem = _cuda_problem(index, preset, tokens)
        if problem is not None:
            raise DeviceError(problem)
        return Choice(device=f"cuda:{index}", profile=None)
    raise DeviceError(f"no device is called {wanted!r}; {nearest(wanted, [AUTO, *device_names()])}")


def _automatic(preset: Preset, tokens: int) -> Choice:
    if preset.shrink == 1:
        return Choice(
            device="cpu", profile=None, note="device: cpu (small enough to be trained there)"
        )
    problem = _cuda_problem(0, preset, tokens)
    if problem is None:
        return Choice(
            device="cuda:0", profile=None, note="device: cuda:0 (there, and the model fits)"
        )
    return Choice(
        device=f"{EMULATED}:{DEFAULT_PROFILE}",
        profile=DEFAULT_PROFILE,
        note=f"device: {EMULATED}:{DEFAULT_PROFILE} ({problem.partition(';')[0]})",
    )


def device_bytes(preset: Preset, tokens: int) -> int:
    """Device memory that training takes: 20 bytes a parameter, and activations."""
    activations = ACTIVATION_BYTES * tokens * preset.layers * preset.d_model
    return RESIDENT_BYTES_PER_PARAM * param_count(preset) + activations


def _cuda_problem(index: int, preset: Preset, tokens: int) -> str | None:
    """Why the model cannot run on this CUDA device, or None."""
    import torch

    if not torch.cuda.is_available():
        return "there is no CUDA device; use cpu, or emulated:a100-pcie4"
    if index >= torch.cuda.device_count():
        return f"there is no cuda:{index}, only {torch.cuda.device_count()}; use cuda:0"
    free, _ = torch.cuda.mem_get_info(index)
    need = device_bytes(preset, tokens)
    if need > free:
        return (
            f"{preset.name} needs {output.size(need)} of cuda:{index}, which has "
            f"{output.size(free)} free; use a smaller --model, or emulated:{DEFAULT_PROFILE}"
        )
    return None
