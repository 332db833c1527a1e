"""What GoCkpt's paper (arXiv 2511.07035) reports, to stand beside what is emulated here. Pure data.

These are measurements of others, on their machines; none was taken by gockpt.

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

# -- Table 1: LLaMA3.2-1B on a V100S, a crash every 600 s, each method at its best interval --------

TABLE1_MODEL = "llama-3.2-1b"
TABLE1_DEVICE = f"emulated:{PROFILE}"
"""The profile whose link and step are calibrated from the paper's own figures."""

TABLE1_MTBF_S = 600.0
TABLE1_STEP_S = 0.446
TABLE1_IDEAL_TOKENS_PER_S = PAPER[TABLE1_MODEL].ideal
"""Without checkpoints and crashes."""

TABLE1_NAMES = {
    "async": "Async",
    "async-o": "Async-O",
    "gockpt-paper": "GoCkpt",
    "gockpt-o-paper": "GoCkpt-O",
}
"""Strategy here → the paper's name for it."""

TABLE1_STALL_S = {
    name: PAPER[TABLE1_MODEL].stall_s[theirs] for name, theirs in TABLE1_NAMES.items()
}
"""Seconds for which one checkpoint holds training up."""

TABLE1_TOKENS_PER_S = {
    "async": 758.0,
    "async-o": 776.3,
    "gockpt-paper": 786.4,
    "gockpt-o-paper": 794.1,
}

TABLE1_OTHERS_TOKENS_PER_S = {"DeepSpeed": 411.9, "DCP-Async": 697.8}
"""Methods of the table that are not run here."""

TABLE1_ASSUMED_LAG_S = 14 * 1.236e9 / 3e9
"""Assumed, as the paper does not say it: its checkpoint of 14 bytes for each of 1.236e9 parameters,
written at the 3 GB/s that the profile assumes of its SSD."""
