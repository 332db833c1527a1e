"""What a command says, and the code it ends with, when something is wrong.

What always holds: one line on stderr, ``gockpt: what is wrong; what to do``, and never a traceback
for an error that gockpt raised on purpose.
"""

from __future__ import annotations

import sys

from gockpt.errors import (
    ConfigError,
    DeviceError,
    GockptError,
    LockedError,
    NoCheckpointError,
)

GOOD = 0
FAILED = 1
"""A check failed, or the work could not be finished."""
WRONG_USE = 2
UNDECIDED = 3
"""``gate --strict`` could not tell."""
INTERRUPTED = 130
"""Ended by Ctrl-C, as shells have it: 128 + SIGINT."""
TERMINATED = 143
"""Ended by SIGTERM."""

_WRONG_USE = (ConfigError, DeviceError, LockedError, NoCheckpointError)


def exit_code(error: GockptError) -> int:
    """2 for wrong use, 1 for everything else that went wrong."""
    return WRONG_USE if isinstance(error, _WRONG_USE) else FAILED


def complain(message: object) -> None:
    """Say on stderr, in one line, what is wrong."""
    print(f"gockpt: {' '.join(str(message).split())}", file=sys.stderr)  # noqa: T201
