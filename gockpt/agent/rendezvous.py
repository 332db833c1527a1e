"""Where an agent can be met: one unix socket for each, in a directory that only its user can enter.

Used by agents (a :class:`Door`), by trainers that look for one of an earlier trainer, and by the
commands. What always holds: the directory belongs to this user and nobody else may enter it; the
other side runs under the same user; a name holds the agent's own pid, so that removing a stale one
can never hit a living agent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gockpt.agent.channel import SocketChannel, pidfd
from gockpt.errors import AgentError

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 16
_SUFFIX = ".sock"


def meeting_place(*, make: bool = True) -> Path:
    """The directory of the sockets, made if it is not there and ``make`` is set.

    Raises:
        AgentError: it is not this user's alone.
    """
    path = Path(tempfile.gettempdir()) / f"gockpt-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            if make:
                path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not make:
            return path
        raise AgentError(
            f"{path} cannot be used for the agent's socket ({error.strerror}); set TMPDIR"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode != 0o700:
        raise AgentError(
            f"{path} must be a directory of user {os.getuid()} with mode 700, not of user "
            f"{found.st_uid} with mode {mode:o}; remove it or set TMPDIR"
        )
    return path


def key(directory: str | Path, rank: int) -> str:
    """What the names of all agents of one rank of a checkpoint directory begin with."""
    real = os.path.realpath(directory)
    return f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:16]}-{rank}-"


def sockets(place: Path, prefix: str = "") -> list[Path]:
    """The sockets whose names begin so; stale ones too."""
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return []
    return [place / name for name in names if name.startswith(prefix) and name.endswith(_SUFFIX)]


class Guest:
    """A connection to a process of the same user."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket.

        Raises:
            ConnectionError: the process at the other side is another user's, or has ended.
        """
        try:
            self.pid, uid, _ = _CREDENTIALS.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.getuid():
                raise ConnectionError(f"the other side is of user {uid}, not {os.getuid()}")
            try:
                descriptor = pidfd(self.pid)
            except OSError as error:
                raise ConnectionError(f"process {self.pid} cannot be seen") from error
        except BaseException:
            sock.close()
            raise
        self.channel = SocketChannel(sock, peer_pidfd=descriptor)


def knock(path: Path, timeout: float) -> Guest | None:
    """Connect to an agent's socket; None if nobody listens there any more: it is then removed.

    Raises:
        ConnectionError: it is another user's.
        TimeoutError: it takes no more connections, so it is stuck.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        with _short(path) as address:
            sock.connect(address)
    except (ConnectionRefusedError, FileNotFoundError):
        sock.close()
        forget(path)
        return None
    except BlockingIOError as error:
        sock.close()
        raise TimeoutError(f"{path} takes no more connections") from error
    except OSError:
        sock.close()
        raise
    sock.settimeout(None)
    return Guest(sock)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address for a socket of any path; the system takes no more than 107 bytes."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def forget(path: Path) -> None:
    """Remove the socket of an agent that is dead."""
    path.unlink(missing_ok=True)


def agent_pid(path: Path) -> int:
    """The pid in a socket's name; 0 if there is none."""
    text = path.name.removesuffix(_SUFFIX).rpartition("-")[2]
    return int(text) if text.isdigit() else 0


class Door:
    """The socket at which an agent is found. Belongs to the agent's loop."""

    def __init__(self, place: Path, prefix: str) -> None:
        """Listen.

        Raises:
            AgentError: the socket cannot be made.
        """
        self._path = place / f"{prefix}{os.getpid()}{_SUFFIX}"
        hidden = self._path.with_suffix(".new")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            hidden.unlink(missing_ok=True)
            with _short(hidden) as address:
                self._socket.bind(address)
            self._socket.listen(_BACKLOG)
            # Its name appears only now that it answers: what does not is taken for stale.
            hidden.rename(self._path)
        except OSError as error:
            self._socket.close()
            raise AgentError(
                f"{self._path} cannot be listened at ({error}); set TMPDIR to another directory"
            ) from error
        self._socket.setblocking(False)

    def wait(self, timeout: float) -> None:
        """Wait until somebody knocks, for at most ``timeout`` seconds."""
        select.select([self._socket], [], [], max(0.0, timeout))

    def guest(self) -> Guest | None:
        """Who has knocked, if anybody of this user has."""
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return None
        sock.setblocking(True)
        try:
            return Guest(sock)
        except OSError:
            return None

    def close(self) -> None:
        """Take the socket away."""
        self._path.unlink(missing_ok=True)
        self._socket.close()
