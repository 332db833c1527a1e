"""Every exception that gockpt raises, as one tree.

    GockptError
    ├── ConfigError          wrong use: an argument or a combination of them (exit code 2)
    ├── StateError           a model or optimizer whose state cannot be saved or loaded
    ├── ExtrasError          an object of the user's that cannot be encoded exactly
    ├── DeviceError          a device, or an emulation profile, that cannot be used
    ├── AgentError           the agent was lost, or did not answer before its deadline
    ├── LockedError          another live process owns the checkpoint directory
    ├── ProofError           the captured state is not the true state; nothing was committed
    └── StorageError         a file operation failed (carries path and errno)
        ├── SpaceError       no room on the device, or a quota was reached
        ├── CorruptError     bytes on disk are not the bytes that were written
        └── NoCheckpointError  nothing valid to restore, or not the step that was asked for

Messages are one line: what is wrong, then what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


class GockptError(Exception):
    """Base of everything that gockpt raises on purpose.

    Attributes:
        step: that of the checkpoint that failed, if it was one.
    """

    step: int | None = None


class ConfigError(GockptError, ValueError):
    """Wrong use: an argument, or a combination of arguments, that can never work."""


class StateError(GockptError):
    """State of a model or optimizer that cannot be saved or loaded."""


class ExtrasError(GockptError):
    """An object given as an extra that cannot be encoded exactly."""


class DeviceError(GockptError):
    """A device or emulation profile that cannot be used."""


class AgentError(GockptError):
    """The agent was lost, or did not answer before its deadline."""


class LockedError(GockptError):
    """Another live process owns the checkpoint directory."""


class ProofError(GockptError):
    """The captured state is not the true state; nothing was committed.

    Attributes:
        tensors: names of those that are wrong, as far as the proof could tell.
    """

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class StorageError(GockptError):
    """A file operation failed.

    Attributes:
        path: the file or directory that it failed on, if one is known.
        errno: the system's error number, if the system gave one.
        extent: first byte and end, counted from the start of the file, of what could not be used.
        tensors: names of the tensors that lie there.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | Path | None = None,
        errno: int | None = None,
        extent: tuple[int, int] | None = None,
        tensors: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else Path(path)
        self.errno = errno
        self.extent = extent
        self.tensors = tensors


class SpaceError(StorageError):
    """No room left on the device, or a quota was reached."""


class CorruptError(StorageError):
    """Bytes on disk are not the bytes that were written."""


class NoCheckpointError(StorageError):
    """Nothing valid to restore, or not the step that was asked for."""


def suggestion(
    name: str, known: Iterable[str], *, otherwise: str = "choose one of", cutoff: float = 0.6
) -> str:
    """What to do about a name that is unknown: the nearest one, or all of them.

    Args:
        otherwise: stands before all of them.
        cutoff: how alike a name must be to be the nearest, from 0 to 1.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(names)}"
