"""Moving the bytes of one pair, a slice at a time, on the copy stream's thread.

Plain memory moves, not torch kernels: a kernel would start a second team of compute threads beside
the training's, and cost several times as much for the many small tensors of a model.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gockpt.devices.base import Pairs
from gockpt.devices.stream import Clock, HostCopied
from gockpt.errors import DeviceError


def copy_pairs(pairs: Pairs, efficiency: float, copied: HostCopied, clock: Clock) -> None:
    """Copy every pair that is not withdrawn, each slice when the clock gets to it.

    Raises:
        DeviceError: a pair that cannot be copied bit for bit.
    """
    begin = copied.progress.begin
    with torch.no_grad():
        if callable(pairs):
            pairs = pairs()
        for index, (target, source) in enumerate(pairs, 1):
            if not begin(index):
                return
            check_pair(target, source)
            if not source.is_cpu:
                raise DeviceError(f"cannot copy from {source.device} here; open that device")
            if source.is_contiguous() and not (source.is_conj() or source.is_neg()):
                _copy_dense(target, source, efficiency, clock)
            else:
                _copy_rows(target.view(source.shape), source, efficiency, clock)


def check_pair(target: Tensor, source: Tensor) -> None:
    """Refuse what would not arrive bit for bit.

    Raises:
        DeviceError: different dtypes or sizes, or a destination with gaps.
    """
    if target.dtype is not source.dtype or target.nbytes != source.nbytes:
        raise DeviceError(
            f"cannot copy {source.numel()} × {source.dtype} into {target.numel()} × {target.dtype};"
            " give a destination of the same dtype and size"
        )
    if not (target.is_cpu and target.is_contiguous()):
        raise DeviceError("cannot copy into this destination; give contiguous host memory")


def _copy_dense(target: Tensor, source: Tensor, efficiency: float, clock: Clock) -> None:
    size, step = source.nbytes, clock.slice_bytes
    to, at = target.data_ptr(), source.data_ptr()
    for offset in range(0, size, step):
        nbytes = min(step, size - offset)
        clock.turn(nbytes, efficiency)
        ctypes.memmove(to + offset, at + offset, nbytes)


def _copy_rows(target: Tensor, source: Tensor, efficiency: float, clock: Clock) -> None:
    """Copy a source with gaps, by runs of its outermost dimension."""
    if source.dim() == 0:  # Only a lazily conjugated or negated number comes here.
        source, target = source[None], target[None]
    step = max(1, clock.slice_bytes // max(1, source[:1].nbytes))
    for first in range(0, source.shape[0], step):
        rows = source[first : first + step]
        clock.turn(rows.nbytes, efficiency)
        target[first : first + step].copy_(rows)
