"""Saving and restoring against the disk's own rate, and beside what people use instead.

Everything that is compared handles the same bytes in the same directory of a real disk, by turns in
one run; ratios count, seconds are only printed. The raw rate is that of fio, sequential and past
the page cache (skipped where there is no fio; it is a system package). Run with ``-s`` to see them.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import statistics
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import gockpt
from gockpt import storage
from gockpt.arena import Segment
from gockpt.state import Entry
from gockpt.storage import fs
from gockpt.storage.tuning import Tuning

SIZE = 512 << 20
DEPTH = 4
"""Raw reads and writes in flight."""

ROUNDS = 8
WRITE_TARGET = 0.9
READ_TARGET = 0.85

DUELS = 4
DUELS_WON = 3
MOST_OF_RAW = 1.35
WIDTH = 2048
LAYERS = 11
"""Of 4 Mi parameters each: 528 MiB with the two moments of AdamW."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory whose file system writes past the page cache; emptied at once, not some day."""
    fd, reason = fs.create_direct(tmp_path / "probe")
    fs.drop(fd, tmp_path / "probe")
    if reason is not None:
        pytest.skip(f"{tmp_path} has no direct writes: {reason}; give --basetemp on a disk")
    yield tmp_path
    shutil.rmtree(tmp_path)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def each_extent(size: int, work: Callable[[int, int], object]) -> None:
    """``work(start, end)`` for every extent, several at a time."""

    def some(first: int) -> None:
        for start in range(first * storage.EXTENT, size, DEPTH * storage.EXTENT):
            work(start, min(start + storage.EXTENT, size))

    threads = [threading.Thread(target=some, args=(first,)) for first in range(DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- against fio -----------------------------------------------------------------------------------


def fio(path: Path, kind: str) -> float:
    """Bytes per second of ``write`` (until synced) or ``read``, as fio itself reports them."""
    program = shutil.which("fio")
    if program is None:
        pytest.skip("fio is not installed")
    command = [
        program, "--name=raw", f"--filename={path}", f"--rw={kind}", f"--bs={storage.EXTENT}",
        f"--size={SIZE}", "--direct=1", "--ioengine=libaio", f"--iodepth={DEPTH}",
        "--output-format=json",
    ]  # fmt: skip
    command += ["--fallocate=posix", "--end_fsync=1"] if kind == "write" else ["--readonly"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)["jobs"][0][kind]
    assert report["io_bytes"] == SIZE
    return float(report["bw_bytes"])


class Saver:
    """Writes, syncs and commits a slot as an agent does, into new checkpoints of one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slot = Segment.create("bench", SIZE)
        self.slot.tensor.random_(0, 255)
        self.entry = Entry(name="x", dtype="uint8", shape=(SIZE,), order=(0,), offset=0)
        self.tuning = Tuning()
        self.step = 0

    def save(self) -> Path:
        self.step += 1
        path = storage.create_checkpoint(
            self.root, step=self.step, sequence=self.step, launch=secrets.token_hex(4)
        )
        reserve = storage.header_reserve([self.entry])
        name = storage.file_name(0)
        with storage.ImageWriter(
            path / name, memoryview(self.slot.memory), reserve, tuning=self.tuning
        ) as writer:
            writer.write(0, SIZE)
            extents = writer.finish(storage.build_header([self.entry], SIZE, reserve))
        manifest = storage.Manifest(
            step=self.step,
            sequence=self.step,
            run_id="bench",
            launch_id=path.name[-8:],
            created="2025-01-01T00:00:00+00:00",
            strategy="sync",
            windows=1,
            base=self.step,
            files=(storage.FileRecord(name=name, size=reserve + SIZE, data_start=reserve),),
            tensors=storage.tensor_records([self.entry]),
            proof={"outcome": "exact"},
            extents=tuple(extents),
        )
        storage.commit(path, manifest, still_ours=lambda: True)
        return path


@pytest.mark.timeout(300)
def test_saving_keeps_up_with_the_disk(disk: Path) -> None:
    saver = Saver(disk)

    def raw() -> float:
        rate = fio(disk / "fio", "write")
        (disk / "fio").unlink()
        return rate

    def ours() -> float:
        rate = SIZE / timed(saver.save)
        shutil.rmtree(next(disk.glob("step-*")))
        return rate

    ratio = in_pairs("write + sync + commit", ours, raw)
    way = "through a stage" if saver.tuning.staged else "straight from the slot"
    print(f"found to be best: {saver.tuning.depth} writes in flight, {way}")
    assert ratio >= WRITE_TARGET


@pytest.mark.timeout(300)
def test_checked_restore_keeps_up_with_the_disk(disk: Path) -> None:
    image = Saver(disk).save() / storage.file_name(0)
    ratio = in_pairs(
        "checked restore",
        lambda: SIZE / timed(lambda: storage.load_newest(disk)),
        lambda: fio(image, "read"),
    )
    assert ratio >= READ_TARGET


def in_pairs(what: str, ours: Callable[[], float], raw: Callable[[], float]) -> float:
    """The median ratio of two rates that are measured one right after the other.

    Shared and rented disks change their rate by a multiple within seconds (a cache, a quota), so
    only neighbours are compared. Which one goes first changes from pair to pair.
    """
    pairs = []
    for number in range(1 + ROUNDS):
        if number % 2:
            mine = ours()
            pairs.append((mine, raw()))
        else:
            other = raw()
            pairs.append((ours(), other))
    pairs = pairs[1:]  # in the first one, memory is touched
    ratio = statistics.median(mine / other for mine, other in pairs)
    print(f"\n{what}: {ratio:.2f} of fio; pairs in GB/s:", end=" ")
    print(", ".join(f"{mine / 1e9:.2f}/{other / 1e9:.2f}" for mine, other in pairs))
    return ratio


# -- beside other ways to save ---------------------------------------------------------------------


class State:
    """A model and its AdamW, after one update."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for param in self.model.parameters():
            param.grad = torch.full_like(param, 1e-3)
        self.optimizer.step()

    def nested(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def flat(self) -> dict[str, Tensor]:
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state[param].items():
                found[f"optim.{name}.{key}"] = value
        return found


def sync_all(path: Path) -> None:
    """What it takes until a file, or all files of a directory, survive a power cut."""
    for one in [*path.rglob("*"), path, path.parent]:
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def save_torch(state: State, path: Path) -> None:
    torch.save(state.nested(), path)
    sync_all(path)


def save_safetensors(state: State, path: Path) -> None:
    save_file(state.flat(), path)
    sync_all(path)


def save_dcp(state: State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save(state.nested(), checkpoint_id=path)
    sync_all(path)


class Raw:
    """One copy of the state, and direct writes of it until they are synced: the least there is."""

    def __init__(self, state: State) -> None:
        size = sum(tensor.nbytes for tensor in state.flat().values())
        self.slot = Segment.create("raw", size)

    def save(self, state: State, path: Path) -> None:
        start = 0
        for tensor in state.flat().values():
            self.slot.view(start, tensor.numel(), tensor.dtype).copy_(tensor.reshape(-1))
            start += tensor.nbytes
        fd, _ = fs.create_direct(path)
        memory = memoryview(self.slot.memory)
        each_extent(len(memory), lambda at, end: os.pwrite(fd, memory[at:end], at))
        os.fdatasync(fd)
        os.close(fd)


def save_gockpt(state: State, ckpt: gockpt.Checkpointer) -> None:
    """All that a pass costs whose checkpoint is waited for, but for the training itself."""
    handle = ckpt.save()
    ckpt.step()
    handle.wait(300)


@pytest.mark.timeout(300)
def test_durable_save_beside_others(disk: Path) -> None:
    state = State()
    raw = Raw(state)
    target = disk / "other"
    with gockpt.Checkpointer(
        state.model, state.optimizer, disk / "gockpt", strategy="sync", keep=1
    ) as ckpt:
        ways: dict[str, Callable[[], object]] = {
            "gockpt": lambda: save_gockpt(state, ckpt),
            "raw": lambda: raw.save(state, target),
            "torch.save": lambda: save_torch(state, target),
            "safetensors": lambda: save_safetensors(state, target),
            "dcp": lambda: save_dcp(state, target),
        }
        seconds = side_by_side(ways, state, target)
    compare(seconds)


def side_by_side(
    ways: dict[str, Callable[[], object]], state: State, target: Path
) -> dict[str, list[float]]:
    """Seconds of each way in each round; the first round, in which memory is touched, is left out.

    Each round saves a new state, and no way leaves anything behind that is still to be written.
    """
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + DUELS):
        state.optimizer.step()
        for name in order.sample(sorted(ways), len(ways)):
            seconds[name].append(timed(ways[name]))
            shutil.rmtree(target, ignore_errors=True)
            target.unlink(missing_ok=True)
            os.sync()
    return {name: found[1:] for name, found in seconds.items()}


def compare(seconds: dict[str, list[float]]) -> None:
    ours = seconds["gockpt"]
    print()
    for name, found in seconds.items():
        won = sum(mine < other for mine, other in zip(ours, found, strict=True))
        ratio = statistics.median(ours) / statistics.median(found)
        rounds = " ".join(f"{one:.2f}" for one in found)
        print(f"{name:12} {rounds} s; gockpt {ratio:.2f} of it, faster in {won} of {DUELS}")
        if name not in ("gockpt", "raw"):
            assert won >= DUELS_WON, f"slower than {name}"
    assert statistics.median(ours) <= MOST_OF_RAW * statistics.median(seconds["raw"])
