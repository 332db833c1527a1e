"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let the tests' children have Ctrl-C: who runs this in the background may have taken it away.

    A signal that is ignored stays so in every process that is started.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
