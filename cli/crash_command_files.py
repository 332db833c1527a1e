"""Whether a program that was killed ends with the same files as one that was not.

Files are compared by what they hold: safetensors and ``torch.save`` files tensor by tensor, bit for
bit, JSON value by value, everything else byte by byte. Pure functions over two directories. What
always holds: nothing that is read can run code (``torch.load`` reads weights only), and what a file
was compared as is part of the answer.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LISTED = 20
"""Differences told of one file; they are counted up to :data:`COUNTED`."""

COUNTED = 1000
_CHUNK = 1 << 20
_TORCH_SUFFIXES = (".pt", ".pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One result file, beside that of the golden run."""

    name: str
    """Relative to the directory of the run."""
    kind: str
    """``safetensors``, ``torch.save``, ``JSON`` or ``bytes``: what it was compared as."""
    differences: tuple[str, ...]
    """The first ones, each naming its tensor, key or byte; empty if there are none."""
    count: int
    """Of differences, at most :data:`COUNTED`."""


class _Unreadable(Exception):
    """Not a file of the kind that it is read as."""


def files_of(directory: Path, result: str) -> list[str]:
    """The files that a result path means, relative to ``directory``; all of them if it is one."""
    path = directory / result
    found = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else []
    found += [path] if path.is_file() else []
    return [str(one.relative_to(directory)) for one in found]


def compare(golden: Path, other: Path, results: Sequence[str]) -> list[Compared]:
    """Compare the files of all result paths, those included that only one side has."""
    names = [
        name
        for result in results
        for name in sorted({*files_of(golden, result), *files_of(other, result)})
    ]
    return [_compare_file(golden / name, other / name, name) for name in dict.fromkeys(names)]


def _compare_file(golden: Path, other: Path, name: str) -> Compared:
    if not other.is_file() or not golden.is_file():
        kind = _kind(golden if golden.is_file() else other)
        missing = "is missing" if golden.is_file() else "is there, and not after the golden run"
        return Compared(name=name, kind=kind, differences=(f"the file {missing}",), count=1)
    kind, found = _differences(golden, other)
    listed = list(islice(found, COUNTED))
    return Compared(name=name, kind=kind, differences=tuple(listed[:LISTED]), count=len(listed))


def _differences(golden: Path, other: Path) -> tuple[str, Iterator[str]]:
    """What the files are compared as, and what differs."""
    kind = _kind(golden)
    if kind == "bytes":
        return kind, _bytes_differ(golden, other)
    read = _READERS[kind]
    try:
        expected = read(golden)
    except _Unreadable as error:  # then its name says more than it holds
        return f"bytes, as it cannot be read as {kind}: {error}", _bytes_differ(golden, other)
    try:
        found = read(other)
    except _Unreadable as error:
        return kind, iter([f"it cannot be read: {error}"])
    return kind, _differ(expected, found, "")


def _kind(path: Path) -> str:
    if path.suffix == ".safetensors":
        return "safetensors"
    if path.suffix == ".json":
        return "JSON"
    return "torch.save" if path.suffix in _TORCH_SUFFIXES or _is_torch_zip(path) else "bytes"


def _is_torch_zip(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


# -- reading ---------------------------------------------------------------------------------------


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return {**tensors, "__metadata__": file.metadata()}
    except (SafetensorError, OSError) as error:
        raise _Unreadable(_short(error)) from error


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever a truncated or hostile file makes of its reader
        raise _Unreadable(_short(error)) from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _Unreadable(_short(error)) from error


_READERS: Mapping[str, Callable[[Path], Any]] = {
    "safetensors": _read_safetensors,
    "torch.save": _read_torch,
    "JSON": _read_json,
}


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]


# -- comparing -------------------------------------------------------------------------------------


def _bytes_differ(golden: Path, other: Path) -> Iterator[str]:
    """Where the first byte differs, if one does."""
    if (left := golden.stat().st_size) != (right := other.stat().st_size):
        yield f"{left} bytes → {right} bytes"
    with golden.open("rb") as first, other.open("rb") as second:
        offset = 0
        while (a := first.read(_CHUNK)) and (b := second.read(_CHUNK)):
            if a != b:
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
                if at is not None:
                    yield f"byte {offset + at}: {a[at]:#04x} → {b[at]:#04x}"
                return
            offset += len(a)


def _differ(golden: Any, other: Any, where: str) -> Iterator[str]:
    """Every leaf that differs, named by its path."""
    if isinstance(golden, Tensor) and isinstance(other, Tensor):
        yield from _tensors_differ(golden, other, where)
    elif type(golden) is not type(other):
        yield f"{where or 'the whole'}: {_show(golden)} → {_show(other)}"
    elif isinstance(golden, Mapping):
        yield from _mappings_differ(golden, other, where)
    elif isinstance(golden, (list, tuple)):
        if len(golden) != len(other):
            yield f"{where or 'the whole'}: {len(golden)} entries → {len(other)} entries"
        for index, (left, right) in enumerate(zip(golden, other, strict=False)):
            yield from _differ(left, right, f"{where}[{index}]")
    elif not _same(golden, other):
        yield f"{where or 'the whole'}: {_show(golden)} → {_show(other)}"


def _mappings_differ(
    golden: Mapping[Any, Any], other: Mapping[Any, Any], where: str
) -> Iterator[str]:
    for key, value in golden.items():
        path = f"{where}.{key}" if where else str(key)
        if key in other:
            yield from _differ(value, other[key], path)
        else:
            yield f"{path}: is missing"
    for key in other:
        if key not in golden:
            yield f"{where}.{key}".lstrip(".") + ": is there, and not after the golden run"


def _tensors_differ(golden: Tensor, other: Tensor, where: str) -> Iterator[str]:
    if (golden.dtype, golden.shape) != (other.dtype, other.shape):
        yield f"{where or 'the tensor'}: {_show(golden)} → {_show(other)}"
        return
    left, right = _bits(golden), _bits(other)
    if torch.equal(left, right):
        return
    unequal = int((left != right).reshape(golden.numel(), -1).any(1).sum())
    yield f"{where or 'the tensor'}: {unequal} of {golden.numel()} elements differ" + _by_how_much(
        golden, other
    )


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes: so that NaN equals itself, and 0.0 is not -0.0."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _by_how_much(golden: Tensor, other: Tensor) -> str:
    if not golden.is_floating_point() or golden.layout != torch.strided:
        return ""
    apart = (golden.detach().double() - other.detach().double()).abs().nan_to_num(float("inf"))
    return f", by at most {float(apart.max()):.3g}"


def _same(golden: Any, other: Any) -> bool:
    if isinstance(golden, float):
        return golden.hex() == float(other).hex()
    return bool(golden == other)


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
