"""Whom an agent serves: a trainer, none any more, or soon another one.

Belongs to the agent's loop; other threads of the agent only send through it. What always holds:
there is one trainer at a time, and one that is told to wait is served or told why not.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass

from gockpt.agent.channel import Channel, ChannelClosed
from gockpt.agent.protocol import Alive, Hello, Message
from gockpt.agent.rendezvous import Guest

log = logging.getLogger("gockpt.agent")


@dataclass(slots=True, kw_only=True)
class Service:
    """The present trainer, and what has become of it."""

    channel: Channel
    hello: Hello
    leaving: bool = False
    """Whether the agent ends as soon as it has nothing left to do."""
    gone_since: float | None = None
    """When the trainer's end was seen."""
    successor: tuple[Guest, Hello] | None = None
    """A trainer that waits until all that is complete has been proved."""

    @property
    def orphaned(self) -> bool:
        """Whether the trainer is dead, and no other one waits to take over."""
        dead = self.gone_since is not None or self.channel.peer_ended(0)
        return dead and self.successor is None

    @property
    def trainer(self) -> int:
        """The pid of whoever is served, or will be as soon as possible."""
        return (self.hello if self.successor is None else self.successor[1]).trainer

    def left(self, *, worth_it: bool) -> float | None:
        """Seconds for which another trainer is waited for; None while there is one.

        Args:
            worth_it: whether there is a checkpoint to be taken over.
        """
        if self.gone_since is None:
            return None
        rest = self.gone_since + self.hello.linger - time.monotonic()
        return max(0.0, rest) if worth_it else 0.0

    def send(self, message: Message) -> None:
        """Tell the trainer."""
        try:
            self.channel.send(message)  # type: ignore[arg-type]
        except ChannelClosed:
            # The trainer's death is noticed by the loop; what is complete is finished for it.
            log.debug("nobody to tell: %r", message)

    def tell_alive(self, alive: Alive) -> None:
        """Tell whoever waits for this agent (on the pulse's thread)."""
        successor = self.successor
        if successor is not None:
            with contextlib.suppress(ChannelClosed):  # the loop notices, when it is his turn
                successor[0].channel.send(alive)
        elif self.gone_since is None:
            self.send(alive)
