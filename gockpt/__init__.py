"""gockpt: checkpoints of PyTorch training that do not stop it.

The public face; everything else may change between versions.
"""

import logging

from gockpt.agent.handle import Handle
from gockpt.checkpointer import Checkpointer, open
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
from gockpt.restore import Restored
from gockpt.storage import Checkpoint

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
    "__version__",
    "open",
]

logging.getLogger("gockpt").addHandler(logging.NullHandler())
