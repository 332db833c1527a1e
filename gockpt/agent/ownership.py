"""Who owns a checkpoint directory: what the lock file says of agent and trainer, and who is dead.

Used by agents, which take the lock, and by trainers that meet an agent which does not answer. What
always holds: a process is taken for dead only if it was one of this host and its pid is free, a
zombie's, or another process's by now.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from gockpt.agent.protocol import Hello
from gockpt.errors import LockedError
from gockpt.storage.lock import Lock, holder
from gockpt.storage.names import PRIVATE

PATIENCE = 100.0
"""Seconds that a new agent gives one whose trainer is dead to finish its writes."""

_LOOK = 0.05


def started(pid: int) -> int:
    """When a process was started, in ticks since the system was; 0 if there is none any more.

    Not by psutil, whose times move with the clock: a living process must never look like another.
    """
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = raw[raw.rindex(b")") + 1 :].split()  # the name before may hold anything
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def payload(hello: Hello) -> dict[str, object]:
    """What the lock file is to say."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "launch": hello.launch_id,
        "trainer": hello.trainer,
        "started": hello.started,
    }


def lock_path(root: Path, rank: int) -> Path:
    """Of a rank's lock file."""
    return root / PRIVATE / f"rank-{rank:05d}.lock"


def orphaned(path: Path, pid: int | None = None) -> bool:
    """Whether the trainer that a lock file names is known to be dead.

    Args:
        pid: the agent that must be named there too.
    """
    owner = holder(path)
    trainer, began = owner.get("trainer"), owner.get("started")
    if owner.get("host") != socket.gethostname() or pid not in (None, owner.get("pid")):
        return False
    if not isinstance(trainer, int) or not isinstance(began, int):
        return False
    return started(trainer) != began


def take_lock(hello: Hello) -> Lock:
    """Take the directory's lock; one whose trainer is dead is given time to leave.

    Raises:
        LockedError: it is in use.
        StorageError: the lock file cannot be used.
    """
    root = Path(hello.directory)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return Lock.acquire(root, hello.rank, payload(hello))
        except LockedError:
            if time.monotonic() > deadline or not orphaned(lock_path(root, hello.rank)):
                raise
        time.sleep(_LOOK)
