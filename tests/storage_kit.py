"""Small checkpoints for the storage tests: built, saved as an agent saves them, and compared."""

from __future__ import annotations

import mmap
import os
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from gockpt import faults, storage
from gockpt.state import Entry, align, bits, dtype_name, memory_order
from gockpt.storage import fs
from gockpt.storage.format import digest
from gockpt.storage.parts import Part, cut, place
from gockpt.storage.striped import StripedWriter
from gockpt.storage.volumes import claim

LAUNCH = "0123abcd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A slot: page-aligned memory with entries in it, whose gaps hold random bytes."""

    entries: list[Entry]
    memory: mmap.mmap
    size: int
    tensors: dict[str, torch.Tensor]

    @property
    def view(self) -> memoryview:
        return memoryview(self.memory)

    @property
    def reserve(self) -> int:
        return storage.header_reserve(self.entries)


def make_image(
    tensors: dict[str, torch.Tensor],
    *,
    gap: int = 0,
    tail: int = 0,
    aliases: dict[str, tuple[str, ...]] | None = None,
    seed: int = 0,
) -> Image:
    """Lay tensors out with ``gap`` unused bytes (rounded up to 64) between them."""
    entries, end = [], 0
    for name, tensor in tensors.items():
        order = memory_order(tensor)
        if order is None:
            raise ValueError(f"{name} is not dense")
        entry = Entry(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            order=order,
            offset=align(end),
            aliases=(aliases or {}).get(name, ()),
        )
        entries.append(entry)
        end = entry.offset + entry.nbytes + gap
    size = end + tail
    memory = fs.page_memory(size)
    memory[:] = random.Random(seed).randbytes(1 << 16).ljust(len(memory), b"g")[: len(memory)]
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        raw = bits(tensor).numpy().tobytes()
        memory[entry.offset : entry.offset + len(raw)] = raw
    return Image(entries=entries, memory=memory, size=size, tensors=tensors)


def small_image(seed: int = 0) -> Image:
    """A few kilobytes: two layers, a tied name, Adam's scalar, a pair type, an empty tensor."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "model.a.weight": rand(8, 3, 4, 4).to(memory_format=torch.channels_last),
        "model.a.bias": rand(7).to(torch.bfloat16),
        "optim.a.weight.step": torch.tensor(float(seed)),
        "model.fourier": torch.complex(rand(5), rand(5)),
        "model.nothing": rand(0, 5),
        "model.b.weight": rand(33, 17).t(),
    }
    return make_image(tensors, gap=100, tail=33, aliases={"model.b.weight": ("model.tied",)})


def large_image(seed: int = 0, megabytes: int = 40) -> Image:
    """Several extents: ``model.0`` to ``model.3``, of equal sizes."""
    size = megabytes << 18
    whole = torch.randint(
        -(1 << 31), 1 << 31, (size,), generator=torch.Generator().manual_seed(seed)
    )
    return make_image({f"model.{i}": part for i, part in enumerate(whole.int().chunk(4))})


def write_image(directory: Path, image: Image, *, rank: int = 0) -> storage.Manifest:
    """Write an image's file and return a manifest for it."""
    path = directory / storage.file_name(rank)
    with storage.ImageWriter(path, image.view, image.reserve, size=image.size, tuning=2) as writer:
        writer.write(0, image.size)
        header = storage.build_header(image.entries, image.size, image.reserve)
        extents = writer.finish(header, timeout=200)
    file = storage.FileRecord(
        name=path.name, size=image.reserve + image.size, data_start=image.reserve
    )
    tensors = storage.tensor_records(image.entries)
    return manifest_of(directory, rank=rank, files=(file,), tensors=tensors, extents=tuple(extents))


def manifest_of(
    directory: Path,
    *,
    rank: int = 0,
    files: tuple[storage.FileRecord, ...],
    tensors: tuple[storage.TensorRecord, ...],
    extents: tuple[storage.Extent, ...],
) -> storage.Manifest:
    """The manifest of a checkpoint in ``directory`` with these files."""
    name = storage.parse_name(directory.name)
    return storage.Manifest(
        step=name.step if name else 0,
        sequence=name.sequence if name else 0,
        run_id="run",
        launch_id=name.launch if name else LAUNCH,
        rank=rank,
        created="2025-01-01T00:00:00+00:00",
        strategy="gockpt",
        windows=3,
        base=0,
        files=files,
        tensors=tensors,
        groups={"decay": {"lr": 0.1}},
        extras={"scheduler": {"last_epoch": 3}},
        proof={"outcome": "exact"},
        extents=extents,
    )


def write_parts(
    directory: Path, image: Image, shares: Sequence[Path], *, extent: int = fs.PAGE
) -> storage.Manifest:
    """Write an image's files, divided over shares of volumes, and return a manifest for it."""
    size, reserve = image.size, image.reserve

    def path(part: Part) -> Path:
        return shares[part.file] / directory.name / f"rank-00000-v{part.file}.safetensors"

    def create(part: Part) -> storage.ImageWriter:
        fs.mkdir(path(part).parent)
        data = image.view[part.start : part.start + align(part.size, fs.PAGE)]
        return storage.ImageWriter(
            path(part), data, reserve, size=part.size, tuning=2, extent=extent, file=part.file
        )

    parts = cut(size, len(shares), extent)
    placed = place(image.entries, parts)
    headers = [
        storage.build_header(entries, part.size, reserve)
        for entries, part in zip(placed.entries, parts, strict=True)
    ]
    writer = StripedWriter(parts, [share.parent for share in shares], create)
    try:
        writer.write(0, size)
        extents = writer.finish(headers, timeout=200)
    except BaseException:
        writer.abort()
        raise
    files = tuple(
        storage.FileRecord(
            name=path(part).name,
            size=reserve + part.size,
            data_start=reserve,
            volume=str(shares[part.file]),
            seconds=seconds,
        )
        for part, seconds in zip(parts, writer.seconds, strict=True)
    )
    return manifest_of(directory, files=files, tensors=placed.records, extents=tuple(extents))


def save(
    root: Path,
    *,
    step: int,
    image: Image | None = None,
    launch: str = LAUNCH,
    still_ours: Callable[[], bool] = lambda: True,
    volumes: Sequence[Path] = (),
) -> Path:
    """Save a checkpoint as an agent does: on any failure its directory is discarded again."""
    image = image or small_image(step)
    shares = claim(root, volumes)
    directory = storage.create_checkpoint(
        root,
        step=step,
        sequence=storage.next_sequence(root),
        launch=launch,
        durably=bool(shares),
    )
    try:
        if shares:
            manifest = write_parts(directory, image, shares)
        else:
            manifest = write_image(directory, image)
        storage.commit(directory, manifest, still_ours=still_ours)
    except Exception:
        storage.discard(directory)
        raise
    return directory


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Same dtype, shape, memory order and bytes (NaN and -0.0 included)."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if wanted.numel():
        assert memory_order(found) == memory_order(wanted)
        assert torch.equal(bits(found), bits(wanted))


def assert_holds(root: Path, step: int) -> None:
    """The newest good checkpoint is that of ``step``, with the content that ``save`` gave it."""
    checkpoint, tensors, _ = storage.load_newest(root)
    assert checkpoint.step == step
    for name, wanted in small_image(step).tensors.items():
        assert_same_bits(tensors[name], wanted)


def forge(manifest: storage.Manifest, change: Callable[[dict[str, object]], object]) -> bytes:
    """The bytes of a manifest changed at will, with a right checksum."""
    fields: dict[str, object] = msgspec.json.decode(msgspec.json.encode(manifest))
    change(fields)
    fields.pop("checksum")  # stands last, and empty, when the sum is taken
    fields["checksum"] = ""
    blank = msgspec.json.encode(fields)
    return blank[:-2] + digest(blank).encode() + blank[-2:]


def in_child(work: Callable[[], object], *, wait: bool = True) -> int:
    """Run ``work`` in a forked child that ends with it: code 0, or 1 after an exception.

    Returns:
        The child's wait status, or its pid if it is not waited for.
    """
    with warnings.catch_warnings():
        # Threads of other tests may still be alive; the child uses none of what they lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 (the child's last words)
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] if wait else child


def passes(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> list[tuple[str, int]]:
    """Every pass of ``work`` through a fault point, as (point, passes through it before)."""
    seen: list[tuple[str, int]] = []
    count: dict[str, int] = {}

    def record(name: str, path: Path | None = None) -> None:
        seen.append((name, count.get(name, 0)))
        count[name] = count.get(name, 0) + 1

    with monkeypatch.context() as patch:
        patch.setattr(faults, "point", record)
        work()
    return seen
