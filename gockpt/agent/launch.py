"""Starting an agent: as a process of its own, or as a thread of this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from gockpt.agent.channel import Channel, QueueChannel, SocketChannel, pidfd
from gockpt.agent.server import Agent
from gockpt.errors import AgentError

AgentMode = Literal["process", "thread"]

LOG_LIMIT = 1 << 20
"""An agent's log longer than this is started anew."""


class Running(Protocol):
    """An agent that was started."""

    @property
    def channel(self) -> Channel:
        """The trainer's end of the connection."""
        ...

    def join(self, timeout: float) -> bool:
        """Wait for its end; whether it has ended."""
        ...

    def kill(self) -> None:
        """End it by force, where that is possible."""
        ...


def start(mode: AgentMode, log: Path) -> Running:
    """Start an agent that writes its messages to ``log``."""
    return _Process(log) if mode == "process" else _Thread()


class _Process:
    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        too_long = log.exists() and log.stat().st_size > LOG_LIMIT
        with theirs, log.open("wb" if too_long else "ab") as out:
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
        self._process.wait(10)


class _Thread:
    def __init__(self) -> None:
        ours, theirs = QueueChannel.pair()
        self.channel: Channel = ours
        self._thread = threading.Thread(target=Agent(theirs).run, name="gockpt-agent", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """A thread cannot be killed; closing the channel makes it leave."""
        self.channel.close()


@dataclass(frozen=True, slots=True)
class LogTail:
    """The last lines of an agent's log, for error messages."""

    path: Path

    def __str__(self) -> str:
        try:
            lines = self.path.read_bytes()[-4096:].decode(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return " | ".join(line.strip() for line in lines[-3:]) or "(its log is empty)"
