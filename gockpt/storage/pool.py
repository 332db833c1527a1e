"""A few daemon threads for file work, whose failures are never lost and whose waits have an end.

Used by the writer (in the agent) and by checked reading. Unlike ``concurrent.futures``, a disk that
hangs cannot keep the process from ending. After the first failure jobs not yet begun are dropped.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from gockpt.errors import StorageError


class Pool:
    """Runs jobs on ``threads`` threads, or as many as :meth:`resize` says, until :meth:`close`."""

    def __init__(self, threads: int, *, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open = 0
        self._error: Exception | None = None
        self._name = name
        self._threads: list[threading.Thread] = []  # those that have not been told to leave
        self._wanted = 0
        self._closed = False
        self.resize(threads)

    @property
    def waiting(self) -> bool:
        """Whether jobs are waiting for a thread."""
        return not self._jobs.empty()

    def resize(self, threads: int) -> None:
        """Have ``threads`` threads; those that are too many leave after their next job."""
        if threads == self._wanted:
            return
        with self._changed:
            self._wanted = threads
            while len(self._threads) < threads and not self._closed:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; never blocks.

        Raises:
            Exception: that of an earlier job.
        """
        self.check()
        with self._changed:
            self._open += 1
        self._jobs.put(job)

    def check(self) -> None:
        """Raise the first failure there was."""
        if self._error is not None:
            raise self._error

    def wait(self, deadline: float) -> None:
        """Wait until all jobs are done.

        Args:
            deadline: value of ``time.monotonic()`` after which to give up.

        Raises:
            Exception: that of the first job that failed.
            StorageError: the deadline passed.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._open == 0, max(0.0, deadline - time.monotonic())
            )
        self.check()
        if not done:
            raise StorageError("the disk did not answer before the deadline; is it hung?")

    def fail(self, error: Exception) -> None:
        """Drop all jobs that have not begun; the error is raised by later calls."""
        if self._error is None:
            self._error = error

    def close(self, timeout: float) -> bool:
        """End the threads; False if one of them is still busy after ``timeout`` seconds."""
        with self._changed:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            except Exception as error:  # noqa: BLE001 (raised by whoever waits)
                self.fail(error)
            finally:
                with self._changed:
                    self._open -= 1
                    self._changed.notify_all()
                    surplus = len(self._threads) > self._wanted and not self._closed
                    if surplus:
                        self._threads.remove(threading.current_thread())
            if surplus:
                return
