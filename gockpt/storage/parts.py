"""Dividing an image over several files: which bytes go where, and the tensors that are cut.

Pure. What always holds: parts follow each other without gap, each begins at a multiple of the
extent in which the image is written, and at most one tensor lies across each cut; its pieces are
1-D entries ``name#0``, ``name#1``, … of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from gockpt.state import Entry, torch_dtype
from gockpt.storage.records import Piece, TensorRecord, tensor_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes ``start`` to ``stop`` of the image, which are the data section of one file."""

    file: int
    """Index into the manifest's ``files``."""
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Tensors in parts."""

    records: tuple[TensorRecord, ...]
    """For the manifest."""
    entries: tuple[tuple[Entry, ...], ...]
    """For the header of each part's file."""


def cut(size: int, count: int, extent: int) -> tuple[Part, ...]:
    """Divide ``size`` bytes into ``count`` parts that differ by one ``extent`` at most.

    Fewer parts where there are not so many extents: no part is empty, unless the image is.
    """
    extents = max(1, -(-size // extent))
    count = min(count, extents)
    bounds = [min(size, extents * part // count * extent) for part in range(count + 1)]
    return tuple(
        Part(file=number, start=bounds[number], stop=bounds[number + 1]) for number in range(count)
    )


def place(entries: Iterable[Entry], parts: Sequence[Part]) -> Placed:
    """Where the tensors of an image are, once it is divided into ``parts``."""
    by_part: list[list[Entry]] = [[] for _ in parts]
    records: list[TensorRecord] = []
    for entry in entries:
        holding = _holding(entry, parts)
        pieces = _pieces(entry, holding) if len(holding) > 1 else ()
        for part, piece in zip(holding, pieces, strict=False):
            by_part[part.file].append(_as_entry(piece, entry.dtype))
        first = holding[0]
        moved = msgspec.structs.replace(entry, offset=entry.offset - first.start)
        if not pieces:
            by_part[first.file].append(moved)
        (record,) = tensor_records([moved], file=first.file)
        records.append(msgspec.structs.replace(record, pieces=pieces))
    return Placed(records=tuple(records), entries=tuple(map(tuple, by_part)))


def _holding(entry: Entry, parts: Sequence[Part]) -> list[Part]:
    """The parts that hold bytes of a tensor, or the place of an empty one."""
    end = entry.offset + entry.nbytes
    found = [part for part in parts if part.start < end and entry.offset < part.stop]
    return found or [part for part in parts if part.start <= entry.offset][-1:]


def _pieces(entry: Entry, holding: Sequence[Part]) -> tuple[Piece, ...]:
    end = entry.offset + entry.nbytes
    return tuple(
        Piece(
            entry=f"{entry.name}#{number}",
            file=part.file,
            offset=max(entry.offset, part.start) - part.start,
            nbytes=min(end, part.stop) - max(entry.offset, part.start),
        )
        for number, part in enumerate(holding)
    )


def _as_entry(piece: Piece, dtype: str) -> Entry:
    shape = (piece.nbytes // torch_dtype(dtype).itemsize,)
    return Entry(name=piece.entry, dtype=dtype, shape=shape, order=(0,), offset=piece.offset)
