"""The copy stream of a CUDA device, and the one thread that launches on it.

The training thread only records an event and queues a job. The launcher, one daemon thread per
device in the trainer process, makes the copy stream wait for that event, submits the job, and
records its end. So a window of a thousand tensors costs the training thread microseconds.

What always holds:

* Jobs are launched in the order in which they were queued, so one stream keeps them in order.
* A job's tensors are held until its end has passed on the device, also if it failed or was given
  up. Their memory belongs to the compute stream's pool of torch's allocator, which could otherwise
  give it out again under a running copy.
* Temporaries are allocated while the copy stream is current, so it alone reuses them.
"""

# mypy: disable-error-code="no-untyped-call"
# torch.cuda's streams and events are not annotated.

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Queue

import torch

from gockpt.devices.accounting import Progress
from gockpt.errors import DeviceError
from gockpt.events import Recorder

POLL_S = 0.001
IDLE_S = 0.05
LIVENESS_S = 0.25
CLOCK_S = 60.0
"""How long one origin of the device's clock is used: its differences are 32-bit floats."""


class CudaCopied:
    """The completion of one job (see :class:`gockpt.devices.base.Copied`)."""

    def __init__(self, launcher: Launcher, lane: str, step: int, pairs: int | None) -> None:
        self.lane = lane
        self.step = step
        self.progress = Progress(pairs)
        self.ready = torch.cuda.Event()
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.launched = threading.Event()
        self.error: Exception | None = None
        self._launcher = launcher
        self._lost = False

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._lost or self.passed()

    def passed(self) -> bool:
        """Whether the device has passed its end, and so reads its tensors no more."""
        if not self.launched.is_set():
            return False  # An event that was never recorded would claim to have passed.
        try:
            return bool(self.end.query())
        except RuntimeError as error:  # Such errors stay: nothing can end well here any more.
            self.error = self.error or error.with_traceback(None)
            return True

    def wait(self, timeout: float) -> bool:
        """Wait on the host; see the protocol."""
        deadline = time.monotonic() + timeout
        if not self.wait_launched(timeout):
            return False
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)  # Not synchronize(): that has no deadline.
        self.raise_failure()
        return True

    def wait_launched(self, timeout: float) -> bool:
        """Wait until its end is recorded on the copy stream, not until it has passed."""
        deadline = time.monotonic() + timeout
        while not self.launched.wait(min(LIVENESS_S, max(0.0, deadline - time.monotonic()))):
            if not self._launcher.alive and not self.launched.is_set():
                self.lose(DeviceError("the thread that was to launch it is gone"))
            elif time.monotonic() >= deadline:
                return False
        self.raise_failure()
        return True

    def withdraw(self) -> int:
        """Take back the pairs not begun; see the protocol."""
        return self.progress.withdraw()

    @property
    def seconds(self) -> float | None:
        """Time on the copy stream, once done; None before, and if it failed."""
        if not self.done() or self.error is not None:
            return None
        return float(self.start.elapsed_time(self.end)) / 1000

    def lose(self, error: Exception) -> None:
        """Nobody will launch it, or wait for it, any more."""
        self.error, self._lost = self.error or error, True
        self.launched.set()

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything has."""
        if self.error is not None:
            raise DeviceError(
                f"the {self.lane} copy of step {self.step} on {self._launcher.name} failed: "
                f"{self.error}; the checkpoint that it belongs to is not complete"
            ) from self.error


Submit = Callable[[CudaCopied], None]


@dataclass(slots=True, kw_only=True)
class _Job:
    """What to submit on the copy stream; keeps its tensors alive by being kept."""

    copied: CudaCopied
    submit: Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Two marks on the compute stream that become a span once the device has passed both."""

    lane: str
    name: str
    step: int
    first: torch.cuda.Event
    last: torch.cuda.Event


class _Clock:
    """Puts device events on the host's time axis."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self.renew()

    def renew(self) -> None:
        """Take a new origin. The stream must be empty, else this waits for it."""
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(self._stream)
        self._origin.synchronize()
        self.renewed = time.monotonic()

    def at(self, event: torch.cuda.Event) -> float:
        """When the device passed this event (it may be older than the origin)."""
        return self.renewed + float(self._origin.elapsed_time(event)) / 1000


class Launcher:
    """Launches jobs on its own stream, and turns what the device has passed into spans."""

    def __init__(self, name: str, index: int, recorder: Recorder) -> None:
        self.name = name
        self.gated_s = 0.0
        self._index = index
        self._recorder = recorder
        # Not SimpleQueue: its get(timeout=...) can wait for ever (CPython 3.11).
        self._jobs: Queue[_Job | None] = Queue()
        self._flying: deque[_Job] = deque()
        self._stretches: deque[Stretch] = deque()
        self._reaping = threading.Lock()
        self._closed = False
        with torch.cuda.device(index):
            self.stream = torch.cuda.Stream(index)
            self._clock = _Clock(self.stream)
        self._thread = threading.Thread(target=self._serve, name=f"gockpt-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is there to do what is queued."""
        return self._thread.is_alive()

    def queue(self, submit: Submit, *, lane: str, step: int, pairs: int | None = 0) -> CudaCopied:
        """Queue a job behind all that the caller's current stream holds now.

        Raises:
            DeviceError: the launcher is closed.
        """
        if self._closed:
            raise DeviceError(f"{self.name} is closed; open the device again to copy from it")
        copied = CudaCopied(self, lane, step, pairs)
        copied.ready.record(torch.cuda.current_stream(self._index))
        self._jobs.put(_Job(copied=copied, submit=submit))
        return copied

    def watch(self, stretch: Stretch) -> None:
        """Record this stretch of the compute stream once the device has passed it."""
        self._stretches.append(stretch)

    def close(self, timeout: float) -> None:
        """Finish the jobs queued, for at most ``timeout`` seconds, and end the thread.

        Raises:
            DeviceError: some did not end in time; they are failed and their waiters told.
        """
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)  # Only to wake the thread.
        self._thread.join(timeout)
        lost = self._abandon()
        if lost:
            raise DeviceError(
                f"{lost} copies on {self.name} did not end within {timeout:.0f} s of closing; "
                "the checkpoints they belong to are not complete"
            )

    def reap(self) -> None:
        """Record what the device has passed, and let go of its tensors. From any thread."""
        with self._reaping:
            while self._flying and self._flying[0].copied.passed():
                copied = self._flying.popleft().copied
                if copied.error is None:
                    self._span(copied.lane, copied.lane, copied.step, copied.start, copied.end)
            while self._stretches and _passed(self._stretches[0].last):
                passed = self._stretches.popleft()
                seconds = self._span(
                    passed.lane, passed.name, passed.step, passed.first, passed.last
                )
                self.gated_s += seconds if passed.lane == "stall" else 0.0

    def _span(
        self, lane: str, name: str, step: int, first: torch.cuda.Event, last: torch.cuda.Event
    ) -> float:
        try:
            start, end = self._clock.at(first), self._clock.at(last)
        except RuntimeError:  # The device has failed, and says so to whoever uses it next.
            return 0.0
        self._recorder.add(lane, name, start, end, step)
        return end - start

    def _serve(self) -> None:
        torch.cuda.set_device(self._index)
        with torch.no_grad(), torch.cuda.stream(self.stream):
            while not self._closed or self._flying or not self._jobs.empty():
                self._turn()

    def _turn(self) -> None:
        """Launch the next job if there is one; let go of those that the device has done."""
        try:
            job = self._jobs.get(timeout=POLL_S if self._flying else IDLE_S)
        except Empty:
            job = None
        if job is not None:
            self._flying.append(job)  # First: its tensors are held whatever happens next.
            self._launch(job)
        self.reap()
        if not self._flying and time.monotonic() - self._clock.renewed > CLOCK_S:
            self._clock.renew()

    def _launch(self, job: _Job) -> None:
        copied = job.copied
        try:
            self.stream.wait_event(copied.ready)
            copied.start.record(self.stream)
            job.submit(copied)
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiter raises it
            copied.error = error.with_traceback(None)
        try:
            # Also after a failure: what was submitted before it still reads its sources.
            copied.end.record(self.stream)
        except RuntimeError as error:
            copied.error = copied.error or error.with_traceback(None)
        copied.launched.set()

    def _abandon(self) -> int:
        """Fail what has not ended; return how many jobs that were."""
        lost = [job.copied for job in list(self._flying) if not job.copied.passed()]
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is not None:
                lost.append(job.copied)
        for copied in lost:
            copied.lose(DeviceError("the device was closed before it ended"))
        return len(lost)


def _passed(event: torch.cuda.Event) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:
        return True
