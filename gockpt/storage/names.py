"""Names in a checkpoint directory.

::

    step-000000100-s000042-7f3ac01e/   step, sequence number, launch id
    .trash-step-…/                     being deleted
    .gockpt/                           lock and log of each rank, and whose directory it is
    .gockpt/volumes.json               our own name on volumes, and which volumes were used

and in a volume::

    gockpt-3f2a90c17be64d05/step-…/    parts of the checkpoints of one such directory
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHECKPOINT = "step-"
TRASH = ".trash-"
PRIVATE = ".gockpt"
SHARE = "gockpt-"

PINNED = "pinned"
"""Mark of a checkpoint that its user wants to stay."""
KEPT = "kept"
"""Mark of one that stays as ``keep_every`` says so."""
MARKS = (PINNED, KEPT)

_SHARE = re.compile(r"gockpt-[0-9a-f]{16}")
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


def is_share(name: str) -> bool:
    """Whether this is the name of a main directory's share of a volume."""
    return _SHARE.fullmatch(name) is not None
