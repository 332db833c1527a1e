"""Checks of a manifest's every name, number and range, before anything is read by it.

Pure. A manifest may be damaged, or made by somebody who means harm: after :func:`check_manifest`
its ranges lie inside its files, its files inside the checkpoint's directory, and its extents cover
every byte of every file once.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from gockpt.errors import CorruptError, StateError
from gockpt.state import ALIGNMENT, torch_dtype
from gockpt.storage.fs import PAGE
from gockpt.storage.header import PAD, stored_as
from gockpt.storage.names import is_share
from gockpt.storage.records import EXTENT, FORMAT, Extent, FileRecord, Manifest, TensorRecord

LARGEST = 1 << 62
"""No size or offset is larger, so that sums stay inside 64 bits."""

_DIMS = 64
_NAME = 4096
_LAUNCH = re.compile(r"[0-9a-f]{8,64}")
_FILE = re.compile(r"rank-(\d{5,})(-[0-9a-z]+)*\.safetensors")
_HASH = re.compile(r"[0-9a-f]{32}")
_OUTCOMES = ("exact", "close", "off")


def check_manifest(manifest: Manifest) -> None:
    """Check everything that a manifest says about itself and its files.

    Raises:
        CorruptError: naming the first thing that cannot be.
    """
    _check_facts(manifest)
    _check_files(manifest)
    _check_names(manifest.tensors)
    for record in manifest.tensors:
        _check_tensor(record, manifest.files)
    _check_no_overlap(manifest)
    _check_coverage(manifest)


def _require(good: bool, what: str) -> None:
    if not good:
        raise CorruptError(f"the manifest is not consistent: {what}")


def _check_facts(manifest: Manifest) -> None:
    _require(manifest.format == FORMAT, f"format {manifest.format}")
    for field in ("step", "sequence", "windows", "base"):
        value = getattr(manifest, field)
        _require(0 <= value < LARGEST, f"{field} is {value}")
    _require(
        0 <= manifest.rank < manifest.world_size <= 1 << 24,
        f"rank {manifest.rank} of {manifest.world_size}",
    )
    _require(_LAUNCH.fullmatch(manifest.launch_id) is not None, "launch_id is not hexadecimal")
    _require(manifest.proof.get("outcome") in _OUTCOMES, "the proof has no known outcome")


def _check_files(manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    _require(0 < len(names) <= 1024, f"{len(names)} files")
    _require(len(set(names)) == len(names), "a file is named twice")
    for file in manifest.files:
        match = _FILE.fullmatch(file.name)
        _require(
            match is not None and int(match[1]) == manifest.rank,
            f"{file.name!r} is not a file of rank {manifest.rank}",
        )
        _require(
            PAGE <= file.data_start <= file.size <= LARGEST and file.data_start % PAGE == 0,
            f"{file.name} has {file.size} bytes with data from {file.data_start}",
        )
        _require(_is_volume(file.volume), f"{file.name} lies in {file.volume!r}")
        _require(0 <= file.seconds < LARGEST, f"{file.name} took {file.seconds} seconds")


def _is_volume(path: str) -> bool:
    """Whether this may be a file's place: none, or the plain absolute path of a share."""
    above, slash, share = path.rpartition("/")
    plain = above == "" or (above[0] == "/" and not {"", ".", ".."} & set(above[1:].split("/")))
    usable = bool(slash) and plain and "\0" not in path and len(path) <= _NAME
    return not path or (usable and is_share(share))


def _check_names(records: Sequence[TensorRecord]) -> None:
    seen: set[str] = set()
    for record in records:
        for name in (record.name, *record.aliases):
            _require(0 < len(name) <= _NAME, "a tensor's name is empty or too long")
            _require(
                not name.startswith(PAD) and name != "__metadata__",
                f"{name!r} is a reserved name",
            )
            _require(name not in seen, f"{name!r} is named twice")
            seen.add(name)


def _check_tensor(record: TensorRecord, files: Sequence[FileRecord]) -> None:
    name, dims = record.name, len(record.shape)
    _require(
        dims <= _DIMS and len(record.aliases) <= 1 << 16 and len(record.pieces) <= 1 << 16,
        f"{name!r} has too many dimensions, aliases or pieces",
    )
    _require(sorted(record.order) == list(range(dims)), f"{name!r} has order {record.order}")
    _require(
        len(record.global_shape) == len(record.global_offset) == dims,
        f"{name!r} has shapes of different lengths",
    )
    for size, start, whole in zip(
        record.shape, record.global_offset, record.global_shape, strict=True
    ):
        _require(
            size >= 0 and start >= 0 and start + size <= whole <= LARGEST,
            f"{name!r} of shape {record.shape} leaves its whole of {record.global_shape}",
        )
    _check_dtype(record)
    _require(math.prod(record.shape) <= LARGEST // 16, f"{name!r} is too large")
    nbytes = record.entry.nbytes
    _require(
        sum(part.nbytes for part in record.parts) == nbytes, f"{name!r} has pieces of another size"
    )
    for part in record.parts:
        _require(0 <= part.file < len(files), f"{part.entry!r} lies in no file")
        file = files[part.file]
        _require(
            part.offset >= 0
            and part.nbytes >= 0
            and part.offset % ALIGNMENT == 0
            and part.offset + part.nbytes <= file.size - file.data_start,
            f"{part.entry!r} leaves {file.name}",
        )


def _check_dtype(record: TensorRecord) -> None:
    try:
        itemsize = torch_dtype(record.dtype).itemsize
        stored_as(record.dtype, ())
    except (ValueError, StateError) as error:
        raise CorruptError(f"the manifest is not consistent: {record.name!r}: {error}") from error
    for number, piece in enumerate(record.pieces):
        _require(
            piece.entry == f"{record.name}#{number}" and piece.nbytes % itemsize == 0,
            f"{record.name!r} is cut wrongly",
        )


def _check_no_overlap(manifest: Manifest) -> None:
    ranges = sorted(
        (part.file, part.offset, part.offset + part.nbytes, part.entry)
        for record in manifest.tensors
        for part in record.parts
        if part.nbytes
    )
    for (file, _, stop, name), (next_file, start, _, other) in itertools.pairwise(ranges):
        _require(file != next_file or stop <= start, f"{name!r} and {other!r} overlap")


def _check_coverage(manifest: Manifest) -> None:
    by_file: list[list[Extent]] = [[] for _ in manifest.files]
    for extent in manifest.extents:
        _require(0 <= extent.file < len(by_file), "an extent lies in no file")
        _require(_HASH.fullmatch(extent.xxh3) is not None, "an extent has no hash")
        by_file[extent.file].append(extent)
    for file, extents in zip(manifest.files, by_file, strict=True):
        _require(_end_of(extents) == file.size, f"the extents do not cover {file.name}")


def _end_of(extents: Iterable[Extent]) -> int:
    """Where extents end that lie one behind the other from offset 0; -1 if they do not."""
    end = 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if extent.offset != end or end % PAGE or not 0 < extent.length <= EXTENT:
            return -1
        end += extent.length
    return end
