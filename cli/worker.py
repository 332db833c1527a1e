"""``python -P -m gockpt.cli.worker``: one run of a bench, in a process of its own.

Reads one job from stdin and speaks JSON lines on stdout. Whatever else would print goes to stderr.
When stdin ends, whoever started it is gone, and so is it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import msgspec
import torch

from gockpt.cli import bench_golden, bench_loop
from gockpt.cli.bench_job import Failed, Golden, Job, Measured, Message, Progress
from gockpt.cli.peers import catalog
from gockpt.errors import GockptError


def main() -> int:
    """Do the job that stands in the first line of stdin."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()

    def say(message: Message) -> None:
        answers.write(msgspec.json.encode(message) + b"\n")

    torch.set_num_threads(1)
    try:
        say(_run(job, say))
    except GockptError as error:
        say(Failed(kind=type(error).__name__, reason=str(error)))
        return 1
    return 0


def _run(job: Job, say: Callable[[Progress], None]) -> Golden | Measured:
    if job.strategy is None:
        return bench_golden.run(job, say)
    if catalog.find(job.strategy) is None:
        return bench_loop.run(job, say)
    from gockpt.cli.peers import measure

    return measure.run(job, say)


def _leave_with_parent() -> None:
    # Not through sys.stdin: its lock, held here for ever, would break the interpreter's shutdown.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
