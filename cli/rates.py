"""Rates of gockpt's own work beside the raw limit of the same machine, measured in turns.

For ``gockpt doctor``; runs in its process. The best of a few rounds counts on both sides, as other
load on the machine only ever slows.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gockpt
from gockpt import storage
from gockpt.devices import CpuDevice
from gockpt.recipe import take_recipe
from gockpt.replay import Replayer
from gockpt.state import Entry
from gockpt.storage import EXTENT, fs
from gockpt.storage.tuning import Tuning

ROUNDS = 3
DEPTH = 4
"""Reads and writes in flight."""

DEADLINE = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One comparison."""

    name: str
    rate: float
    raw_rate: float
    unit: str
    raw_is: str


def as_json(one: Rate) -> dict[str, Any]:
    """As a part of the document."""
    return {**asdict(one), "ratio": one.rate / one.raw_rate}


def _compare(
    name: str, ours: Callable[[], object], raw: Callable[[], object], amount: float, unit: str,
    raw_is: str, rounds: int = ROUNDS,
) -> Rate:  # fmt: skip
    times = [(_seconds(ours), _seconds(raw)) for _ in range(rounds)]
    return Rate(
        name=name,
        rate=amount / min(mine for mine, _ in times),
        raw_rate=amount / min(other for _, other in times),
        unit=unit,
        raw_is=raw_is,
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# -- the disk --------------------------------------------------------------------------------------


def write(directory: Path, size: int) -> Rate:
    """A checkpoint's file, until it is durable."""
    memory = memoryview(fs.page_memory(size))
    memory[:: fs.PAGE] = bytes(n % 251 for n in range(len(memory[:: fs.PAGE])))
    entry = Entry(name="x", dtype="uint8", shape=(size,), order=(0,), offset=0)
    reserve = storage.header_reserve([entry])
    names = (directory / f"image-{n}" for n in itertools.count())
    tuning = Tuning()  # as an agent keeps it

    def ours() -> None:
        path = next(names)
        with storage.ImageWriter(path, memory, reserve, tuning=tuning) as writer:
            writer.write(0, size)
            writer.finish(storage.build_header([entry], size, reserve), timeout=DEADLINE)
        fs.unlink(path)

    def raw() -> None:
        path = next(names)
        fd, _ = fs.create_direct(path)
        try:
            _each_extent(size, lambda at, end: fs.pwrite_all(fd, memory[at:end], at, path=path))
            fs.fdatasync(fd, path=path)
        finally:
            fs.drop(fd, path)

    return _compare("write", ours, raw, size, "B/s", "direct writes of the same bytes, and a sync")


def read(directory: Path, size: int) -> Rate:
    """A whole checkpoint, every byte checked."""
    path = _checkpoint(directory / "read", size)
    file = next(path.glob("*.safetensors"))
    whole = fs.file_size(file) or size
    fd = fs.open_read(file, direct=True)

    def raw() -> None:
        memory = memoryview(fs.page_memory(whole))
        _each_extent(whole, lambda at, end: fs.pread_into(fd, memory[at:end], at, path=file))

    try:
        return _compare("read", lambda: gockpt.open(path).load(threads=DEPTH), raw, whole, "B/s",
                        "direct reads of the same file")  # fmt: skip
    finally:
        fs.close(fd)


def _checkpoint(directory: Path, size: int) -> Path:
    """A checkpoint of about this size."""
    model = nn.Module()
    model.register_buffer("x", torch.arange(size // 8))
    model.register_parameter("p", nn.Parameter(torch.zeros(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gockpt.Checkpointer(
        model, optimizer, directory, every=1, strategy="sync", agent="thread", keep=None
    ) as ckpt:
        model.p.grad = torch.ones(1)
        optimizer.step()
        ckpt.step()
    return gockpt.open(directory).path


def _each_extent(size: int, work: Callable[[int, int], object]) -> None:
    """``work(start, end)`` for every extent, on several threads."""
    with ThreadPoolExecutor(DEPTH) as pool:
        starts = range(0, size, EXTENT)
        list(pool.map(lambda at: work(at, min(at + EXTENT, size)), starts, timeout=DEADLINE))


# -- memory and arithmetic -------------------------------------------------------------------------


def replay(directory: Path, size: int) -> Rate:
    """AdamW updates over the blocks of a slot."""
    params = max(4096, size // 64 // 4096 * 4096)
    ours, raw = _replayed(params), _plain(params)
    ours()  # both have made their state and touched their memory
    return _compare(
        "replay", ours, raw, params, " params/s", "torch's fused AdamW on plain tensors"
    )


def _plain(params: int) -> Callable[[], object]:
    param = nn.Parameter(torch.randn(params))
    param.grad = torch.randn(params)
    optimizer = torch.optim.AdamW([param], lr=1e-3, fused=True)
    optimizer.step()
    return optimizer.step


def _replayed(params: int, blocks: int = 4) -> Callable[[], object]:
    slot = [torch.randn(params), torch.zeros(params), torch.zeros(params)]
    grad = torch.randn(params)
    replayer = Replayer([("AdamW", 1)], threads=torch.get_num_threads())
    items: list[tuple[int, Tensor]] = []
    for start in range(0, params, params // blocks):
        part = slice(start, start + params // blocks)
        block = replayer.add(
            optimizer=0,
            group=0,
            param=slot[0][part],
            state={"exp_avg": slot[1][part], "exp_avg_sq": slot[2][part]},
            reserved={},
            scalars={"step": torch.tensor(1.0)},
        )
        items.append((block, grad[part]))
    update, _ = take_recipe(torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3, fused=True))
    return lambda: replayer.apply(0, update, items)


def copy(directory: Path, size: int) -> Rate:
    """State from the device to the host: CUDA if it is there, else the CPU as its own device."""
    if torch.cuda.is_available():
        return _cuda_copy(size)
    device = CpuDevice()
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def ours() -> None:
        device.copy([(target, source)], lane="probe", step=0).wait(DEADLINE)

    def raw() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)

    try:
        return _compare("copy", ours, raw, size, "B/s", "one thread's memmove")
    finally:
        device.close()


def _cuda_copy(size: int) -> Rate:
    from gockpt.devices.cuda import CudaDevice

    device = CudaDevice(0)
    source = torch.ones(size, dtype=torch.uint8, device=device.name)
    target = torch.zeros(size, dtype=torch.uint8)
    pinned = torch.zeros(size, dtype=torch.uint8).pin_memory()
    device.register(target)

    def raw() -> None:
        pinned.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def ours() -> None:
        device.copy([(target, source)], lane="probe", step=0).wait(DEADLINE)

    try:
        return _compare("copy", ours, raw, size, "B/s", "a copy to memory that CUDA allocated")
    finally:
        device.unregister(target)
        device.close()
