"""``gockpt agents``: the agents of this user on this machine, and ending those that linger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from gockpt.cli import options, output
from gockpt.errors import AgentError, ConfigError, LockedError

if TYPE_CHECKING:
    from gockpt.agent.protocol import Ask, Status, Stop

ANSWER = 5.0
"""Seconds that an agent may take to say what it does."""

ALL = "all"


def agents(
    stop: Annotated[
        str | None,
        typer.Option(
            metavar="PID|DIR|all", help="End an agent that lingers, that of DIR, or all such."
        ),
    ] = None,
    json: options.Json = None,
) -> None:
    """List the agents that run, and end those whose trainer is dead.

    An agent outlives a trainer that was killed, and keeps its newest checkpoint in memory for
    one that is started again.
    """
    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    found = [_row(path, answer) for path, answer in _ask_all()]
    if stop is not None:
        found = [_stop(row) for row in _chosen(found, stop)]
    if json is not None:
        output.write_document({"schema": 1, "kind": "agents", "agents": found}, json)
    if found:
        console.print(_table(found))
    else:
        console.print("no agents" if stop is None else "no agent lingers")


def _ask_all() -> Iterator[tuple[Path, Status | None]]:
    """Every agent's socket, and what it says; None: it does not answer."""
    from gockpt.agent.protocol import Ask
    from gockpt.agent.rendezvous import meeting_place, sockets

    for path in sockets(meeting_place(make=False)):
        try:
            answer = _say(path, Ask())
        except TimeoutError:
            yield path, None
        else:
            if answer is not None:
                yield path, answer


def _say(path: Path, message: Ask | Stop) -> Status | None:
    """Tell an agent something and return its answer; None if it has gone.

    Raises:
        TimeoutError: it does not answer.
        LockedError: it refuses, as its trainer lives.
    """
    from gockpt.agent.channel import ChannelClosed
    from gockpt.agent.protocol import Refused, Status
    from gockpt.agent.rendezvous import knock

    guest = knock(path, ANSWER)
    if guest is None:
        return None
    try:
        guest.channel.send(message)
        received = guest.channel.receive(ANSWER)
    except ChannelClosed:
        return None
    finally:
        guest.channel.close()
    if received is None:
        raise TimeoutError(f"{path} does not answer")
    if isinstance(received[0], Refused):
        raise LockedError(received[0].reason)
    return received[0] if isinstance(received[0], Status) else None


def _row(path: Path, status: Status | None) -> dict[str, Any]:
    """One agent; of one that does not answer only the pid is known."""
    from gockpt.agent.rendezvous import agent_pid

    return {
        "pid": agent_pid(path) if status is None else status.pid,
        "socket": str(path),
        "answers": status is not None,
        "directory": status and status.directory,
        "rank": status and status.rank,
        "trainer": status and status.trainer,
        "seconds_left": status and status.left,
        "steps": status and status.steps,
        "unwritten": status and status.unwritten,
        "bytes": status and status.nbytes,
        "stopped": False,
    }


def _chosen(rows: list[dict[str, Any]], which: str) -> list[dict[str, Any]]:
    """Those that are to be ended.

    Raises:
        ConfigError: there is no such agent.
    """
    if which == ALL:
        return [row for row in rows if row["answers"] and row["trainer"] is None]
    path = os.path.realpath(which)
    chosen = [
        row
        for row in rows
        if str(row["pid"]) == which
        or (row["directory"] is not None and os.path.realpath(row["directory"]) == path)
    ]
    if not chosen:
        raise ConfigError(
            f"--stop {which}: no agent has this pid or directory; see `gockpt agents`"
        )
    return chosen


def _stop(row: dict[str, Any]) -> dict[str, Any]:
    """End one agent; it first finishes what is complete.

    Raises:
        LockedError: its trainer lives.
        AgentError: it does not answer.
    """
    from gockpt.agent.protocol import Stop

    try:
        _say(Path(row["socket"]), Stop())
    except TimeoutError as error:
        raise AgentError(
            f"agent {row['pid']} does not answer; if its trainer is dead, end it by `kill -9`"
        ) from error
    return {**row, "stopped": True}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("pid", "rank", "trainer", "steps", "unwritten", "memory"):
        table.add_column(name, justify="left" if name in ("trainer", "steps") else "right")
    table.add_column("directory", overflow="fold")
    for row in rows:
        if not row["answers"]:
            table.add_row(str(row["pid"]), "–", "does not answer", "–", "–", "–", "–", style="red")
            continue
        steps = ", ".join(map(str, row["steps"])) or "–"
        table.add_row(
            str(row["pid"]),
            str(row["rank"]),
            _trainer(row),
            steps,
            str(row["unwritten"]),
            output.size(row["bytes"]),
            row["directory"],
        )
    return table


def _trainer(row: dict[str, Any]) -> str:
    if row["stopped"]:
        return "stopped"
    if row["trainer"] is not None:
        return str(row["trainer"])
    return f"lingering, {row['seconds_left'] or 0:.0f} s left"
