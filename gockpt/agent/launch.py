"""Starting an agent: as a process of its own, or as a thread of this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from gockpt.agent.channel import Channel, QueueChannel, SocketChannel, pidfd
from gockpt.agent.server import Agent
from gockpt.errors import AgentError
from gockpt.storage.names import PRIVATE

AgentMode = Literal["process", "thread"]

LOG_LIMIT = 1 << 20
"""An agent's log longer than this is started anew."""

TAIL = 4096
"""Bytes of the end of a log that are looked at."""

KILL_TIMEOUT = 10.0
"""Seconds after which a process that was killed is in the system's hands."""


@dataclass(frozen=True, slots=True)
class LogTail:
    """The last lines that one agent has logged, for error messages."""

    path: Path | None
    """None: the agent is a thread, and logs where its process does."""
    start: int = 0
    """Bytes that were there before it: earlier agents'."""

    @classmethod
    def begin(cls, path: Path) -> LogTail:
        """What is logged from now on."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def __str__(self) -> str:
        if self.path is None:
            return "it is a thread of this process"
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self.start, end - TAIL))
                lines = file.read(TAIL).decode(errors="replace").splitlines()
        except OSError:
            return "it has no log"
        return " | ".join(line.strip() for line in lines[-3:]) or "nothing in its log"


class Running(Protocol):
    """An agent that was started."""

    @property
    def pid(self) -> int | None:
        """Its process; None: it is a thread of this one."""
        ...

    @property
    def log(self) -> LogTail:
        """Its last words."""
        ...

    @property
    def channel(self) -> Channel:
        """The trainer's end of the connection."""
        ...

    def join(self, timeout: float) -> bool:
        """Wait for its end; whether it has ended."""
        ...

    def kill(self) -> None:
        """End it by force, where that is possible.

        Raises:
            AgentError: the system does not let it end.
        """
        ...

    def leave(self) -> None:
        """Let it finish alone; nobody will wait for it."""
        ...


def log_path(directory: str, rank: int) -> Path:
    """Where the agents of a rank log."""
    return Path(directory) / PRIVATE / f"rank-{rank:05d}.log"


def occupy_standard() -> None:
    """Open what is closed of stdin, stdout and stderr, on nothing, as a daemon does.

    Else the next file, socket or memory would become one of them, and whatever a library prints
    would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def start(mode: AgentMode, log: Path) -> Running:
    """Start an agent that writes its messages to ``log``."""
    return _Process(log) if mode == "process" else _Thread()


class _Process:
    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        too_long = log.exists() and log.stat().st_size > LOG_LIMIT
        with theirs, log.open("wb" if too_long else "ab") as out, _sigterm_blocked():
            self.log = LogTail.begin(log)
            command = [sys.executable, "-P", "-m", "gockpt.agent"]
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise AgentError(
                    f"the agent cannot be started ({error}); use agent='thread'"
                ) from error
        self.channel: Channel = SocketChannel(ours, peer_pidfd=pidfd(self._process.pid))

    @property
    def pid(self) -> int:
        return self._process.pid

    def join(self, timeout: float) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(KILL_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise _hung(self._process.pid) from error

    def leave(self) -> None:
        self._process.returncode = 0  # else it would be complained of as still running


class Met:
    """An agent that another trainer has started."""

    def __init__(self, pid: int, channel: Channel, log: LogTail) -> None:
        self.pid = pid
        self.channel = channel
        self.log = log

    def join(self, timeout: float) -> bool:
        return self.channel.peer_ended(timeout)

    def kill(self) -> None:
        if not self.channel.peer_ended(0):
            kill_process(self.pid)

    def leave(self) -> None:
        pass  # it is no child of this process: nobody waits for it anyhow


def kill_process(pid: int) -> None:
    """End a process by force, if it is still there.

    Raises:
        AgentError: the system does not let it end.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], KILL_TIMEOUT)[0]:
            raise _hung(pid)
    finally:
        os.close(descriptor)


def _hung(pid: int) -> AgentError:
    return AgentError(
        f"agent {pid} does not end {KILL_TIMEOUT:.0f} s after SIGKILL; is its disk hung?"
    )


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """What is started in here has SIGTERM blocked until it is ready for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Thread:
    pid = None

    def __init__(self) -> None:
        ours, theirs = QueueChannel.pair()
        self.channel: Channel = ours
        self.log = LogTail(None)
        self._thread = threading.Thread(target=Agent(theirs).run, name="gockpt-agent", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """A thread cannot be killed; closing the channel makes it leave."""
        self.channel.close()

    def leave(self) -> None:
        """It ends with its work, or with the process."""
