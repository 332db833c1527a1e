"""One life of a trainer that ``crash-test`` kills. Runs in a process of its own, forked from one
that has imported everything.

What always holds: it says each pass when it has ended; it ends when its parent does; it prints into
its log and nowhere else.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from gockpt import faults
from gockpt.agent.protocol import Pace
from gockpt.cli import crash_recorder
from gockpt.cli.bench_golden import state_hashes
from gockpt.cli.crash_job import Broke, Ended, Golden, Job, Made, Message, Ready, Stepped
from gockpt.cli.crash_lesson import Lesson
from gockpt.cli.crash_methods import PLAIN, Gockpt, Method, PlainSave
from gockpt.cli.task import task_device
from gockpt.devices import Device, EmulatedDevice, ModelledWork, load_profile
from gockpt.storage import scan
from gockpt.workloads.build import Workload


def main(encoded: bytes, parent: Connection) -> None:
    """Do a job; the process ends with 1 if an exception ended it."""
    job = msgspec.json.decode(encoded, type=Job)
    _settle_in(job)
    threading.Thread(target=_leave_with_parent, args=(parent,), daemon=True).start()

    def say(message: Message) -> None:
        parent.send_bytes(msgspec.json.encode(message))

    try:
        if job.strategy is None:
            _golden(job)
            say(Ended(step=job.steps, different=[], durable=[], failed=0))
        else:
            say(_live(job, say))
    except Exception as error:
        logging.exception("the trainer broke")
        say(Broke(kind=type(error).__name__, reason=str(error)))
        sys.exit(1)


def _settle_in(job: Job) -> None:
    """Own session, own environment, own log."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(job.environment)
    tempfile.tempdir = None
    out = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.close(out)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    torch.set_num_threads(1)


def _leave_with_parent(parent: Connection) -> None:
    with suppress(EOFError, OSError):
        parent.recv_bytes()
    os._exit(1)


# -- the golden run --------------------------------------------------------------------------------


class _Bare:
    """A device on which phases mean nothing."""

    def phase(self, name: str, step: int) -> nullcontext[None]:
        return nullcontext()


def _golden(job: Job) -> None:
    """Train without interruption, and write down every state."""
    lesson = Lesson(job, _Bare(), resumed=0)
    states, passes = [hashes(lesson)], []
    for step in range(1, job.steps + 1):
        passes.append(lesson.train(step))
        states.append(hashes(lesson))
    golden = msgspec.json.encode(Golden(passes=passes, states=states))
    partial = Path(f"{job.golden}.{os.getpid()}")
    partial.write_bytes(golden)
    partial.rename(job.golden)


def hashes(lesson: Lesson) -> dict[str, str]:
    """Of the whole state, as a checkpoint has it."""
    workload: Workload = lesson.workload
    return state_hashes(workload)


# -- a life ----------------------------------------------------------------------------------------


def _live(job: Job, say: Callable[[Message], None]) -> Ended:
    golden = msgspec.json.decode(Path(job.golden).read_bytes(), type=Golden)
    if job.record is not None:
        crash_recorder.record(Path(job.directory).parent, Path(job.record))
    faults.arm(job.trainer_faults)
    device, pace = _device(job)
    lesson = Lesson(job, device, resumed=_newest(Path(job.directory)))
    built_at = time.time()
    method: Method
    method = PlainSave(job, lesson) if job.strategy == PLAIN else Gockpt(job, lesson, device, pace)
    try:
        opened_at = time.time()
        found = method.restore()
        step = found.step if found else 0
        say(
            Ready(
                restored=found.step if found else None,
                source=found.source if found else None,
                built_at=built_at,
                opened_at=opened_at,
                read_s=found.read_s if found else 0.0,
                apply_s=found.apply_s if found else 0.0,
                different=golden.differing(step, hashes(lesson)),
            )
        )
        _train(job, lesson, method, say)
    finally:
        method.close()
        device.close()
    step = method.current_step
    return Ended(
        step=step,
        different=golden.differing(step, hashes(lesson)),
        durable=method.durable(),
        failed=method.failed,
    )


def _train(job: Job, lesson: Lesson, method: Method, say: Callable[[Message], None]) -> None:
    while method.current_step < job.steps and not method.should_stop:
        began = time.monotonic()
        made = lesson.train(method.current_step + 1)
        say(Made(made=made))
        method.step()
        say(Stepped(step=made.step, at=time.time(), durable=method.durable(), failed=method.failed))
        time.sleep(max(0.0, job.pace - (time.monotonic() - began)))


def _newest(directory: Path) -> int:
    """The step that will be restored, as the optimizer must be built as it was then."""
    if not directory.is_dir():
        return 0
    return next((one.step for one in scan(directory) if one.problem is None), 0)


def _device(job: Job) -> tuple[Device, Pace | None]:
    if not job.slow_link:
        return task_device(job)
    # So slow that copies are still on their way when the update comes.
    work = ModelledWork(forward_s=0.01, backward_s=0.01, update_s=0.005, shrink=SLOWNESS)
    return EmulatedDevice(load_profile("a100-pcie4"), work), None


SLOWNESS = 700
"""By which a link is slower than that of an accelerator, where copies are to be late."""
