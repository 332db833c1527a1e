"""After a proof has failed: what only the proof can see must not cost every checkpoint of a run.

A loop that writes weights through ``.data`` changes them behind torch's version counters, so no
guard notices, and each capture over several windows would be wrong again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gockpt
from gockpt.storage import scan


def clamping_loop(
    path: Path, on_error: gockpt.checkpointer.OnError
) -> tuple[gockpt.Checkpointer, dict[int, torch.Tensor]]:
    """25 steps, a checkpoint every 5; weights are clamped after each update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2, fused=True)
    true: dict[int, torch.Tensor] = {}
    with gockpt.Checkpointer(
        model, optimizer, path, every=5, windows=3, agent="thread", on_error=on_error, keep=None
    ) as ckpt:
        while ckpt.current_step < 25:
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model[0].weight.data.clamp_(-0.05, 0.05)
            ckpt.step()
            true[ckpt.current_step] = model[0].weight.detach().clone()
            if ckpt.current_step == 7:
                ckpt.wait()
    return ckpt, true


def test_later_checkpoints_take_one_window(tmp_path: Path) -> None:
    ckpt, true = clamping_loop(tmp_path, "warn")
    found = sorted(scan(tmp_path), key=lambda one: one.step)
    assert [(one.step, one.problem) for one in found] == [(step, None) for step in (10, 15, 20, 25)]
    for step in (10, 25):
        checkpoint = gockpt.open(tmp_path, step)
        assert checkpoint.info.windows == 1
        assert "not the true state" in str(checkpoint.info.fallback)
        assert torch.equal(checkpoint.tensor("model.0.weight"), true[step])
    assert ckpt.engine is not None
    assert ckpt.engine.events["failed"] == 1


def test_it_is_raised_unless_told_otherwise(tmp_path: Path) -> None:
    with pytest.raises(gockpt.ProofError, match="step 5 is not the true state"):
        clamping_loop(tmp_path, "raise")
    assert [one.step for one in scan(tmp_path) if one.problem is None and one.step == 5] == []
