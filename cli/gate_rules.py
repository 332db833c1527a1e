"""Which two runs may be compared. Pure; docs/ci.md gives the rules and their reasons.

What always holds: a difference that could explain a figure is refused or told, never passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gockpt.errors import ConfigError

Json = Mapping[str, Any]

WORKLOAD = (
    "model", "precision", "tokens_per_step", "steps", "interval", "seed", "windows", "params",
    "device_params",
)  # fmt: skip
"""What is trained. Another one has other ratios: refused."""

DEVICE = ("device", "emulated", "profile", "shrink")
"""On what. Refused, too."""

TOLD = ("python", "torch")
"""What changes little, or is what the change under test is about: told."""


def comparable(run: Json, baseline: Json, *, absolute: bool) -> list[str]:
    """Whether these two may be compared.

    Args:
        absolute: whether seconds are compared, and not ratios within each run.

    Returns:
        What a reader of the comparison must know.

    Raises:
        ConfigError: they may not, and what to do.
    """
    if run["kind"] != baseline["kind"]:
        raise ConfigError(
            f"the run is a {run['kind']} and the baseline a {baseline['kind']}; "
            "name a baseline of its kind"
        )
    if run["run_id"] == baseline["run_id"]:
        raise ConfigError(
            f"the run and the baseline are the same run, {run['run_id']}; name another baseline"
        )
    for part, names in (("workload", WORKLOAD), ("environment", DEVICE)):
        for name in names:
            _refuse(name, _of(run, part).get(name), _of(baseline, part).get(name))
    return _hosts(run, baseline, absolute=absolute) + [
        f"{name} is {_of(run, 'environment').get(name)}, and was "
        f"{_of(baseline, 'environment').get(name)} in the baseline"
        for name in TOLD
        if _of(run, "environment").get(name) != _of(baseline, "environment").get(name)
    ]


def _refuse(name: str, now: object, before: object) -> None:
    if now != before:
        raise ConfigError(
            f"{name} is {now!r} in the run and {before!r} in the baseline, so they do not compare; "
            "measure again with the baseline's options, or set a new baseline"
        )


def _hosts(run: Json, baseline: Json, *, absolute: bool) -> list[str]:
    now, before = _of(run, "environment").get("host"), _of(baseline, "environment").get("host")
    if now == before:
        return []
    if absolute and not _of(run, "environment").get("emulated"):
        raise ConfigError(
            f"the run is of {now} and the baseline of {before}: seconds of two machines do not "
            "compare; leave --absolute out to compare ratios"
        )
    return [f"the run is of another machine ({now}) than the baseline ({before})"]


def _of(document: Json, part: str) -> Json:
    found = document.get(part)
    return found if isinstance(found, Mapping) else {}
