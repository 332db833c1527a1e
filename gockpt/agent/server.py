"""The agent: owns the slots' later life — replay, proof, writing, commit, deletion.

Runs as a process of its own (``python -m gockpt.agent``) or as a thread of the trainer; the loop is
the same. It never touches the accelerator. When its trainer has died it finishes the checkpoints
that are complete, drops the others, and waits for another trainer to take its memory over
(:mod:`gockpt.agent.takeover` is the other side); when nobody comes within its ``linger``, or its
trainer said good-bye, it leaves.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

from gockpt import faults
from gockpt.agent import copier
from gockpt.agent.channel import Channel, ChannelClosed
from gockpt.agent.kept import Slots
from gockpt.agent.output import Directory
from gockpt.agent.ownership import payload, take_lock
from gockpt.agent.protocol import (
    PROTOCOL,
    Adopt,
    AnyMessage,
    Attach,
    Bye,
    Captured,
    Drop,
    Hello,
    Open,
    Protect,
    Ready,
    Recall,
    Recalled,
    Recorded,
    Refused,
    Seal,
    Structure,
    Update,
)
from gockpt.agent.pulse import Pulse
from gockpt.agent.reception import Reception
from gockpt.agent.rendezvous import Door, forget, key, sockets
from gockpt.agent.service import Service
from gockpt.agent.work import Work
from gockpt.arena import Segment
from gockpt.errors import GockptError, StorageError
from gockpt.events import Recorder
from gockpt.pace import Pacer
from gockpt.storage.catalog import newest
from gockpt.storage.lock import Lock
from gockpt.storage.retention import collect_leftovers
from gockpt.storage.volumes import claim

log = logging.getLogger("gockpt.agent")

IDLE = 0.2
"""Seconds between two looks at the world when there is nothing to do."""

HELLO_TIMEOUT = 60.0
"""Seconds that a trainer may take to introduce itself."""

REPORT_EVERY = 0.25
"""Seconds between two reports of spans."""

DEATH = 10.0
"""Seconds between the end of a trainer's connection and that of the trainer, if it is dying."""


class Agent:
    """Serves one trainer over one channel; when that has died, another one over another."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._slots = Slots()
        self._recorder = Recorder()
        self._reported = 0.0
        self._reception: Reception | None = None

    def run(self) -> None:
        """Serve until a trainer says good-bye, or has died and none comes after it."""
        hello = self._await_hello()
        if hello is None:
            return
        try:
            lock = self._take_directory(hello)
        except GockptError as error:
            self._refuse(type(error).__name__, str(error))
            return
        try:
            self._serve()
        except Exception:
            # The trainer learns of it by the closed channel; the reason stands in the log.
            log.exception("the agent failed")
            raise
        finally:
            if self._reception is not None:
                self._reception.close()
            if self._directory.tier is not None:
                self._directory.tier.stop()
            lock.release()
            self._report(force=True)
            self._service.channel.close()

    # -- a trainer's directory ---------------------------------------------------------------------

    def _await_hello(self) -> Hello | None:
        try:
            received = self._channel.receive(HELLO_TIMEOUT)
        except ChannelClosed:
            return None
        if received is None or not isinstance(received[0], Hello):
            return None
        hello = received[0]
        if hello.protocol != PROTOCOL:
            reason = f"the trainer speaks protocol {hello.protocol}, this agent {PROTOCOL}"
            self._refuse("AgentError", reason)
            return None
        return hello

    def _refuse(self, kind: str, reason: str) -> None:
        try:
            self._channel.send(Refused(kind=kind, reason=reason))
        except ChannelClosed:
            log.debug("nobody to tell: %s", reason)

    def _take_directory(self, hello: Hello) -> Lock:
        faults.arm(hello.faults)
        root = Path(hello.directory)
        lock = take_lock(hello)
        protect: set[Path] = set()
        tier = copier.start(hello, payload(hello), protect)
        try:
            shares = claim(root, [Path(one) for one in hello.volumes])
            # An agent of this very launch that died may have left some too, where no other rank
            # writes beside it: what can still be finished is written anew.
            self._collect_leftovers(root, hello.launch_id if hello.world_size > 1 else "")
            before = newest(root)
            if before is not None:  # what goes on from a checkpoint is of the same run
                hello = msgspec.structs.replace(hello, run_id=before.manifests[0].run_id)
            self._service = Service(channel=self._channel, hello=hello)
            self._directory = Directory(hello, lock, self._recorder, protect, tier, shares=shares)
            self._set_pace()
            send, report = self._service.send, lambda: self._report(force=True)
            self._work = Work(self._directory, self._slots, send, report)
            first = copier.first_sequence(hello, tier)
            if hello.meeting is not None:
                self._open_door(root, Path(hello.meeting), first)
            send(Ready(pid=os.getpid(), next_sequence=first))
        except BaseException:
            if tier is not None:
                tier.stop()
            lock.release()
            raise
        return lock

    @staticmethod
    def _collect_leftovers(root: Path, launch: str) -> None:
        """What cannot be deleted costs room, and is no reason to refuse the training."""
        try:
            for path in collect_leftovers(root, launch):
                log.info("deleted %s, which was never finished", path.name)
        except StorageError as error:
            log.warning("left there: %s", error)

    def _open_door(self, root: Path, meeting: Path, first: int) -> None:
        prefix = key(root, self._service.hello.rank)
        # The directory is locked by this agent: whoever else was met here is dead.
        for stale in sockets(meeting, prefix):
            forget(stale)
        self._reception = Reception(
            Door(meeting, prefix),
            self._service,
            self._directory,
            self._slots,
            self._work,
            first=first,
            taken_over=self._set_pace,
        )

    def _set_pace(self) -> None:
        """Model the rate of each volume, or of the root, if one is to be modelled."""
        rate = self._service.hello.pace.write
        places = self._directory.shares or (self._directory.root,)
        pacers = () if rate is None else tuple(Pacer(rate) for _ in places)
        self._directory.pacers = pacers

    # -- the loop ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        with Pulse(self._service.tell_alive) as pulse:
            while not self._done():
                self._turn()
                pulse.turn()

    def _turn(self) -> None:
        service = self._service
        self._take_messages()
        self._work.turn()
        self._report()
        if service.leaving or service.gone_since is not None:
            self._work.drop_incomplete()  # before another trainer is served: it knows none of them
        if self._reception is not None:
            self._reception.answer()

    def _done(self) -> bool:
        """Whether there is nothing left to do or to wait for."""
        if len(self._work) or self._service.successor is not None:
            return False
        # Without a checkpoint there is no need to wait.
        left = self._service.left(worth_it=bool(self._slots.steps))
        return self._service.leaving or left == 0.0

    def _take_messages(self) -> None:
        """Handle everything that has come; wait a little if there is nothing to do."""
        timeout = self._work.patience(IDLE)
        while self._service.gone_since is None:
            try:
                received = self._service.channel.receive(timeout)
            except ChannelClosed:
                self._trainer_has_gone()
                return
            if received is None:
                return
            self._handle(*received)
            timeout = 0.0
        if self._reception is not None:
            self._reception.wait(timeout)
        else:
            time.sleep(timeout)

    def _trainer_has_gone(self) -> None:
        log.info("the trainer has gone; finishing what is complete")
        service = self._service
        service.gone_since = time.monotonic()
        # One that lives has only closed the connection: it wants no more of this agent.
        if self._reception is None or not service.channel.peer_ended(DEATH):
            service.leaving = True
        service.channel.close()

    def _handle(self, message: AnyMessage, segment: Segment | None) -> None:
        faults.point("agent.message")
        if isinstance(message, Attach):
            if segment is not None:
                self._slots.attach(message.name, segment)
        elif isinstance(message, Structure):
            self._work.structure = message
        elif isinstance(message, Open):
            self._work.begin(message)
        elif isinstance(message, Adopt):
            self._work.adopt(message)
        elif isinstance(message, Protect):
            self._directory.spare(Path(message.path))
        elif isinstance(message, Recall):
            self._service.send(Recalled(images=self._slots.images(self._service.hello)))
        elif isinstance(message, Bye):
            self._service.leaving = True
        elif isinstance(message, Captured | Update | Seal | Drop):
            self._work.go_on(message)

    def _report(self, *, force: bool = False) -> None:
        """Tell what was recorded, and how far the tier has come, now and then."""
        now = time.monotonic()
        if not force and now - self._reported <= REPORT_EVERY:
            return
        self._reported = now
        tier = self._directory.tier
        if tier is not None and (state := tier.news()) is not None:
            self._service.send(state)
        if spans := self._recorder.drain():
            self._service.send(Recorded(spans=spans))
