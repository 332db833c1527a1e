"""``python -P -m gockpt.agent FD PID``: the agent's process.

``FD`` is its end of the socket, ``PID`` the trainer it serves. Its output goes to the log that it
was started with.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from gockpt.agent.channel import SocketChannel, pidfd
from gockpt.agent.server import Agent

NICENESS = 10
"""By how much the agent gives way to the training."""


def main() -> int:
    """Serve the trainer that started this process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Ctrl-C in the terminal is the trainer's business; the agent ends when the trainer does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # So is SIGTERM, which may be sent to every process of a container: what the trainer makes of it
    # is still to be written. The agent was started with it blocked.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # Where processors are short, the training goes first.
    os.nice(NICENESS)
    descriptor, trainer = int(sys.argv[1]), int(sys.argv[2])
    try:
        peer = pidfd(trainer)
    except ProcessLookupError:
        return 0
    if os.getppid() != trainer:
        return 0
    Agent(SocketChannel(socket.socket(fileno=descriptor), peer_pidfd=peer)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
