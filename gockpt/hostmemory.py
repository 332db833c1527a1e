"""How much memory this host still has for us: the system's, or the container's if that is less."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that can still be taken without swapping or being killed."""
    system = int(psutil.virtual_memory().available)
    limit = _cgroup_rest()
    return system if limit is None else min(system, limit)


def _cgroup_rest() -> int | None:
    """What the container's limit leaves; None where there is none."""
    limit = _number(_CGROUP / "memory.max")
    used = _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return None
    # The page cache counts as used but is given back on demand.
    return max(0, limit - used + _reclaimable())


def _reclaimable() -> int:
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
