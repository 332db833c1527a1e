"""The proof: is what lies in the slot the true state that stood on the device at the target?

Runs in the agent. The trainer's fingerprint (:mod:`gockpt.fingerprint`) of the true state lies in
the scratch; the agent computes that of the slot and compares. The verdicts:

- ``exact``: all sums and samples agree;
- ``close``: only where the replay may differ in its last bits (training on CUDA): every sampled word
  agrees within a tolerance that is tied to the learning rate;
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
        self._slot = slot
        self._seal = seal
        self._must_be_exact = exact
        self._first = fingerprint.offsets(layout)
        total = self._first[-1]
        self._true_sums = scratch.view(0, total, torch.int64)
        self._true_samples = scratch.view(total * 8, total, torch.int64)
        self._runs = 0
        self._different = 0
        self._largest = 0.0
        self._wrong: list[str] = []
        self.bytes_read = 0

    def run(self, stretch: int) -> Iterator[None]:
        """Compare everything, pausing after about ``stretch`` bytes."""
        if not self._seal.proved:
            return
        pick = fingerprint.picks(self._first[-1], self._seal.seed)
        pause_at = stretch
        for index in self._seal.present:
            self._compare(index, pick)
            if self.bytes_read >= pause_at:
                pause_at = self.bytes_read + stretch
                yield

    def outcome(self) -> Outcome:
        """The verdict, once :meth:`run` has ended."""
        if not self._seal.proved:
            return Outcome(verdict="off")
        verdict: Verdict = "exact"
        if self._wrong:
            verdict = "wrong"
        elif self._different:
            verdict = "close"
        detail = "" if verdict == "exact" else f"{self._different} of {self._runs} runs differ"
        if self._wrong:
            detail += f", first in {self._wrong[0]!r}"
        elif self._different:
            detail += f", by at most {self._largest:.3g}"
        return Outcome(
            verdict=verdict,
            detail=detail,
            runs=self._runs,
            different=self._different,
            largest=self._largest,
        )

    def _compare(self, index: int, pick: Tensor) -> None:
        entry = self._layout.entries[index]
        part = slice(self._first[index], self._first[index + 1])
        data = self._slot.tensor[entry.offset : entry.offset + entry.nbytes]
        sums = torch.empty(part.stop - part.start, dtype=torch.int64)
        samples = torch.empty_like(sums)
        fingerprint.fingerprint(data, pick[part], sums, samples)
        differs = (sums != self._true_sums[part]) | (samples != self._true_samples[part])
        self._runs += sums.numel()
        self.bytes_read += entry.nbytes
        count = int(differs.sum())
        if not count:
            return
        self._different += count
        if self._must_be_exact or not self._close(
            entry, samples[differs], self._true_samples[part][differs]
        ):
            self._wrong.append(entry.name)

    def _close(self, entry: Entry, ours: Tensor, true: Tensor) -> bool:
        """Whether sampled words, read as numbers of the entry's dtype, agree within the tolerance."""
        dtype = torch_dtype(entry.dtype)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return False
        one = ours.view(dtype).double()
        two = true.view(dtype).double()
        difference = (one - two).abs()
        # A 16-bit cast may fall on the other side of a rounding boundary: one unit in the last place.
        relative = max(RELATIVE, torch.finfo(dtype).eps)
        allowed = two.abs() * relative + self._seal.lr * OF_LR
        self._largest = max(self._largest, float(difference.max()))
        return bool((difference <= allowed).all())


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as the manifest has it."""
    record: dict[str, Any] = msgspec.to_builtins(outcome)
    record["outcome"] = record.pop("verdict")
    return record
