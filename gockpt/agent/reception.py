"""Whoever comes to an agent's door: commands that ask, and trainers that want to take over.

Runs in the agent's loop. What always holds: nobody takes over while the trainer lives, nor before
all that is complete has been proved; with the memory goes a list of what is in it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import msgspec

from gockpt import faults
from gockpt.agent.channel import ChannelClosed
from gockpt.agent.kept import Slots
from gockpt.agent.output import Directory
from gockpt.agent.ownership import payload
from gockpt.agent.protocol import PROTOCOL, Ask, Hello, Ready, Refused, Status, Stop
from gockpt.agent.rendezvous import Door, Guest
from gockpt.agent.service import Service
from gockpt.agent.work import Work
from gockpt.errors import StorageError
from gockpt.storage.catalog import next_sequence

log = logging.getLogger("gockpt.agent")

GUEST_TIMEOUT = 1.0
"""Seconds that whoever knocks may take to say what he wants."""


class Reception:
    """Answers the door of one agent."""

    def __init__(
        self,
        door: Door,
        service: Service,
        directory: Directory,
        slots: Slots,
        work: Work,
        *,
        first: int,
        taken_over: Callable[[], None],
    ) -> None:
        """
        Args:
            first: the next sequence number when the agent began.
            taken_over: called when another trainer is served.
        """
        self._door, self._service, self._directory = door, service, directory
        self._slots, self._work = slots, work
        self._first, self._taken_over = first, taken_over
        self.wait, self.close = door.wait, door.close

    def answer(self) -> None:
        """Serve who waits, and hear who has come."""
        service = self._service
        if service.successor is not None:
            self._serve_successor(*service.successor)
        guest = self._door.guest()
        if guest is None:
            return
        try:
            received = guest.channel.receive(GUEST_TIMEOUT)
            message = None if received is None else received[0]
            if isinstance(message, Hello):
                self._consider(guest, message)
                return
            if isinstance(message, Ask | Stop):
                guest.channel.send(self._answer(message))
        except ChannelClosed as error:
            log.info("process %d came and went: %s", guest.pid, error)
            # A trainer of another version cannot take over, and must not wait for nothing.
            service.leaving = service.leaving or ("protocol" in str(error) and service.orphaned)
        guest.channel.close()

    def _answer(self, message: Ask | Stop) -> Status | Refused:
        service = self._service
        if isinstance(message, Stop):
            if not service.orphaned:
                return Refused(kind="LockedError", reason=self._in_use())
            service.leaving = True
        return Status(
            pid=os.getpid(),
            directory=service.hello.directory,
            rank=service.hello.rank,
            trainer=None if service.orphaned else service.trainer,
            left=service.left(worth_it=bool(self._slots.steps)),
            steps=self._slots.steps,
            unwritten=len(self._work),
            nbytes=self._slots.nbytes,
        )

    def _in_use(self) -> str:
        return (
            f"{self._directory.root} is in use by trainer {self._service.trainer} "
            f"(its agent is {os.getpid()}); stop it or use another directory"
        )

    def _consider(self, guest: Guest, hello: Hello) -> None:
        """A trainer wants to take over."""
        service = self._service
        if not service.orphaned:
            refused = Refused(kind="LockedError", reason=self._in_use())
        elif (problem := self._obstacle(hello)) is not None:
            log.info("not taken over by trainer %d: %s", guest.pid, problem)
            refused = Refused(kind="AgentError", reason=problem)
            service.leaving = True
        else:
            service.successor = guest, hello
            return
        guest.channel.send(refused)
        guest.channel.close()

    def _obstacle(self, hello: Hello) -> str | None:
        """Why this trainer cannot be served."""
        ours = self._service.hello
        if hello.protocol != PROTOCOL:
            return f"the trainer speaks protocol {hello.protocol}, this agent {PROTOCOL}"
        if (hello.rank, hello.world_size) != (ours.rank, ours.world_size):
            return f"this agent is of rank {ours.rank} of {ours.world_size}"
        if (hello.tier, hello.volumes) != (ours.tier, ours.volumes):
            return "this agent writes to another tier or other volumes"
        if not self._directory.lock.still_ours():
            return "the directory has another lock file by now"
        return "it is leaving" if self._service.leaving else None

    def _serve_successor(self, guest: Guest, hello: Hello) -> None:
        """Pass memory and all that is in it to a new trainer, once nothing in it changes."""
        service = self._service
        if service.gone_since is None:
            return  # the loop has not seen the old one's end yet
        try:
            if guest.channel.peer_ended(0):
                raise ChannelClosed("it has ended")
            if self._work.busy:
                return
            self._directory.lock.describe(payload(hello))
            with self._slots.changing:
                self._hand_over(guest)
                service.channel = guest.channel
        except (ChannelClosed, StorageError) as error:
            log.warning("not taken over by trainer %d: %s", guest.pid, error)
            service.successor = None
            guest.channel.close()
            return
        service.successor = None
        log.info("taken over by trainer %d", hello.trainer)
        faults.arm(hello.faults)
        hello = msgspec.structs.replace(hello, run_id=service.hello.run_id)
        service.hello = self._directory.hello = hello
        self._directory.protect.clear()  # what the earlier trainer went on from
        self._work.structure = None
        self._taken_over()
        service.gone_since = None

    def _hand_over(self, guest: Guest) -> None:
        held = self._slots.send(guest.channel)
        sequence = max(self._first, next_sequence(self._directory.root))
        sequence = max(sequence, *(one.sequence + 1 for one in held), 0)
        guest.channel.send(Ready(pid=os.getpid(), next_sequence=sequence, held=held))
