"""gockpt: checkpoints of PyTorch training that do not stop it.

The public face; everything else may change between versions. What needs torch is imported when it
is first asked for, so that ``gockpt --help`` need not wait for it.
"""

import importlib
import logging
import sys
import typing

from gockpt.errors import (
    AgentError,
    ConfigError,
    CorruptError,
    DeviceError,
    ExtrasError,
    GockptError,
    LockedError,
    NoCheckpointError,
    ProofError,
    SpaceError,
    StateError,
    StorageError,
)

if sys.platform == "win32":
    raise ImportError("gockpt does not run on Windows; use it in WSL 2 (https://aka.ms/wsl)")

if typing.TYPE_CHECKING:
    from gockpt.agent.handle import Handle
    from gockpt.checkpointer import Checkpointer, open
    from gockpt.restore import Restored
    from gockpt.storage import Checkpoint, Tier

__version__ = "0.1.0"

__all__ = [
    "AgentError",
    "Checkpoint",
    "Checkpointer",
    "ConfigError",
    "CorruptError",
    "DeviceError",
    "ExtrasError",
    "GockptError",
    "Handle",
    "LockedError",
    "NoCheckpointError",
    "ProofError",
    "Restored",
    "SpaceError",
    "StateError",
    "StorageError",
    "Tier",
    "__version__",
    "open",
]

_NEEDS_TORCH = {
    "Checkpoint": "gockpt.storage",
    "Checkpointer": "gockpt.checkpointer",
    "Handle": "gockpt.agent.handle",
    "Restored": "gockpt.restore",
    "Tier": "gockpt.storage",
    "open": "gockpt.checkpointer",
}

logging.getLogger("gockpt").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    """Import a public name from where it lives, once."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    globals()[name] = value
    return value
