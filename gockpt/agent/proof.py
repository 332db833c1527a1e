"""The proof: is what lies in the slot the true state that stood on the device at the target?

Runs in the agent. The trainer's fingerprint (:mod:`gockpt.fingerprint`) of the true state lies in
the scratch; the agent computes that of the slot and compares. The verdicts:

- ``exact``: all sums and samples agree;
- ``close``: only where the replay may differ in its last bits (training on CUDA): every sampled
  word of what is replayed agrees within a tolerance that is tied to the learning rate, and all else
  is exact;
- ``wrong``: anything else. Such a checkpoint is never committed;
- ``off``: no proof was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from gockpt import fingerprint
from gockpt.agent.protocol import Seal
from gockpt.arena import Segment
from gockpt.state import Entry, Layout, torch_dtype

Verdict = Literal["exact", "close", "wrong", "off"]

RELATIVE = 1e-5
"""Of the value: a few of the last bits of a 32-bit number, grown over some updates."""

OF_LR = 1e-4
"""Of the learning rate: what rounding may move a parameter by, next to what an update moves it."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the proof found."""

    verdict: Verdict
    detail: str = ""
    runs: int = 0
    """Runs of 512 words that were compared."""
    different: int = 0
    """Runs whose sum or sample differs."""
    largest: float = 0.0
    """Largest difference between two sampled values."""


class Prover:
    """Compares the slot with the fingerprint of the true state, a stretch at a time."""

    def __init__(
        self, layout: Layout, slot: Segment, scratch: Segment, seal: Seal, *, exact: bool
    ) -> None:
        self._layout = layout
        self._seal = seal
        self._must_be_exact = exact
        self._replayed = layout.of_blocks()  # all else was copied, and is exact everywhere
        total = fingerprint.offsets(layout)[-1]
        self._true_sums = scratch.view(0, total, torch.int64)
        self._true_samples = scratch.view(total * 8, total, torch.int64)
        self._sums = torch.zeros(total, dtype=torch.int64)
        self._samples = torch.zeros(total, dtype=torch.int64)
        self._fingerprinter = fingerprint.Fingerprinter(
            layout, [(index, self._bytes(slot, index)) for index in seal.present]
        )
        self._runs = 0
        self._different = 0
        self._largest = 0.0
        self.wrong: list[str] = []
        """Names of the entries that are not the true state."""

    def _bytes(self, slot: Segment, index: int) -> Tensor:
        entry = self._layout.entries[index]
        return slot.tensor[entry.offset : entry.offset + entry.nbytes]

    def run(self, stretch: int) -> Iterator[int]:
        """Compare everything, pausing after about ``stretch`` bytes; yields how many were read."""
        if not self._seal.proved:
            return
        yield from self._fingerprinter.slices(self._seal.seed, self._sums, self._samples, stretch)
        differs = (self._sums != self._true_sums) | (self._samples != self._true_samples)
        first = fingerprint.offsets(self._layout)
        for index in self._seal.present:
            part = slice(first[index], first[index + 1])
            self._runs += part.stop - part.start
        if bool(differs.any()):
            for index in self._seal.present:
                self._judge(index, slice(first[index], first[index + 1]), differs)

    def outcome(self) -> Outcome:
        """The verdict, once :meth:`run` has ended."""
        if not self._seal.proved:
            return Outcome(verdict="off")
        verdict: Verdict = "exact"
        if self.wrong:
            verdict = "wrong"
        elif self._different:
            verdict = "close"
        detail = "" if verdict == "exact" else f"{self._different} of {self._runs} runs differ"
        if self.wrong:
            detail += f", first in {self.wrong[0]!r}"
        elif self._different:
            detail += f", by at most {self._largest:.3g}"
        return Outcome(
            verdict=verdict,
            detail=detail,
            runs=self._runs,
            different=self._different,
            largest=self._largest,
        )

    def _judge(self, index: int, part: slice, differs: Tensor) -> None:
        entry = self._layout.entries[index]
        mask = differs[part]
        count = int(mask.sum())
        if not count:
            return
        self._different += count
        exact = self._must_be_exact or index not in self._replayed
        if exact or not self._close(
            entry, self._samples[part][mask], self._true_samples[part][mask]
        ):
            self.wrong.append(entry.name)

    def _close(self, entry: Entry, ours: Tensor, true: Tensor) -> bool:
        """Whether sampled words, read as numbers of the entry's dtype, nearly agree."""
        dtype = torch_dtype(entry.dtype)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return False
        one = ours.view(dtype).double()
        two = true.view(dtype).double()
        difference = (one - two).abs()
        # A 16-bit cast may fall on the other side of a rounding boundary: one unit in the last
        # place.
        relative = max(RELATIVE, torch.finfo(dtype).eps)
        allowed = two.abs() * relative + self._seal.lr * OF_LR
        self._largest = max(self._largest, float(difference.max()))
        return bool((difference <= allowed).all())


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as the manifest has it."""
    record: dict[str, Any] = msgspec.to_builtins(outcome)
    record["outcome"] = record.pop("verdict")
    return record
