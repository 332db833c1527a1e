"""Emulation profiles: one TOML file per accelerator and its host, each figure with its source.

The shipped ones lie beside this file in ``profiles/``; a user may give a file of his own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from gockpt.errors import DeviceError, suggestion

RATES = (
    "flops_achieved",
    "device_memory_bandwidth",
    "device_memory_bytes",
    "link_alone",
    "ssd_write",
    "host_replay",
    "host_memory_bandwidth",
)
"""What a shrunk emulation divides; the factors and the models' times stay."""

FIGURES = (*RATES, "link_computing_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured seconds of one model's step, which replace the computed ones."""

    forward_s: float
    backward_s: float
    update_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """An accelerator with its host. Rates are per second; bytes are bytes."""

    name: str
    title: str
    flops_achieved: float
    """Floating-point operations a second that training reaches, not the peak."""
    device_memory_bandwidth: float
    """Bytes a second that the optimizer update reaches."""
    device_memory_bytes: float
    link_alone: float
    """Bytes a second from device to pinned host memory while the device is idle."""
    link_computing_factor: float
    """The share of that while the device computes."""
    ssd_write: float
    """Bytes a second, durable."""
    host_replay: float
    """AdamW updates of one parameter a second on the host."""
    host_memory_bandwidth: float
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure is from; ``assumed`` is an honest answer."""
    models: Mapping[str, Calibration] = field(default_factory=dict)

    def shrunk(self, shrink: int) -> Profile:
        """The profile for tensors of 1/``shrink`` of the bytes, so that times stay the same."""
        return replace(self, **{name: getattr(self, name) / shrink for name in RATES})


def profile_names() -> list[str]:
    """The shipped profiles."""
    return sorted(Path(each.name).stem for each in _shipped().iterdir() if _is_toml(each.name))


def load_profile(name_or_path: str | Path) -> Profile:
    """Read a shipped profile by its name, or any by its path (ending in ``.toml``).

    Raises:
        DeviceError: no such profile (with the nearest name), or one that is not complete.
    """
    text = str(name_or_path)
    if _is_toml(text):
        path = Path(text)
        try:
            return _parse(path.stem, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DeviceError(f"cannot read the profile {text}: {error}") from error
    names = profile_names()
    if text not in names:
        raise DeviceError(f"no emulation profile is called {text!r}; {nearest(text, names)}")
    return _parse(text, (_shipped() / f"{text}.toml").read_text(encoding="utf-8"))


def nearest(wrong: str, names: list[str]) -> str:
    """What to suggest instead of a wrong name."""
    return suggestion(wrong, names, otherwise="use one of:", cutoff=0.5)


def _shipped() -> Traversable:
    return resources.files("gockpt.devices") / "profiles"


def _is_toml(name: str) -> bool:
    return name.endswith(".toml")


def _parse(name: str, text: str) -> Profile:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DeviceError(f"profile {name!r} is not valid TOML: {error}") from error
    title = document.pop("title", name)
    models = document.pop("models", {})
    _same_keys(f"profile {name!r}", document, FIGURES)
    return Profile(
        name=name,
        title=str(title),
        models={model: _calibration(name, model, entry) for model, entry in models.items()},
        sources={key: _source(name, key, entry) for key, entry in document.items()},
        **{key: _positive(name, key, entry.get("value")) for key, entry in document.items()},
    )


def _calibration(name: str, model: str, entry: Any) -> Calibration:
    what = f"models.{model}"
    source = _source(name, what, entry)
    times = {key: value for key, value in entry.items() if key != "source"}
    known = [each.name for each in fields(Calibration) if each.name != "source"]
    _same_keys(f"profile {name!r}: {what}", times, known)
    checked = {key: _positive(name, f"{what}.{key}", value) for key, value in times.items()}
    return Calibration(source=source, **checked)


def _same_keys(what: str, found: Mapping[str, Any], expected: Sequence[str]) -> None:
    wrong = [f"{key} is missing" for key in expected if key not in found]
    wrong += [f"{key} is unknown" for key in found if key not in expected]
    if wrong:
        raise DeviceError(f"{what}: {', '.join(wrong)}; see docs/emulation.md for the figures")


def _source(name: str, key: str, entry: Any) -> str:
    source = entry.get("source") if isinstance(entry, dict) else None
    if not isinstance(source, str) or not source:
        raise DeviceError(f'profile {name!r}: {key} has no source; name one, or write "assumed"')
    return source


def _positive(name: str, key: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise DeviceError(f"profile {name!r}: {key} is {value!r}; give a number above 0")
    return float(value)
