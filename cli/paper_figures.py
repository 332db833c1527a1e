"""What GoCkpt's paper (arXiv 2511.07035) reports, for ``bench --suite paper``. Pure data.

Its V100S machine: PCIe 3.0, one NVMe drive, batches of one sequence. Its strategies under our
names: ``Async`` is ``async``, ``Async-O`` is ``async-o``, ``GoCkpt`` and ``GoCkpt-O`` are the
``-paper`` ones; ``gockpt`` stands beside the best of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SOURCE = "arXiv 2511.07035"
PROFILE = "v100s-pcie3"
"""Our profile of its machine."""

BESIDE = {
    "async": "Async",
    "async-o": "Async-O",
    "gockpt-paper": "GoCkpt",
    "gockpt-o-paper": "GoCkpt-O",
    "gockpt": "GoCkpt-O",
}
"""Our strategy → the paper's that it is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """What the paper reports of one model."""

    stall_s: Mapping[str, float]
    """Seconds of stall for each checkpoint, by the paper's name of the strategy."""
    ideal: float
    """Tokens a second without checkpoints."""
    tokens_per_s: Mapping[int, Mapping[str, float]]
    """Steps between checkpoints → tokens a second, by the paper's name of the strategy."""

    def relative(self, strategy: str, interval: int) -> float:
        """Its throughput as a share of its ideal."""
        return self.tokens_per_s[interval][strategy] / self.ideal


def _by_name(*figures: float) -> dict[str, float]:
    return dict(zip(("Async", "Async-O", "GoCkpt", "GoCkpt-O"), figures, strict=True))


PAPER: dict[str, PaperModel] = {
    "opt-350m": PaperModel(
        stall_s=_by_name(0.351, 0.191, 0.074, 0.004),
        ideal=2662,
        tokens_per_s={50: _by_name(2567, 2607, 2615, 2629)},
    ),
    "qwen3-0.6b": PaperModel(
        stall_s=_by_name(0.632, 0.374, 0.112, 0.003),
        ideal=1492,
        tokens_per_s={50: _by_name(1446, 1463, 1473, 1480)},
    ),
    "llama-3.2-1b": PaperModel(
        stall_s=_by_name(1.311, 0.962, 0.407, 0.131),
        ideal=930,
        tokens_per_s={
            50: _by_name(888, 900, 915, 926),
            200: _by_name(919, 922, 927, 928),
        },
    ),
}
"""By the name of our preset, the quickest first."""
