"""The safetensors header of an image file: built at the end, in a room reserved at the start.

Pure functions, for the agent (which builds headers) and for readers (which check them). What always
holds: the header fills its reserved room exactly, so data starts at a multiple of 4096; every byte
of the data section belongs to one entry, as the format forbids holes, with U8 fillers called
``__gockpt_pad__.N`` wherever no tensor lies; ``safetensors`` itself reads the file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from gockpt.errors import CorruptError, StateError
from gockpt.state import Entry, align, torch_dtype

PAD = "__gockpt_pad__."
"""How the names of fillers begin; no tensor may have such a name."""

ROOM = 64 << 10
"""Header regions are multiples of this: large writes behind them are then aligned to more than
pages, which file systems and disks are faster with (6 % measured on ext4 over virtio)."""

MAX_HEADER = 100_000_000
"""The longest header that safetensors reads, in bytes."""

_METADATA = {"format": "gockpt", "version": "1"}
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_PAIRS = {"complex32": "F16", "complex64": "F32", "complex128": "F64"}


class HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def stored_as(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape in the header, for a tensor of torch's ``dtype`` and memory-order ``shape``.

    Complex numbers become (real, imaginary) pairs; one-byte types that safetensors has no common
    name for become plain bytes. The manifest keeps the true dtype.

    Raises:
        StateError: the dtype has no exact representation.
    """
    if dtype in _PAIRS:
        return _PAIRS[dtype], (*shape, 2)
    if dtype in _DTYPES:
        return _DTYPES[dtype], tuple(shape)
    if dtype.startswith("float") and torch_dtype(dtype).itemsize == 1:
        return "U8", tuple(shape)
    raise StateError(f"tensors of dtype {dtype} cannot be stored; cast them first")


def describe(entry: Entry) -> HeaderEntry:
    """The header's entry for a tensor of the image."""
    dtype, shape = stored_as(entry.dtype, [entry.shape[dim] for dim in entry.order])
    offsets = (entry.offset, entry.offset + entry.nbytes)
    return HeaderEntry(dtype=dtype, shape=shape, data_offsets=offsets)


def header_reserve(entries: Sequence[Entry]) -> int:
    """Bytes to keep free before the data: enough for the header of any subset of ``entries``.

    A multiple of :data:`ROOM`. Each entry is counted with a filler behind it, and its numbers at
    full length.

    Raises:
        StateError: the header could be longer than safetensors reads.
    """
    number = 10**19
    widest = HeaderEntry(dtype="U8", shape=(number,), data_offsets=(number, number))
    filler = len(_item(f"{PAD}{len(entries)}", widest))
    total = 8 + len(_metadata()) + filler
    for entry in entries:
        at_its_longest = msgspec.structs.replace(describe(entry), data_offsets=(number, number))
        total += len(_item(entry.name, at_its_longest)) + filler
    if total > MAX_HEADER:
        raise StateError(
            f"{len(entries)} tensors need a header of {total} bytes, more than the {MAX_HEADER} of "
            "a safetensors file; group small tensors"
        )
    return align(total, ROOM)


def build_header(present: Sequence[Entry], data_size: int, reserve: int) -> bytes:
    """The header of a data section of ``data_size`` bytes that holds the ``present`` entries.

    Returns:
        Exactly ``reserve`` bytes: length prefix, JSON, padding of spaces.

    Raises:
        StateError: entries overlap, lie outside the data, have a reserved or double name, or do not
            fit in ``reserve``.
    """
    items = [_metadata()]
    names: set[str] = set()
    end = 0
    fillers = 0
    for entry in sorted(present, key=lambda entry: (entry.offset, entry.offset + entry.nbytes)):
        described = describe(entry)
        start, stop = described.data_offsets
        if entry.name in names or entry.name.startswith(PAD) or entry.name == "__metadata__":
            raise StateError(f"{entry.name!r} is a double or reserved name; rename the tensor")
        if start < end or stop > data_size:
            raise StateError(f"{entry.name!r} overlaps another tensor or the end of the image")
        names.add(entry.name)
        if start > end:
            items.append(_filler(fillers, end, start))
            fillers += 1
        items.append(_item(entry.name, described))
        end = stop
    if end < data_size:
        items.append(_filler(fillers, end, data_size))
    return _framed(b"{" + b",".join(items) + b"}", reserve)


def _metadata() -> bytes:
    return b'"__metadata__":' + msgspec.json.encode(_METADATA)


def _filler(number: int, start: int, stop: int) -> bytes:
    entry = HeaderEntry(dtype="U8", shape=(stop - start,), data_offsets=(start, stop))
    return _item(f"{PAD}{number}", entry)


def _item(name: str, entry: HeaderEntry) -> bytes:
    return msgspec.json.encode(name) + b":" + msgspec.json.encode(entry)


def _framed(text: bytes, reserve: int) -> bytes:
    room = reserve - 8
    if len(text) > room:
        raise StateError(f"a header of {len(text)} bytes does not fit in the {room} reserved")
    return struct.pack("<Q", room) + text.ljust(room)


def parse_header(raw: bytes) -> dict[str, HeaderEntry]:
    """The entries of a whole header region (length prefix included), fillers left out.

    Raises:
        CorruptError: it is not a header of exactly this length.
    """
    if len(raw) < 8 or struct.unpack("<Q", raw[:8])[0] != len(raw) - 8:
        raise CorruptError("the header's length is wrong")
    try:
        fields = msgspec.json.decode(raw[8:], type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        return {
            name: msgspec.json.decode(text, type=HeaderEntry)
            for name, text in fields.items()
            if not name.startswith(PAD)
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"the header is not one of safetensors: {error}") from error
