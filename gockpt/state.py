"""What there is to save: tensors under global names, and where each lies in the image.

The image is one checkpoint's data: the memory of a slot and, byte for byte, the data section of the
file. (Discovery of a model's and its optimizers' tensors follows below the records.)
"""

from __future__ import annotations

import math

import msgspec
import torch

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes: a cache line, any dtype's alignment."""

CUT = 64
"""Blocks are cut at multiples of this many elements: optimizer kernels then repeat bit for bit."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the image.

    The bytes are those of the tensor in *memory order*: ``order`` lists its dimensions from the
    outermost to the innermost in memory, so a channels-last weight stays dense. A complex tensor
    keeps its logical ``shape`` and complex ``dtype`` here and is stored as (real, imaginary) pairs.
    """

    name: str
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``, ``complex64``, …"""
    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int
    """Bytes from the start of the data section; a multiple of :data:`ALIGNMENT`."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (tied weights)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * torch_dtype(self.dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch's own name for it (``"float32"`` → ``torch.float32``).

    Raises:
        ValueError: no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no such dtype: {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The inverse of :func:`torch_dtype`."""
    return str(dtype).removeprefix("torch.")


def align(offset: int, to: int = ALIGNMENT) -> int:
    """The first multiple of ``to`` at or after ``offset``."""
    return -(-offset // to) * to


class ParamLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where one parameter of an optimizer, and its state, lie in the image.

    All numbers but ``optimizer`` and ``group`` are indices into :attr:`Layout.entries`.
    """

    name: str
    optimizer: int
    group: int
    param: int
    state: dict[str, int]
    """Elementwise state, existing or reserved for the first gradient."""
    scalars: dict[str, int]
    """0-dim state."""
    derived: int | None = None
    """A 16-bit model tensor that is the cast of this parameter, and so need not be sent."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The image of one rank. ``params`` can be replayed and come first, in image order."""

    entries: list[Entry]
    params: list[ParamLayout]
    size: int
    """Bytes of the image; a multiple of :data:`PAGE`."""

    def of_blocks(self) -> set[int]:
        """Entries that are captured, replayed and complete block by block; others are whole."""
        return {
            index
            for one in self.params
            for index in (one.param, one.derived, *one.state.values(), *one.scalars.values())
            if index is not None
        }


PAGE = 4096
"""The image is padded to whole pages, so that its memory can be written without copying."""


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions from outermost to innermost in memory; None if it has holes or overlaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] == 1:
            continue
        if strides[dim] != expected:
            return None if tensor.numel() else tuple(range(tensor.dim()))
        expected *= tensor.shape[dim]
    return tuple(order)


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view of a dense tensor in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view as bytes of a dense tensor in memory order."""
    return flatten(tensor).view(torch.uint8)
