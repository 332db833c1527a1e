"""The exit status of a process whose last checkpoint failed when its script had ended already.

Runs on the main thread, while the interpreter ends. Nobody is left to catch an exception then, and
Python would report success: whoever started the training would take it for saved.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

_failed: list[int] = []
"""Processes (this one, not its forks) in which something failed at the end."""


def report(error: Exception) -> None:
    """Say what failed, and let this process end with status 1."""
    sys.stderr.write(f"gockpt: the last checkpoint failed: {error}\n")
    _failed.append(os.getpid())


def _leave() -> None:
    if os.getpid() not in _failed:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


# Exit handlers run in the reverse order of their registration: those that are registered later
# than this import, and so nearly all, have had their turn.
atexit.register(_leave)
