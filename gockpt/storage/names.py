"""Names in a checkpoint directory.

::

    step-000000100-s000042-7f3ac01e/   step, sequence number, launch id
    .trash-step-…/                     being deleted
    .gockpt/                           lock and log of each rank
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHECKPOINT = "step-"
TRASH = ".trash-"
PRIVATE = ".gockpt"

_PATTERN = re.compile(r"step-(\d{9,18})-s(\d{6,18})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CheckpointName:
    """What the name of a checkpoint's directory says."""

    sequence: int
    step: int
    launch: str

    def __str__(self) -> str:
        return f"{CHECKPOINT}{self.step:09d}-s{self.sequence:06d}-{self.launch}"


def parse_name(name: str) -> CheckpointName | None:
    """The inverse of ``str``; None for any other name."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    return CheckpointName(step=int(match[1]), sequence=int(match[2]), launch=match[3])
