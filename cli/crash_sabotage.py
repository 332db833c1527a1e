"""Bugs that ``crash-test --sabotage`` plants, to show that the trials would find them.

A sabotage is a list of faults for the trainers and agents that crash-test itself starts; nothing
else can arm them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gockpt.cli.crash_scenarios import RANDOM
from gockpt.errors import ConfigError, suggestion
from gockpt.faults import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """One planted bug."""

    name: str
    summary: str
    trainer: tuple[str, ...] = ()
    agent: tuple[str, ...] = ()
    """Fault points, marked for ever."""
    cases: tuple[tuple[str, str], ...]
    """Scenarios and points that meet it."""
    slow_link: bool = False
    """Whether it only shows where copies are late."""
    match: str | None = None

    def faults(self, where: str) -> tuple[Fault, ...]:
        """Of the ``trainer`` or the ``agent``."""
        points = self.trainer if where == "trainer" else self.agent
        return tuple(Fault(point=one, action="mark", times=0, match=self.match) for one in points)


SABOTAGES = {
    one.name: one
    for one in (
        Sabotage(
            name="skip-gate",
            summary="the update does not wait for the copies of its window",
            trainer=("capture.skip-gate",),
            cases=(("kill-trainer", RANDOM),),
            slow_link=True,
        ),
        Sabotage(
            name="drop-gradient",
            summary="the replay leaves a gradient out",
            agent=("replay.drop-gradient",),
            cases=(("kill-both", RANDOM),),
        ),
        Sabotage(
            name="stale-block",
            summary="a block is taken for up to date that is not",
            agent=("replay.late-block",),
            cases=(("kill-both", RANDOM),),
        ),
        Sabotage(
            name="commit-early",
            summary="the manifest is there before the data is",
            agent=("fs.pwrite.late",),
            cases=(("reboot", "committed"),),
            match="*.safetensors",
        ),
        Sabotage(
            name="skip-fsync",
            summary="nothing is synced",
            agent=("fs.sync.lost",),
            cases=(("power-loss", RANDOM),),
        ),
        Sabotage(
            name="ignore-checksum",
            summary="what is read is taken for good, whatever its hash",
            trainer=("image.ignore-checksum",),
            cases=(("bit-flip", "data"),),
        ),
        Sabotage(
            name="keep-nothing",
            summary="retention deletes every checkpoint",
            agent=("retention.keep-nothing",),
            # Files are written one after the other, each behind the retention of the one before.
            cases=(("kill-both", "half-written"),),
        ),
    )
}


def find(name: str) -> Sabotage:
    """The sabotage of that name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    if name in SABOTAGES:
        return SABOTAGES[name]
    hint = suggestion(name, SABOTAGES)
    raise ConfigError(f"--sabotage {name}: unknown; {hint}")
