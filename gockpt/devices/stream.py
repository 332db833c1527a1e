"""The copy stream of a device that is really the host: one thread doing jobs in order.

Runs in the trainer process as one daemon thread per device. It only moves bytes and calls the
engine's small readers, and lets go of the interpreter lock while it does. What always holds: jobs
end in the order in which they were queued; a job's tensors are let go before it counts as ended; a
job that fails, or a thread that dies, raises at the waiter and never leaves it hanging.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from gockpt.devices.accounting import Progress
from gockpt.errors import DeviceError
from gockpt.events import Recorder

LIVENESS_S = 0.25
"""How often a waiter looks whether the thread still lives."""


class Clock(Protocol):
    """When the link gets to what. All methods are called by the stream's thread only."""

    slice_bytes: int
    """The most bytes that may be read in one turn."""

    def begin(self, queued: float) -> None:
        """A job that was queued at this time comes up."""

    def turn(self, nbytes: int, efficiency: float) -> None:
        """Return when the link gets to these bytes, at most :attr:`slice_bytes` of them."""

    def device(self, nbytes: int) -> None:
        """Return when the device gets to reading these bytes of its own memory."""

    def finish(self) -> None:
        """Return when everything in the job has passed."""


class Unpaced:
    """The clock of a real machine: everything happens as soon as it can."""

    slice_bytes = 1 << 62

    def begin(self, queued: float) -> None:
        """Nothing to wait for."""

    def turn(self, nbytes: int, efficiency: float) -> None:
        """Nothing to wait for."""

    def device(self, nbytes: int) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing to wait for."""


class HostCopied:
    """The completion of one job (see :class:`gockpt.devices.base.Copied`)."""

    def __init__(self, stream: CopyStream, lane: str, step: int, pairs: int | None) -> None:
        self.lane = lane
        self.step = step
        self.progress = Progress(pairs)
        self.queued = time.monotonic()
        self._stream = stream
        self._ended = threading.Event()
        self._seconds: float | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._ended.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait on the host; see the protocol."""
        deadline = time.monotonic() + timeout
        while not self._ended.wait(min(LIVENESS_S, max(0.0, deadline - time.monotonic()))):
            if not self._stream.alive and not self._ended.is_set():
                raise DeviceError(
                    f"the copy thread of {self._stream.name} is gone, with the {self.lane} copy of "
                    f"step {self.step} unfinished; this device cannot be used any more"
                )
            if time.monotonic() >= deadline:
                return False
        if self._error is not None:
            raise DeviceError(
                f"the {self.lane} copy of step {self.step} on {self._stream.name} failed: "
                f"{self._error}; the checkpoint that it belongs to is not complete"
            ) from self._error
        return True

    def withdraw(self) -> int:
        """Take back the pairs not begun; see the protocol."""
        return self.progress.withdraw()

    @property
    def seconds(self) -> float | None:
        """Time on the copy stream, once done."""
        return self._seconds

    def end(self, seconds: float, error: BaseException | None = None) -> None:
        """The stream's thread says that it has ended."""
        self._seconds, self._error = seconds, error
        self._ended.set()


Act = Callable[[HostCopied, Clock], None]
_Job = tuple[Act, HostCopied]


class CopyStream:
    """A thread that does jobs one after another."""

    def __init__(self, name: str, recorder: Recorder, clock: Clock) -> None:
        self.name = name
        self._recorder = recorder
        self._clock = clock
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._current: HostCopied | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"gockpt-copy-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is there to do what is queued."""
        return self._thread.is_alive()

    def submit(self, act: Act, *, lane: str, step: int, pairs: int | None = 0) -> HostCopied:
        """Queue a job.

        Raises:
            DeviceError: the stream is closed.
        """
        if self._closed:
            raise DeviceError(f"{self.name} is closed; open the device again to copy from it")
        copied = HostCopied(self, lane, step, pairs)
        self._jobs.put((act, copied))
        return copied

    def close(self, timeout: float) -> None:
        """Finish the jobs queued, for at most ``timeout`` seconds, and end the thread.

        Raises:
            DeviceError: some did not end in time; they are failed and their waiters told.
        """
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout)
        lost = self._abandon()
        if lost:
            raise DeviceError(
                f"{lost} copies on {self.name} did not end within {timeout:.0f} s of closing; "
                "the checkpoints they belong to are not complete"
            )

    def _abandon(self) -> int:
        """Fail what the thread has not ended; return how many jobs that were."""
        error = DeviceError("the device was closed before it ended")
        current = self._current
        lost = [current] if current is not None and not current.done() else []
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is not None:
                lost.append(job[1])
        for copied in lost:
            copied.end(0.0, error)
        return len(lost)

    def _serve(self) -> None:
        # The one wait without a deadline: this thread is the one that others wait for, and it is a
        # daemon, so it can keep nothing alive.
        while (job := self._jobs.get()) is not None:
            act, copied = job
            del job
            self._current = copied
            self._clock.begin(copied.queued)
            start, error = time.monotonic(), None
            try:
                act(copied, self._clock)
                del act  # The job's tensors go with it: done means that nothing is held any more.
                self._clock.finish()
            except Exception as failure:  # noqa: BLE001 - whatever it is, the waiter raises it
                error = failure.with_traceback(None)  # A traceback would keep the tensors.
                act = _nothing
            end = time.monotonic()
            self._recorder.add(copied.lane, copied.lane, start, end, copied.step)
            copied.end(end - start, error)
            self._current = None
            del copied


def _nothing(copied: HostCopied, clock: Clock) -> None:
    """In the place of a failed job, so that its tensors can go."""
