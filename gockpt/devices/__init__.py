"""Accelerators as the engine sees them: a copy stream, a gate, a clock. See :mod:`.base`.

``cpu`` is the host itself, ``cuda`` a real accelerator, ``emulated`` one that is acted by the host
in modelled time. They are opened by name and used through one protocol.
"""

from __future__ import annotations

from pathlib import Path

from gockpt.devices.base import Copied, Device, Pair
from gockpt.devices.cpu import CpuDevice
from gockpt.devices.emulated import EmulatedDevice
from gockpt.devices.profiles import Profile, load_profile, nearest, profile_names
from gockpt.devices.work import ModelledWork, model_work
from gockpt.errors import DeviceError
from gockpt.events import Recorder

__all__ = [
    "Copied",
    "CpuDevice",
    "Device",
    "EmulatedDevice",
    "ModelledWork",
    "Pair",
    "Profile",
    "device_names",
    "load_profile",
    "model_work",
    "open_device",
    "profile_names",
]


def device_names() -> list[str]:
    """Every device that can be asked for by name, there or not."""
    return ["cpu", "cuda", *(f"emulated:{name}" for name in profile_names())]


def open_device(
    spec: str,
    *,
    work: ModelledWork | None = None,
    profile_path: str | Path | None = None,
    recorder: Recorder | None = None,
) -> Device:
    """Open ``cpu``, ``cuda``, ``cuda:N`` or ``emulated:PROFILE``.

    Args:
        work: the times to emulate; needed for, and only for, an emulated device.
        profile_path: a profile's file, used in place of the shipped profiles.
        recorder: where spans go; one of its own if None.

    Raises:
        DeviceError: no such device, with the nearest name; or one that cannot be used here.
    """
    kind, _, detail = spec.partition(":")
    if spec == "cpu":
        return CpuDevice(recorder=recorder)
    if kind == "cuda" and (detail.isdigit() or spec == "cuda"):
        from gockpt.devices.cuda import CudaDevice

        return CudaDevice(int(detail or 0), recorder=recorder)
    if kind == "emulated" and detail:
        if work is None:
            raise DeviceError(f"{spec} needs the work to emulate; give the times of a step")
        profile = load_profile(detail if profile_path is None else profile_path)
        return EmulatedDevice(profile, work, recorder=recorder)
    raise DeviceError(f"no device is called {spec!r}; {nearest(spec, device_names())}")
