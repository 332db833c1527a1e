"""The output of a program as it comes: bounded on disk, timed, and its steps counted.

One thread for each program reads its pipe until all who hold the other end are gone. What always
holds: the file never grows beyond :data:`LIMIT` bytes plus a line, and keeps the beginning and the
end.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import IO

LIMIT = 1 << 20
"""Bytes kept of the output of one run."""

_LONGEST_LINE = 1 << 16
_LAST = 4096


class Log:
    """Follows one program's output."""

    def __init__(self, stream: IO[bytes], path: Path, step: re.Pattern[str] | None) -> None:
        """Begin to read.

        Args:
            stream: the program's output, stdout and stderr in one; read to its end and closed.
            path: where it is kept.
            step: whose first group is a step's number, in the line that ends the step.
        """
        self.first_output: float | None = None
        """Monotonic seconds; None before there was any."""
        self.steps: list[tuple[float, int]] = []
        """(monotonic seconds, number) of every line that told of a step."""
        self._stream, self._path, self._step = stream, path, step
        self._pending = b""
        self._written = 0
        self._left_out = 0
        self._tail = b""
        self._last = b""
        self._thread = threading.Thread(target=self._read, name="crash-log", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the end of the output; children of the program may hold it open for longer."""
        self._thread.join(timeout)

    def last_lines(self, count: int = 3) -> str:
        """The end of the output in one line, for messages."""
        lines = [one.strip() for one in self._last.decode(errors="replace").splitlines()]
        return " | ".join([one for one in lines if one][-count:]) or "(it said nothing)"

    def _read(self) -> None:
        with self._stream as stream, self._path.open("wb") as file:
            while chunk := stream.read1(_LONGEST_LINE):  # type: ignore[attr-defined]
                now = time.monotonic()
                self.first_output = self.first_output or now
                self._last = (self._last + chunk)[-_LAST:]
                self._keep(file, chunk)
                self._count_steps(chunk, now)
            if self._left_out:
                file.write(b"\n[%d bytes left out]\n" % self._left_out)
            file.write(self._tail)

    def _keep(self, file: IO[bytes], chunk: bytes) -> None:
        head = chunk[: max(0, LIMIT // 2 - self._written)]
        file.write(head)
        file.flush()
        self._written += len(head)
        tail = self._tail + chunk[len(head) :]
        self._tail = tail[-LIMIT // 2 :]
        self._left_out += len(tail) - len(self._tail)

    def _count_steps(self, chunk: bytes, now: float) -> None:
        if self._step is None:
            return
        *lines, rest = re.split(rb"[\r\n]+", self._pending + chunk)
        self._pending = rest[-_LONGEST_LINE:]
        for line in lines:
            found = self._step.search(line.decode(errors="replace"))
            if found and found[1] and found[1].isdecimal():
                self.steps.append((now, int(found[1])))
