"""The trainer's outbox: turns finished copies into messages to the agent, in the order of posting.

One thread of the trainer. It waits for copies with a deadline, and neither hashes, writes nor
replays anything.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gockpt.agent.channel import ChannelClosed
from gockpt.agent.protocol import AnyMessage
from gockpt.errors import AgentError, DeviceError


class Finished(Protocol):
    """A completion to wait for (the part of :class:`gockpt.devices.base.Copied` used here)."""

    def wait(self, timeout: float) -> bool:
        """Wait for at most ``timeout`` seconds; whether it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class _Parcel:
    make: Callable[[], AnyMessage | None]
    after: Finished | None
    generation: int
    failed: Callable[[DeviceError], None] | None


class Outbox:
    """What is to be told to the agent."""

    def __init__(
        self,
        send: Callable[[AnyMessage | None, int], None],
        failed: Callable[[BaseException], None],
        stuck_after: float,
    ) -> None:
        """
        Args:
            send: sends a message that is meant for the agent of a generation.
            failed: told of whatever goes wrong, but for an agent that is gone.
            stuck_after: seconds that a copy may take.
        """
        self._send, self._failed, self._stuck_after = send, failed, stuck_after
        self._queue: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gockpt-outbox", daemon=True)
        self.start = self._thread.start

    def post(
        self,
        make: Callable[[], AnyMessage | None],
        after: Finished | None,
        generation: int,
        failed: Callable[[DeviceError], None] | None = None,
    ) -> None:
        """Call ``make`` on the thread once ``after`` has ended, and send what it returns.

        Args:
            failed: called there instead if ``after`` has ended badly.
        """
        self._queue.put(_Parcel(make, after, generation, failed))

    def flush(self, timeout: float) -> bool:
        """Wait until all that was posted so far has been made and sent; whether it has."""
        reached = threading.Event()
        self._queue.put(_Parcel(reached.set, None, 0, None))
        return reached.wait(timeout)

    def close(self, timeout: float) -> None:
        """Send what was posted, and end."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (parcel := self._queue.get()) is not None:
            try:
                if self._arrived(parcel):
                    self._send(parcel.make(), parcel.generation)
            except ChannelClosed:
                continue  # the inbox notices, and starts a new agent
            except Exception as error:  # noqa: BLE001 - raised on the training thread
                self._failed(error)

    def _arrived(self, parcel: _Parcel) -> bool:
        """Wait for its copies; False if they failed and that has been told."""
        try:
            self._await(parcel.after)
        except DeviceError as error:
            if parcel.failed is None:
                raise
            parcel.failed(error)
            return False
        return True

    def _await(self, copy: Finished | None) -> None:
        if copy is None:
            return
        deadline = time.monotonic() + self._stuck_after
        while not copy.wait(0.5):
            if time.monotonic() > deadline:
                raise AgentError(f"a copy did not end within {self._stuck_after:.0f} s")
