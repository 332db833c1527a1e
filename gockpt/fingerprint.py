"""Fingerprints: what the proof compares instead of the tensors themselves.

The bytes of a tensor, in memory order, are read as 64-bit words (the last one padded with zeros) in
runs of 512. Each run gives its sum modulo 2^64 and one word at a pseudo-random place: 16 bytes for
4096, about 0.4 %. The trainer computes them on the device from the true state, the agent from its
slot; both use this module. A single changed word always changes the sum; several changes may
cancel out with a probability of about 2^-64 if they are not made on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gockpt.pace import UNHURRIED, gently
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


def picks(runs: Tensor, seed: int) -> Tensor:
    """The word that is sampled in each of these runs: int64, in ``[0, 512)``."""
    mixed = (runs + seed) * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    return (mixed >> 32) & (RUN_WORDS - 1)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as the image holds them: 1-D uint8, a view wherever possible."""
    dense = tensor.detach() if memory_order(tensor) is not None else tensor.detach().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(flatten(dense)).reshape(-1)
    return flatten(dense).view(torch.uint8)


class Fingerprinter:
    """Computes the fingerprint of a fixed set of tensors, as often as it is asked for.

    All views are made at the start, and nothing waits for the device, then or later.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[tuple[int, Tensor]],
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            tensors: pairs of entry index and live tensor, or bytes of the image.
            device: where to compute; None: at :func:`home`.
        """
        first = offsets(layout)
        self.runs = first[-1]
        self.nbytes = sum(tensor.nbytes for _, tensor in tensors)
        self.device = home([tensor for _, tensor in tensors]) if device is None else device
        here = [(first[i], tensor) for i, tensor in tensors if tensor.device == self.device]
        self._group = _Group(here, self.device)
        self._beside = [tensor for _, tensor in tensors if tensor.device != self.device]
        rows = [
            run
            for index, tensor in tensors
            if tensor.device != self.device
            for run in range(first[index], first[index + 1])
        ]
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._rows_there = _sent(self._rows, self.device)

    def run(self, seed: int, sums: Tensor, samples: Tensor) -> None:
        """Fill ``sums`` and ``samples`` (int64, one a run of the layout) on the device."""
        for _ in self.slices(seed, sums, samples, 1 << 62):
            pass

    def slices(self, seed: int, sums: Tensor, samples: Tensor, stretch: int) -> Iterator[int]:
        """The same, pausing after about ``stretch`` bytes; yields the bytes read since the last."""
        every = torch.arange(self.runs, dtype=torch.int64, device=self.device)
        yield from self._group.slices(picks(every, seed), sums, samples, stretch)
        if self._beside:
            self._add_those_beside(seed, sums, samples)

    def _add_those_beside(self, seed: int, sums: Tensor, samples: Tensor) -> None:
        """Host tensors of a training on an accelerator (Adam's ``step``): computed on the host."""
        starts = itertools.accumulate((runs(t.nbytes) for t in self._beside), initial=0)
        group = _Group(list(zip(starts, self._beside, strict=False)), _CPU)
        host_sums, host_samples = torch.zeros_like(self._rows), torch.zeros_like(self._rows)
        for _ in group.slices(picks(self._rows, seed), host_sums, host_samples, 1 << 62):
            pass
        sums[self._rows_there] = _sent(host_sums, self.device)
        samples[self._rows_there] = _sent(host_samples, self.device)


class _Group:
    """Tensors of one device, each with its first run.

    Runs that are not whole (small tensors, ends of large ones) are put together by their length, so
    that thousands of small tensors cost a few operations.
    """

    def __init__(self, tensors: Sequence[tuple[int, Tensor]], device: torch.device) -> None:
        self._bodies: list[tuple[int, Tensor]] = []
        ends: dict[int, list[tuple[int, Tensor]]] = {}
        self._copied: list[tuple[int, Tensor]] = []
        for start, tensor in gently(tensors, pause=UNHURRIED):
            if memory_order(tensor) is None or as_bytes(tensor).data_ptr() % 8:
                # Read through a copy each time: it has holes, or does not lie on words.
                self._copied.append((start, tensor))
            else:
                _sort(start, as_bytes(tensor), self._bodies, ends)
        self._ends = [
            (_sent(torch.tensor([start for start, _ in group]), device), [one for _, one in group])
            for group in ends.values()
        ]

    def slices(self, pick: Tensor, sums: Tensor, samples: Tensor, stretch: int) -> Iterator[int]:
        read = 0
        for start, words in gently(self._bodies):
            _whole_runs(start, words, pick, sums, samples)
            read += words.nbytes
            if read >= stretch:
                yield read
                read = 0
        for where, parts in self._ends:
            _ends_of_one_length(where, parts, pick, sums, samples)
            read += sum(part.nbytes for part in parts)
        for start, tensor in self._copied:
            bodies: list[tuple[int, Tensor]] = []
            ends: dict[int, list[tuple[int, Tensor]]] = {}
            _sort(start, as_bytes(tensor).clone(), bodies, ends)
            for begin, words in bodies:
                _whole_runs(begin, words, pick, sums, samples)
            for ((begin, part),) in ends.values():
                where = torch.arange(begin, begin + 1, device=part.device)
                _ends_of_one_length(where, [part], pick, sums, samples)
            read += tensor.nbytes
        yield read


_CPU = torch.device("cpu")


def home(tensors: Sequence[Tensor]) -> torch.device:
    """Where to compute: on the accelerator if any of them is on one."""
    return max((tensor.device for tensor in tensors), key=_on_accelerator, default=_CPU)


def _sent(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, behind what its current stream holds, without waiting for that.

    From pageable memory a copy may wait for the stream, whatever it was told.
    """
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def _on_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def _sort(
    start: int,
    data: Tensor,
    bodies: list[tuple[int, Tensor]],
    ends: dict[int, list[tuple[int, Tensor]]],
) -> None:
    """Put a tensor's whole runs, and what remains, where they belong."""
    whole = data.numel() // RUN_BYTES * RUN_BYTES
    if whole:
        bodies.append((start, data[:whole].view(torch.int64).view(-1, RUN_WORDS)))
    if rest := data.numel() - whole:
        ends.setdefault(rest, []).append((start + whole // RUN_BYTES, data[whole:]))


def _whole_runs(start: int, words: Tensor, pick: Tensor, sums: Tensor, samples: Tensor) -> None:
    part = slice(start, start + words.shape[0])
    torch.sum(words, 1, out=sums[part])
    torch.gather(words, 1, pick[part, None], out=samples[part, None])


def _ends_of_one_length(
    where: Tensor, parts: list[Tensor], pick: Tensor, sums: Tensor, samples: Tensor
) -> None:
    data = torch.stack(parts)
    if data.shape[1] % 8:
        data = torch.nn.functional.pad(data, (0, 8 - data.shape[1] % 8))
    words = data.view(torch.int64)
    sums[where] = words.sum(1)
    place = pick[where] % words.shape[1]
    samples[where] = words.gather(1, place[:, None])[:, 0]
