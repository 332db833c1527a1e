"""The trainer's inbox: takes the agent's messages, and finds out when the agent is gone or stuck.

One thread of the trainer. What always holds: an agent that gives no sign of life is ended, and then
replaced like one that died; an agent that is a thread cannot be ended, and is waited for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gockpt.agent.channel import ChannelClosed
from gockpt.agent.launch import Running
from gockpt.agent.protocol import AnyMessage
from gockpt.errors import AgentError

log = logging.getLogger("gockpt")

SILENCE = 60.0
"""Seconds without a sign of life after which an agent is taken for stuck, and replaced."""

LOOK = 0.5
"""Seconds between two looks at whether the agent is there."""


class Inbox:
    """Listens to whichever agent there is."""

    def __init__(
        self,
        *,
        agent: Callable[[], Running],
        note: Callable[[AnyMessage], None],
        lost: Callable[[], bool],
        ended: Callable[[], bool],
        failed: Callable[[BaseException], None],
        may_end_it: bool,
    ) -> None:
        """
        Args:
            agent: the present one.
            note: told of each message.
            lost: called when it is gone; whether there is another one.
            ended: whether nothing more is to be expected of it.
            failed: told that a stuck one does not end.
            may_end_it: whether a stuck one can be ended.
        """
        self._agent, self._note, self._lost = agent, note, lost
        self._ended, self._failed, self._may_end_it = ended, failed, may_end_it
        self._thread = threading.Thread(target=self._run, name="gockpt-inbox", daemon=True)
        self.start, self.join = self._thread.start, self._thread.join

    def _run(self) -> None:
        quiet = 0.0
        while True:
            try:
                received = self._agent().channel.receive(LOOK)
            except ChannelClosed:
                if not self._lost():
                    return
                quiet = 0.0
                continue
            if received is not None:
                quiet = 0.0
                self._note(received[0])
                continue
            if self._ended():
                return
            quiet += LOOK  # not by the clock: this process may itself have been stopped
            # A thread cannot be ended: it would keep its lock, and another one could not have it.
            if quiet > SILENCE and self._may_end_it and not self._end():
                return

    def _end(self) -> bool:
        """End an agent that gives no sign of life; it is then replaced like a dead one."""
        log.warning("the agent gave no sign of life for %.0f s and is ended", SILENCE)
        try:
            self._agent().kill()
        except AgentError as error:
            self._failed(error)
            return False
        return True
