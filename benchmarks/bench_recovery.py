"""The way back after a crash: from the agent's memory, and from the disk.

Reading and checking a checkpoint of 200 MB both ways, by turns; and the seconds to the first new
step of ``gockpt train`` on the emulated accelerator, killed after a checkpoint and started again,
with its agent alive and with that killed as well. Memory must be the faster way. Run with ``-s`` to
see the figures.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import gockpt
from gockpt.storage import newest
from gockpt.storage.lock import holder

PARAMS = 16 << 20
READS = 5

COMMAND = (
    "train --model gpt-125m --device emulated:a100-pcie4 --interval 4 --windows 2 --steps 100000 "
    "--linger 600"
)
"""Memory waits for long: on a busy machine a process may take minutes to start."""

ROUNDS = 2
LIMIT = 240.0

Rows = dict[str, list[dict[str, float]]]


def compare(found: Rows, key: str) -> float:
    """How many times as fast memory is, by the medians."""
    middle = {source: statistics.median(row[key] for row in rows) for source, rows in found.items()}
    ratio = middle["ssd"] / middle["memory"]
    print(
        f"{key}: {middle['memory']:.3f} s from memory, {middle['ssd']:.3f} s from the disk "
        f"({ratio:.2f} times as fast)"
    )
    return ratio


@pytest.mark.timeout(600)
def test_memory_is_read_faster_than_the_disk(tmp_path: Path) -> None:
    model = torch.nn.Linear(PARAMS // 1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found: Rows = {"memory": [], "ssd": []}
    for number in range(READS + 1):
        with gockpt.Checkpointer(model, optimizer, tmp_path, every=1, keep=1) as ckpt:
            if number:
                note(found, ckpt.restore())  # this agent has nothing in memory yet
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            ckpt.step()
            ckpt.wait()
            note(found, ckpt.restore())
    assert [len(rows) for rows in found.values()] == [READS + 1, READS]
    assert compare(found, "read_s") > 1


def note(found: Rows, restored: gockpt.Restored | None) -> None:
    assert restored is not None
    found[restored.source].append({"read_s": restored.read_seconds})


def step_of(path: Path) -> int:
    found = newest(path)
    return 0 if found is None else found.step


class Life:
    """One ``gockpt train``, from its start to the crash."""

    def __init__(self, path: Path) -> None:
        self._path, self._before = path, step_of(path)
        command = [sys.executable, "-u", "-m", "gockpt", *COMMAND.split(), "--dir", str(path)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self._lines.extend(lines)

    def crash(self, *, agent: bool) -> None:
        """When there is one more checkpoint, kill it, and its agent too if asked."""
        deadline = time.monotonic() + LIMIT
        while step_of(self._path) == self._before and time.monotonic() < deadline:
            assert self._process.poll() is None, self._lines
            time.sleep(0.2)
        self._process.kill()
        self._process.wait(LIMIT)
        self._reader.join(LIMIT)
        assert step_of(self._path) > self._before
        if agent:
            pid = holder(self._path / ".gockpt" / "rank-00000.lock")["pid"]
            assert isinstance(pid, int)
            os.kill(pid, signal.SIGKILL)

    def recovery(self) -> tuple[str, dict[str, float]]:
        """Where it went on from, and the seconds that this took, as it has printed them."""
        line = next(one for one in self._lines if one.startswith("recovered from"))
        print(line.strip())
        source, rest = line.removeprefix("recovered from ").split(" in ", 1)
        total, parts = rest.strip().split(": ", 1)
        figures = {"total": seconds(total)}
        for part in parts.split(", "):
            name, _, value = part.rpartition(" ")[0].rpartition(" ")
            figures[name] = seconds(f"{value} {part.rpartition(' ')[2]}")
        return source, figures


def seconds(text: str) -> float:
    """``1.23 s`` or ``45.6 ms``."""
    value, unit = text.split()
    return float(value) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


@pytest.mark.timeout(600)
def test_memory_is_the_faster_way_back(tmp_path: Path) -> None:
    """Each life goes on where the one before was killed: so each is one figure."""
    path = tmp_path / "checkpoints"
    found: Rows = {"memory": [], "ssd": []}
    for number in range(2 * ROUNDS + 1):
        life = Life(path)
        life.crash(agent=number % 2 == 1 or number == 2 * ROUNDS)
        if number:
            source, figures = life.recovery()
            found[source].append(figures)
    assert [len(rows) for rows in found.values()] == [ROUNDS, ROUNDS]
    for key in found["ssd"][0]:
        compare(found, key)
    assert compare(found, "total") > 1
