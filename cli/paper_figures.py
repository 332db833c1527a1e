"""What the paper of GoCkpt (arXiv 2511.07035) reports, to be shown beside what is emulated here.

Constants only. They are measurements of others, on their machines; none was taken by gockpt.
"""

from __future__ import annotations

# -- Table 1: LLaMA3.2-1B on a V100S, a crash every 600 s, each method at its best interval --------

TABLE1_MODEL = "llama-3.2-1b"
TABLE1_DEVICE = "emulated:v100s-pcie3"
"""The profile whose link and step are calibrated from the paper's own figures."""

TABLE1_MTBF_S = 600.0
TABLE1_STEP_S = 0.446
TABLE1_IDEAL_TOKENS_PER_S = 930.0
"""Without checkpoints and crashes."""

TABLE1_NAMES = {
    "async": "Async",
    "async-o": "Async-O",
    "gockpt-paper": "GoCkpt",
    "gockpt-o-paper": "GoCkpt-O",
}
"""Strategy here → the paper's name for it."""

TABLE1_STALL_S = {
    "async": 1.311,
    "async-o": 0.962,
    "gockpt-paper": 0.407,
    "gockpt-o-paper": 0.131,
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
