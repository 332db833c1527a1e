"""The image writer against raw direct writes of the same bytes: at least 0.85 of their rate.

Both write the same memory to new files of the same directory, by turns in one run, up to a sync;
what differs is hashing, header, bounds and threads of our own. Run with ``-s`` to see the ratio.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from gockpt import storage
from gockpt.state import Entry
from gockpt.storage import fs
from gockpt.storage.tuning import Tuning

SIZE = 256 << 20
DEPTH = 4
ROUNDS = 15
TARGET = 0.85


@pytest.fixture(scope="module")
def memory() -> memoryview:
    view = memoryview(fs.page_memory(SIZE))
    block = os.urandom(1 << 20)
    for offset in range(0, SIZE, len(block)):
        view[offset : offset + len(block)] = block
    return view


def write_raw(path: Path, memory: memoryview) -> None:
    """The same bytes in the same pieces, several in flight, and nothing else."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | fs.DIRECT)

    def write(first: int) -> None:
        for start in range(first * storage.EXTENT, SIZE, DEPTH * storage.EXTENT):
            os.pwrite(fd, memory[start : start + storage.EXTENT], start)

    threads = [threading.Thread(target=write, args=(first,)) for first in range(DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fdatasync(fd)
    os.close(fd)


def write_image(path: Path, memory: memoryview, tuning: Tuning) -> None:
    entry = Entry(name="x", dtype="uint8", shape=(SIZE,), order=(0,), offset=0)
    reserve = storage.header_reserve([entry])
    with storage.ImageWriter(path, memory, reserve, tuning=tuning) as writer:
        writer.write(0, SIZE)
        writer.finish(storage.build_header([entry], SIZE, reserve))


def test_writer_keeps_up_with_raw_writes(
    benchmark: BenchmarkFixture, tmp_path: Path, memory: memoryview
) -> None:
    path, tuning = tmp_path / "image", Tuning(DEPTH, DEPTH)

    def timed(write: Callable[[Path, memoryview], None]) -> float:
        start = time.perf_counter()
        write(path, memory)
        elapsed = time.perf_counter() - start
        path.unlink()
        return elapsed

    raw = [timed(write_raw)]

    def before_each() -> None:
        path.unlink(missing_ok=True)
        raw.append(timed(write_raw))

    benchmark.pedantic(
        write_image, args=(path, memory, tuning), setup=before_each, rounds=ROUNDS, warmup_rounds=1
    )
    ratio = statistics.median(raw) / benchmark.stats.stats.median
    benchmark.extra_info["ratio"] = ratio
    print(f"\nwriter: {ratio:.2f} of raw writes ({SIZE / statistics.median(raw) / 1e9:.2f} GB/s)")
    assert ratio >= TARGET
