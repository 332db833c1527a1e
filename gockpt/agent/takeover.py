"""Meeting the agent that a dead trainer left behind, and taking its memory over.

Runs on the training thread of the new trainer, before anything is allocated. What always holds: an
agent whose trainer lives is never touched; one that does not answer ends, if its trainer is dead,
so that a start never hangs on it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from gockpt.agent.channel import ChannelClosed
from gockpt.agent.launch import LogTail, Met, kill_process, log_path
from gockpt.agent.ownership import lock_path, orphaned, started
from gockpt.agent.protocol import Attach, Hello, Ready, Refused, Stop
from gockpt.agent.rendezvous import Guest, agent_pid, forget, key, knock, meeting_place, sockets
from gockpt.arena import Segment
from gockpt.errors import AgentError, LockedError
from gockpt.storage.lock import holder

log = logging.getLogger("gockpt")

ANSWER = 20.0
"""Seconds without a word after which an agent is taken for stuck."""

PATIENCE = 3.0
"""Seconds that a trainer which was just killed may take to be gone."""

_LOOK = 0.1


@dataclass(slots=True)
class Inherited:
    """An agent that serves this trainer now, with the memory of the one before."""

    running: Met
    ready: Ready
    segments: dict[str, Segment] = field(default_factory=dict)


def inherit(hello: Hello) -> Inherited | None:
    """Take over the agent of a trainer that died; None where there is none to be had.

    Raises:
        LockedError: its trainer lives, or it cannot be told whether it does.
    """
    if hello.meeting is None:
        dismiss(hello.directory, hello.rank)
        return None
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return _try_all(hello)
        except LockedError:
            # A process that was killed is there until its memory has been given back.
            if time.monotonic() > deadline or _is_own(hello):
                raise
        time.sleep(_LOOK)


def dismiss(directory: str, rank: int) -> None:
    """Let an agent that lingers leave: a trainer whose agent is a thread cannot take it over."""
    try:
        place = meeting_place(make=False)
    except AgentError:
        return  # it is not ours: nobody of ours can be met there, and a thread needs no such place
    for path in sockets(place, key(directory, rank)):
        with contextlib.suppress(OSError, ChannelClosed):
            guest = knock(path, ANSWER)
            if guest is not None:
                try:
                    guest.channel.send(Stop())
                    guest.channel.receive(ANSWER)
                finally:
                    guest.channel.close()


def _is_own(hello: Hello) -> bool:
    """Whether this very process has the directory."""
    owner = holder(lock_path(Path(hello.directory), hello.rank))
    return owner.get("trainer") == os.getpid()


def _try_all(hello: Hello) -> Inherited | None:
    for path in sockets(Path(hello.meeting or ""), key(hello.directory, hello.rank)):
        try:
            guest = knock(path, ANSWER)
            found = None if guest is None else _introduce(guest, hello)
        except TimeoutError as error:
            end_stuck(hello, agent_pid(path), str(error))
        except (ChannelClosed, ConnectionError) as error:
            log.info("the agent at %s is of no use: %s", path, error)
            if not started(agent_pid(path)):
                forget(path)
        else:
            if found is not None:
                return found
    return None


def _introduce(guest: Guest, hello: Hello) -> Inherited | None:
    """Offer to be the agent's trainer."""
    channel, segments = guest.channel, dict[str, Segment]()
    try:
        channel.send(hello)
        while (received := channel.receive(ANSWER)) is not None:
            message, segment = received
            if isinstance(message, Attach) and segment is not None:
                segments[message.name] = segment
            elif isinstance(message, Ready):
                log_tail = LogTail.begin(log_path(hello.directory, hello.rank))
                return Inherited(Met(guest.pid, channel, log_tail), message, segments)
            elif isinstance(message, Refused):
                raise _refusal(message)
        raise TimeoutError(f"it did not answer within {ANSWER:.0f} s")
    except BaseException:
        channel.close()
        raise


def _refusal(message: Refused) -> Exception:
    if message.kind == LockedError.__name__:
        return LockedError(message.reason)
    return ConnectionError(message.reason)


def end_stuck(hello: Hello, pid: int, reason: str) -> None:
    """End an agent that does not answer.

    Raises:
        LockedError: its trainer is not known to be dead.
    """
    path = lock_path(Path(hello.directory), hello.rank)
    if not orphaned(path, pid):
        trainer = holder(path).get("trainer", "?")
        raise LockedError(
            f"{hello.directory} is in use by agent {pid}, which is stuck ({reason}), and its "
            f"trainer {trainer} is not known to be dead; end both or use another directory"
        )
    log.warning("agent %d is ended: its trainer is dead, and %s", pid, reason)
    kill_process(pid)
