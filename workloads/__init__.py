"""Models, text and a training loop for measuring and testing checkpoints on.

``build`` makes everything of a preset; ``train_step`` trains it for one step on a device.
"""

from __future__ import annotations

from gockpt.workloads.build import Workload, build
from gockpt.workloads.loop import train_step
from gockpt.workloads.measure import RealTokens, measure_real_tokens
from gockpt.workloads.precision import PRECISIONS, Precision, find_precision
from gockpt.workloads.presets import PRESETS, Preset, find_preset, param_count, shrunk

__all__ = [
    "PRECISIONS",
    "PRESETS",
    "Precision",
    "Preset",
    "RealTokens",
    "Workload",
    "build",
    "find_precision",
    "find_preset",
    "measure_real_tokens",
    "param_count",
    "shrunk",
    "train_step",
]
