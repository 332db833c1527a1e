"""Plain safetensors files of a checkpoint's tensors, as Hugging Face libraries read them.

One tensor is in memory at a time. Tensors that are tied are written once; the metadata of the file
maps each of their other names to the one that is there, as ``safetensors.torch.save_model`` does.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gockpt.cli.sink import new_file
from gockpt.errors import ConfigError
from gockpt.state import bits, torch_dtype
from gockpt.storage import Checkpoint, fs

STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
"""torch's dtypes, and what ``safetensors.torch`` calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One tensor to write."""

    name: str
    """Its name in the file."""
    source: str
    """Its name in the checkpoint."""
    aliases: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


def items(checkpoint: Checkpoint, names: dict[str, str]) -> list[Item]:
    """What to write: ``names`` are those in the file → in the checkpoint.

    Raises:
        ConfigError: a tensor of a dtype that safetensors has no name for.
    """
    found: dict[str, list[str]] = {}
    for name, source in names.items():
        found.setdefault(checkpoint.record(source).name, []).append(name)
    made = []
    for source, (name, *aliases) in found.items():
        record = checkpoint.record(source)
        if record.dtype not in _DTYPES:
            raise ConfigError(
                f"{source!r} is {record.dtype}, which safetensors does not have; "
                "use --to torch or --to dcp"
            )
        made.append(
            Item(
                name=name,
                source=source,
                aliases=tuple(aliases),
                dtype=record.dtype,
                shape=record.shape,
            )
        )
    return made


def shards(all_items: Sequence[Item], limit: int) -> list[list[Item]]:
    """The items in their order, as many to a shard as ``limit`` bytes take, at least one."""
    made: list[list[Item]] = [[]]
    size = 0
    for item in all_items:
        if made[-1] and size + item.nbytes > limit:
            made.append([])
            size = 0
        made[-1].append(item)
        size += item.nbytes
    return made


def write_file(
    checkpoint: Checkpoint, all_items: Sequence[Item], path: Path, tick: Callable[[int], object]
) -> None:
    """Write one safetensors file, durably.

    Raises:
        StorageError: it cannot be written, or a tensor cannot be read.
    """
    # Ordered as safetensors itself does it, so that each tensor is aligned to its elements.
    ordered = sorted(all_items, key=lambda one: (-torch_dtype(one.dtype).itemsize, one.name))
    header, start = _header(ordered)
    offsets = {}
    end = start
    for item in ordered:
        offsets[item.source] = end
        end += item.nbytes
    with new_file(path, tick) as sink:
        fs.fallocate(sink.fileno(), max(1, end), path=path)
        sink.write(header)
        for source in checkpoint.in_file_order(offsets):
            tensor = checkpoint.tensor(source).contiguous()
            sink.write_at(bits(tensor).numpy().data, offsets[source])


def write_directory(
    checkpoint: Checkpoint,
    all_items: Sequence[Item],
    directory: Path,
    limit: int,
    tick: Callable[[int], object],
) -> None:
    """Write ``model.safetensors``, or shards with an index if it is above ``limit`` bytes.

    Raises:
        StorageError: something cannot be written, or a tensor cannot be read.
    """
    fs.mkdir(directory)
    parts = shards(all_items, limit)
    if len(parts) == 1:
        write_file(checkpoint, parts[0], directory / f"{STEM}.safetensors", tick)
    else:
        where: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            file = f"{STEM}-{number:05d}-of-{len(parts):05d}.safetensors"
            write_file(checkpoint, part, directory / file, tick)
            where.update({item.name: file for item in part})
        _write_index(directory / INDEX, where, sum(item.nbytes for item in all_items), tick)
    fs.fsync_dir(directory)


def _header(ordered: Sequence[Item]) -> tuple[bytes, int]:
    """The header region and its length; padded to 8 bytes, as the format asks for."""
    tied = {alias: item.name for item in ordered for alias in item.aliases}
    fields: dict[str, object] = {"__metadata__": {**tied, "format": "pt"}}
    end = 0
    for item in ordered:
        fields[item.name] = {
            "dtype": _DTYPES[item.dtype],
            "shape": item.shape,
            "data_offsets": (end, end + item.nbytes),
        }
        end += item.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text, 8 + len(text)


def _write_index(
    path: Path, where: dict[str, str], nbytes: int, tick: Callable[[int], object]
) -> None:
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(where.items()))}
    text = json.dumps(index, indent=2).encode() + b"\n"
    with new_file(path, tick) as sink:
        sink.write(text)
