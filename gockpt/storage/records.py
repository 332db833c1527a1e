"""Records of a manifest: files, tensors, extents, and all that is known of a checkpoint.

Plain data, read and written by :mod:`gockpt.storage.format`, checked by
:mod:`gockpt.storage.checks`. docs/format.md is the contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gockpt.state import Entry
from gockpt.storage.names import CheckpointName

FORMAT = 1
"""Version of the format that this code writes, and the newest that it reads."""

EXTENT = 16 << 20
"""Most bytes hashed, written or read at a time."""

Json = Any
"""A value of JSON: None, bool, int (64 bits), finite float, str, list, or dict with str keys."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One safetensors file."""

    name: str
    size: int
    data_start: int
    """Bytes before the data section, which is the length of the header region."""
    volume: str = ""
    """Where it was written if not beside the manifest: absolute path of the main directory's own
    sub-directory of a volume. :mod:`gockpt.storage.places` says where it may be found."""
    seconds: float = 0.0
    """For how long its disk was busy with it."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tensor that was cut over volumes, stored as a 1-D entry of its own."""

    entry: str
    """Its name in the header, ``name#i``."""
    file: int
    offset: int
    nbytes: int


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor: where its bytes are, and what they mean. ``order`` is that of :class:`Entry`."""

    name: str
    file: int
    """Index into the manifest's ``files``."""
    offset: int
    """Bytes from the start of that file's data section."""
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    global_shape: tuple[int, ...]
    """Shape of the whole tensor, of which this rank holds a box of ``shape``…"""
    global_offset: tuple[int, ...]
    """…that starts here."""
    aliases: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()
    """Where the bytes are instead, one piece after the other, if the tensor was cut."""

    @property
    def entry(self) -> Entry:
        """The tensor as an entry of its file's image."""
        return Entry(
            name=self.name,
            dtype=self.dtype,
            shape=self.shape,
            order=self.order,
            offset=self.offset,
            aliases=self.aliases,
        )

    @property
    def parts(self) -> tuple[Piece, ...]:
        """Where the bytes are, whether the tensor was cut or not."""
        whole = Piece(entry=self.name, file=self.file, offset=self.offset, nbytes=self.entry.nbytes)
        return self.pieces or (whole,)


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """A run of bytes of a file, counted from the file's start, with their hash."""

    file: int
    offset: int
    length: int
    xxh3: str
    """xxh3-128 in 32 hexadecimal digits."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a checkpoint."""

    format: int = FORMAT
    step: int
    """The step whose state this is."""
    sequence: int
    """Grows with every checkpoint of a directory: the newest is the one with the highest."""
    run_id: str
    launch_id: str
    """8 hexadecimal digits or more, new for each start of a training process."""
    rank: int = 0
    world_size: int = 1
    created: str
    """UTC, ISO 8601."""
    strategy: str
    windows: int
    base: int
    """Step at which the first window opened."""
    fallback: str | None = None
    """Why the checkpoint was taken by a one-window copy instead of the strategy's way."""
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    groups: Json = {}
    """Options of the optimizers' parameter groups, by name (tagged JSON)."""
    extras: Json = {}
    """The user's objects and the random generators (tagged JSON)."""
    recipe: dict[str, Json] = {}
    """Summary of what was replayed."""
    proof: dict[str, Json]
    """``outcome`` (``exact``, ``close`` or ``off``) and the figures behind it."""
    extents: tuple[Extent, ...]
    checksum: str = ""

    @property
    def name(self) -> CheckpointName:
        """What the directory of its checkpoint is called."""
        return CheckpointName(step=self.step, sequence=self.sequence, launch=self.launch_id[:8])

    """xxh3-128 of the manifest's own text, taken with this field empty."""


def tensor_records(entries: Iterable[Entry], *, file: int = 0) -> tuple[TensorRecord, ...]:
    """Records of tensors that are whole on this rank and lie in one file."""
    return tuple(
        TensorRecord(
            name=entry.name,
            file=file,
            offset=entry.offset,
            dtype=entry.dtype,
            shape=entry.shape,
            order=entry.order,
            global_shape=entry.shape,
            global_offset=(0,) * len(entry.shape),
            aliases=entry.aliases,
        )
        for entry in entries
    )


def file_name(rank: int) -> str:
    """Name of the rank's image file."""
    return f"rank-{rank:05d}.safetensors"


def part_name(rank: int, part: int) -> str:
    """Name of one of the rank's files, where the image is divided over volumes."""
    return f"rank-{rank:05d}-v{part}.safetensors"


def manifest_name(rank: int) -> str:
    """Name of the rank's manifest file."""
    return f"rank-{rank:05d}.json"
