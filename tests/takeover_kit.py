"""Trainers that can be killed, for test_takeover: forked from one process that has imported all.

``python takeover_kit.py`` reads one JSON line for each trainer to start, and each trainer prints
one JSON line when it has come to where the test wants to kill it; then it waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from identity_kit import Bag, checkpointer, one_pass

import gockpt
from gockpt.faults import Fault

EVERY, WINDOWS = 4, 3
HOLD = 1.0
"""Seconds that writing is held up where a checkpoint is to be complete but not durable."""

STATES = {
    "free": (1, False, None),
    "filling": (7, False, 4),
    "persisting": (9, True, 8),
    "consistent": (13, True, 12),
    "retained": (9, False, 8),
}
"""State of the newest slot → passes made, whether writing is held up, step of the newest one."""


def train(path: Path, state: str, *, linger: float, fork: bool, slots: int, resume: bool) -> None:
    passes, held, newest = STATES[state]
    # The checkpoint of step 4 is durable; all later ones are held up.
    faults = [Fault(point="output.written", action=f"delay:{HOLD}", after=1, times=0)]
    ckpt = checkpointer(
        training := Bag(),
        path,
        every=EVERY,
        windows=WINDOWS,
        agent="process",
        linger=linger,
        slots=slots,
        keep=1 if resume else None,
        faults=faults if held else [],
    )
    client = ckpt.client
    if client is None:
        return
    if resume:
        ckpt.restore()
    began = ckpt.current_step
    for step in range(began + 1, began + passes + 1):
        one_pass(ckpt, training, step)
        if step == began + EVERY:
            handle = ckpt.save()
        ckpt.step()
        if step == began + EVERY + 1:
            handle.wait(60)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        told = {step for step, what, _ in client.totals.latencies if what == "consistent"}
        if (newest is None or began + newest in told) and (held or client.idle(_open(ckpt))):
            break
        time.sleep(0.005)
    child = 0
    if fork and (child := os.fork()) == 0:
        signal.pause()
    _say(trainer=os.getpid(), child=child)
    while True:
        signal.pause()


def _open(ckpt: Any) -> int | None:
    found: int | None = ckpt.engine.open_sequence
    return found


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)  # no thread is made here, so that it can be forked
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            order = json.loads(line)
            try:
                train(Path(order.pop("path")), order.pop("state"), **order)
            except gockpt.GockptError as error:
                _say(error=str(error))
            os._exit(1)


if __name__ == "__main__":
    main()
