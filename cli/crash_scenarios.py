"""What may happen to a training: the scenarios by family, and the points at which they strike.

Pure data. A point is a place in gockpt where a process can be made to stand still
(:mod:`gockpt.faults`), or a moment of the loop; ``random`` is a random moment.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from gockpt.errors import ConfigError

RANDOM = "random"
WINDOWS = ("state-first", "state-middle", "state-last")

POINTS: dict[str, str] = {
    RANDOM: "a random moment",
    "state-first": "the state of the first window is queued",
    "state-middle": "that of a window in the middle",
    "state-last": "that of the last window, the target's",
    "gradients": "the gradients of an update are queued",
    "replay": "the agent is about to replay an update",
    "half-written": "half of the data is written",
    "unsynced": "all data is written, nothing is synced",
    "manifest": "the manifest has its temporary name",
    "committed": "just after the commit",
    "retention": "an older checkpoint is being deleted",
    "tier-half": "half of the data is written to the second tier",
    "tier-unsynced": "the data is on the second tier, not yet synced",
    "restore-read": "the restart is reading the checkpoint",
    "forward": "ahead of the forward",
    "backward": "in the backward",
    "update": "between the update and the end of the pass",
    "data": "of the data",
    "header": "of the file's header",
    "sync": "when the data is synced",
}

STANDSTILLS = tuple(POINTS)[1:13]
"""Points at which a process stands still until it is decided what happens."""

TRAINERS_OWN = (*WINDOWS, "gradients")
"""Those of them that the trainer passes; the agent passes the others."""

MULTI_STEP = ("state-first", "state-middle", "gradients", "replay")
"""Those that only a checkpoint over several windows passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One thing that may happen."""

    name: str
    family: str
    summary: str
    points: tuple[str, ...]


def _family(family: str, *rows: tuple[str, str, tuple[str, ...]]) -> list[Scenario]:
    return [Scenario(name=n, family=family, summary=s, points=p) for n, s, p in rows]


_EVERYWHERE = (RANDOM, *STANDSTILLS)

SCENARIOS: dict[str, Scenario] = {
    one.name: one
    for one in (
        *_family(
            "process",
            ("kill-trainer", "SIGKILL to the trainer", _EVERYWHERE),
            ("kill-agent", "SIGKILL to the agent; training goes on", _EVERYWHERE),
            ("kill-both", "SIGKILL to the trainer, then to the agent", _EVERYWHERE),
            ("reboot", "both at the same instant, and what is in memory is lost", _EVERYWHERE),
            ("hang-trainer", "SIGSTOP to the trainer, found by a deadline", (RANDOM, *WINDOWS)),
            ("hang-agent", "SIGSTOP to the agent", (RANDOM, "half-written", "replay")),
            ("sigterm", "SIGTERM with grace", (RANDOM, *WINDOWS, "half-written")),
            ("exception", "an exception in the loop", ("forward", "backward", "update")),
            ("out-of-memory", "a limit of the address space", (RANDOM,)),
            ("crash-in-restore", "both killed, and the restart too", ("restore-read",)),
            ("crash-again", "both killed, and again right after the restart", (RANDOM,)),
        ),
        *_family(
            "power",
            ("power-loss", "states that a loss of power may leave of the disk", (RANDOM,)),
        ),
        *_family(
            "disk",
            ("disk-full", "ENOSPC", ("data", "manifest")),
            ("quota", "EDQUOT", ("data",)),
            ("io-error", "EIO", ("data", "sync", "manifest")),
            ("short-write", "writes take a part of what they are given", ("data",)),
            ("slow-disk", "each write takes ten times as long", ("data",)),
            ("stuck-disk", "a write does not return", ("data",)),
            ("read-only", "EROFS", ("data",)),
        ),
        *_family(
            "damage",
            ("bit-flip", "one bit of the newest checkpoint", ("data", "header", "manifest")),
            ("truncated", "a file of it lost its end", ("data", "manifest")),
            ("zero-filled", "a file of it is full of zeros", ("data", "manifest")),
            ("deleted", "its data is gone", ("data",)),
            ("no-manifest", "its manifest is gone", ("manifest",)),
            ("stale-directory", "a newer one was never finished", ("data",)),
            ("foreign-manifest", "its manifest is that of another run", ("manifest",)),
            ("swapped", "the data of the two newest was exchanged", ("data",)),
            ("disk-lost", "the whole directory is gone; the tier is there", (RANDOM,)),
        ),
        *_family(
            "training",
            ("scaler-skip", "the loss scaler leaves an update out", WINDOWS),
            ("parameter-changed", "a parameter is changed from outside", WINDOWS),
            ("state-loaded", "load_state_dict inside a window", WINDOWS),
            ("group-added", "a parameter gets a group of its own", WINDOWS),
            ("optimizer-replaced", "the optimizer's state is replaced by a fresh one", WINDOWS),
        ),
    )
}

QUICK: tuple[tuple[str, str], ...] = (
    ("kill-trainer", RANDOM),
    ("kill-trainer", "state-middle"),
    ("kill-agent", "replay"),
    ("kill-both", "half-written"),
    ("reboot", "committed"),
    ("hang-trainer", RANDOM),
    ("sigterm", RANDOM),
    ("exception", "backward"),
    ("crash-in-restore", "restore-read"),
    ("power-loss", RANDOM),
    ("disk-full", "data"),
    ("io-error", "sync"),
    ("bit-flip", "data"),
    ("swapped", "data"),
    ("parameter-changed", "state-middle"),
)
"""A few of everything, for ``--quick``."""


def chosen(names: str, points: str | None) -> list[tuple[Scenario, str]]:
    """The cases that were asked for.

    Args:
        names: names of scenarios or families, with commas between them, or ``all``.

    Raises:
        ConfigError: an unknown name, with all there are.
    """
    scenarios = dict.fromkeys(
        scenario for name in _split(names) for scenario in _named(name, "--scenario")
    )
    wanted = None if points is None else _split(points)
    for point in wanted or ():
        if point not in POINTS:
            raise ConfigError(_unknown("--point", point, list(POINTS)))
    cases = [
        (one, point)
        for one in scenarios
        for point in one.points
        if wanted is None or point in wanted
    ]
    if not cases:
        there = dict.fromkeys(point for one in scenarios for point in one.points)
        raise ConfigError(f"--point {points}: {names} strikes at {', '.join(there)}")
    return cases


def _split(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _named(name: str, option: str) -> list[Scenario]:
    families = dict.fromkeys(one.family for one in SCENARIOS.values())
    if name == "all":
        return list(SCENARIOS.values())
    if name in families:
        return [one for one in SCENARIOS.values() if one.family == name]
    if name not in SCENARIOS:
        raise ConfigError(_unknown(option, name, ["all", *families, *SCENARIOS]))
    return [SCENARIOS[name]]


def _unknown(option: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{option} {name}: unknown; {hint}there are {', '.join(known)}"
