"""Fingerprints: what the proof compares instead of the tensors themselves.

The bytes of a tensor, in memory order, are read as 64-bit words (the last one padded with zeros) in
runs of 512. Each run gives its sum modulo 2^64 and one word at a pseudo-random place: 16 bytes for
4096, about 0.4 %. The trainer computes them on the device from the true state, the agent from its
slot; both use this function. A single changed word always changes the sum; several changes may
cancel out with a probability of about 2^-64 if they are not made on purpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gockpt.state import Layout, flatten, memory_order

RUN_WORDS = 512
RUN_BYTES = RUN_WORDS * 8


def runs(nbytes: int) -> int:
    """Number of runs of a tensor of ``nbytes`` bytes."""
    return -(-nbytes // RUN_BYTES)


def offsets(layout: Layout) -> list[int]:
    """First run of each entry in the fingerprint of a layout; the last number is the total."""
    out = [0]
    for entry in layout.entries:
        out.append(out[-1] + runs(entry.nbytes))
    return out


def picks(total: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """The word of each run that is sampled: int64 ``(total,)`` in ``[0, 512)``."""
    index = torch.arange(total, dtype=torch.int64, device=device)
    mixed = (index + seed) * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    return (mixed >> 32) & (RUN_WORDS - 1)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as the image holds them: 1-D uint8, aligned to words."""
    dense = tensor.detach() if memory_order(tensor) is not None else tensor.detach().contiguous()
    flat = flatten_real(dense)
    return flat.clone() if flat.data_ptr() % 8 else flat


def flatten_real(dense: Tensor) -> Tensor:
    """Bytes of a dense tensor, complex ones as pairs."""
    if dense.is_complex():
        dense = torch.view_as_real(flatten(dense)).reshape(-1)
    return flatten(dense).view(torch.uint8)


def fingerprint(data: Tensor, pick: Tensor, sums: Tensor, samples: Tensor) -> None:
    """Fill ``sums`` and ``samples`` (int64, one a run) from the bytes ``data`` (1-D uint8)."""
    whole = data.numel() // RUN_BYTES
    if whole:
        body = data[: whole * RUN_BYTES].view(torch.int64).view(whole, RUN_WORDS)
        torch.sum(body, 1, out=sums[:whole])
        torch.gather(body, 1, pick[:whole, None], out=samples[:whole, None])
    rest = data[whole * RUN_BYTES :]
    if rest.numel() == 0:
        return
    if rest.numel() % 8:
        padded = torch.zeros(-(-rest.numel() // 8) * 8, dtype=torch.uint8, device=data.device)
        padded[: rest.numel()] = rest
        rest = padded
    words = rest.view(torch.int64)
    torch.sum(words, 0, keepdim=True, out=sums[whole : whole + 1])
    place = pick[whole : whole + 1] % words.numel()
    torch.gather(words, 0, place, out=samples[whole : whole + 1])
