"""Fingerprints: what the proof compares instead of the tensors themselves.

The bytes of a tensor, in memory order, are read as 64-bit words (the last one padded with zeros) in
runs of 512. Each run gives its sum modulo 2^64 and one word at a pseudo-random place: 16 bytes for
4096, about 0.4 %. The trainer computes them on the device from the true state, the agent from its
slot; both use this module. A single changed word always changes the sum; several changes may
cancel out with a probability of about 2^-64 if they are not made on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    """The bytes of a tensor as the image holds them: 1-D uint8, a view wherever that is possible."""
    dense = tensor.detach() if memory_order(tensor) is not None else tensor.detach().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(flatten(dense)).reshape(-1)
    return flatten(dense).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Body:
    """Whole runs of one tensor."""

    words: Tensor
    """int64 ``(runs, 512)``."""
    start: int
    """Its first run in the fingerprint."""


class Fingerprinter:
    """Computes the fingerprint of a fixed set of tensors, as often as it is asked for.

    All views are made at the start. Runs that are not whole (small tensors, ends of large ones) are
    put together by their length, so that thousands of small tensors cost a few operations.
    """

    def __init__(self, layout: Layout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """``tensors`` are pairs of entry index and live tensor, or bytes of the image."""
        first = offsets(layout)
        self.runs = first[-1]
        self.nbytes = sum(tensor.nbytes for _, tensor in tensors)
        self.device = max((t.device for _, t in tensors), key=_on_accelerator, default=_CPU)
        self._bodies: list[_Body] = []
        self._ends: dict[int, list[tuple[int, Tensor]]] = {}
        self._copied: list[tuple[int, Tensor]] = []
        for index, tensor in tensors:
            self._add(first[index], tensor)

    def _add(self, start: int, tensor: Tensor) -> None:
        if memory_order(tensor) is None or tensor.device != self.device:
            # Read through a copy each time: it has holes, or lies on the host beside a device.
            self._copied.append((start, tensor))
            return
        data = as_bytes(tensor)
        if data.data_ptr() % 8 or data.storage_offset() % 8:
            self._copied.append((start, tensor))
            return
        for part in _parts(start, data):
            self._take(*part)

    def _take(self, start: int, data: Tensor) -> None:
        if data.numel() >= RUN_BYTES:
            self._bodies.append(_Body(data.view(torch.int64).view(-1, RUN_WORDS), start))
        else:
            self._ends.setdefault(data.numel(), []).append((start, data))

    def run(self, seed: int, sums: Tensor, samples: Tensor) -> None:
        """Fill ``sums`` and ``samples`` (int64, one a run of the layout) on the device."""
        for _ in self.slices(seed, sums, samples, 1 << 62):
            pass

    def slices(self, seed: int, sums: Tensor, samples: Tensor, stretch: int) -> Iterator[int]:
        """The same, pausing after about ``stretch`` bytes; yields the bytes read since the last."""
        pick = picks(self.runs, seed, self.device)
        read = 0
        for body in self._bodies:
            _whole_runs(body.words, pick, body.start, sums, samples)
            read += body.words.nbytes
            if read >= stretch:
                yield read
                read = 0
        ends = self._ends
        if self._copied:
            ends = {length: list(group) for length, group in ends.items()}
            for start, tensor in self._copied:
                data = as_bytes(tensor).to(self.device, copy=True)
                for begin, part in _parts(start, data):
                    if part.numel() >= RUN_BYTES:
                        words = part.view(torch.int64).view(-1, RUN_WORDS)
                        _whole_runs(words, pick, begin, sums, samples)
                    else:
                        ends.setdefault(part.numel(), []).append((begin, part))
        for length, group in ends.items():
            _ends_of_one_length(length, group, pick, sums, samples)
            read += length * len(group)
        yield read


_CPU = torch.device("cpu")


def _on_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def _parts(start: int, data: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Whole runs, and what remains; each with its first run."""
    whole = data.numel() // RUN_BYTES * RUN_BYTES
    if whole:
        yield start, data[:whole]
    if whole < data.numel():
        yield start + whole // RUN_BYTES, data[whole:]


def _whole_runs(words: Tensor, pick: Tensor, start: int, sums: Tensor, samples: Tensor) -> None:
    part = slice(start, start + words.shape[0])
    torch.sum(words, 1, out=sums[part])
    torch.gather(words, 1, pick[part, None], out=samples[part, None])


def _ends_of_one_length(
    length: int, group: list[tuple[int, Tensor]], pick: Tensor, sums: Tensor, samples: Tensor
) -> None:
    data = torch.stack([part for _, part in group])
    if length % 8:
        data = torch.nn.functional.pad(data, (0, 8 - length % 8))
    words = data.view(torch.int64)
    where = torch.tensor([start for start, _ in group], device=words.device)
    sums[where] = words.sum(1)
    place = pick[where] % words.shape[1]
    samples[where] = words.gather(1, place[:, None])[:, 0]
