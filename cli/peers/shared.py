"""What engines need that hand tensors to another process in shared memory."""

from __future__ import annotations

import resource


def allow_many_files() -> None:
    """Every shared tensor is an open file: the usual soft limit of 1,024 would be too few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
