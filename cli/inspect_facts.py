"""What there is to know of a checkpoint without a model: the document of ``gockpt inspect``.

Read from its manifest; of the image only what one tensor's values, and the extras, need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gockpt.contents import MODEL, OPTIMIZER, Contents
from gockpt.errors import StorageError
from gockpt.storage import Checkpoint

Facts = dict[str, Any]

_FIRST = 8
_CHUNK = 1 << 20


def facts(contents: Contents) -> Facts:
    """How the checkpoint came about, and its bytes by kind."""
    checkpoint = contents.checkpoint
    info = checkpoint.info
    return {
        "path": str(info.path),
        **{
            field: getattr(info, field)
            for field in ("step", "sequence", "run_id", "launch_id", "world_size", "created",
                          "strategy", "windows", "base", "fallback", "proof", "recipe")
        },
        "files": [
            {"rank": one.rank, "name": file.name, "bytes": file.size, "data_start": file.data_start}
            for one in checkpoint.manifests
            for file in one.files
        ],
        "bytes": totals(checkpoint),
        "groups": [
            {
                "optimizer": group.optimizer,
                "params": list(group.params),
                "options": jsonable(group.options),
            }
            for group in contents.groups
        ],
        "extras": extras(checkpoint),
    }  # fmt: skip


def totals(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of the checkpoint's image files by what they hold; ``total`` is their sum."""
    found = {"model": 0, "optimizer": 0, "extras": 0}
    for name in own_names(checkpoint):
        found[kind(name)] += checkpoint.record(name).entry.nbytes
    files = [file for one in checkpoint.manifests for file in one.files]
    found["header"] = sum(file.data_start for file in files)
    total = sum(file.size for file in files)
    found["padding"] = total - sum(found.values())
    return {**found, "total": total}


def own_names(checkpoint: Checkpoint) -> list[str]:
    """Names of all tensors, tied ones once."""
    return list(dict.fromkeys(checkpoint.record(name).name for name in checkpoint.names()))


def kind(name: str) -> str:
    """Whose tensor this is."""
    if name.startswith(MODEL):
        return "model"
    return "optimizer" if name.startswith(OPTIMIZER) else "extras"


def tensor_facts(checkpoint: Checkpoint, name: str) -> Facts:
    """One tensor, and where its bytes lie."""
    record = checkpoint.record(name)
    return {
        "name": record.name,
        "aliases": list(record.aliases),
        "kind": kind(record.name),
        "dtype": record.dtype,
        "shape": list(record.shape),
        "order": list(record.order),
        "bytes": record.entry.nbytes,
        "places": [
            {
                "file": place.file.name,
                "start": place.start,
                "stop": place.stop,
                "extents": [
                    {"start": e.offset, "stop": e.offset + e.length, "xxh3": e.xxh3}
                    for e in place.extents
                ],
            }
            for place in checkpoint.places(name)
        ],
    }


def values(tensor: torch.Tensor) -> Facts:
    """Smallest, largest and mean value, nan count, and the first values in logical order.

    Of complex numbers their absolute values. Taken in double precision, a part at a time; a nan is
    left out, and what JSON cannot say (infinity) is text.
    """
    flat = tensor.reshape(-1)
    low, high, total, nans, count = math.inf, -math.inf, 0.0, 0, 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        part = (part.abs() if part.is_complex() else part).double()
        good = part[~part.isnan()]
        nans += part.numel() - good.numel()
        if good.numel():
            low, high = min(low, float(good.min())), max(high, float(good.max()))
            total, count = total + float(good.sum()), count + good.numel()
    return {
        "min": jsonable(low) if count else None,
        "max": jsonable(high) if count else None,
        "mean": jsonable(total / count) if count else None,
        "nan": nans,
        "first": jsonable(flat[:_FIRST].tolist()),
    }


def extras(checkpoint: Checkpoint) -> Any:
    """The user's objects for reading; a text that says why, if they cannot be read."""
    try:
        return jsonable(checkpoint.objects())
    except StorageError as error:
        return f"cannot be read: {error}"


def jsonable(value: Any) -> Any:
    """The value as JSON for reading: tensors and arrays by their shapes, rare types as text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape != ():
        return f"{shape_text(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, torch.Tensor):
        return jsonable(value.item())
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value)


def shape_text(shape: Iterable[int]) -> str:
    """``256 × 384``; a dash for a single number."""
    return " × ".join(map(str, shape)) or "–"
