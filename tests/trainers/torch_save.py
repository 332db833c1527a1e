"""Trains with ``torch.save`` done right, or with the schedule forgotten at the resume.

    python torch_save.py [--forget scheduler]

It writes into the directory that it runs in: under another name first, made durable, then renamed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from handshake import reached
from torch import nn

STEPS, EVERY = 12, 4
CHECKPOINT = Path("checkpoint.pt")


def save(state: dict[str, Any], path: Path) -> None:
    """Whole, or not at all, whenever this process or its machine dies."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def main(forgotten: list[str]) -> None:
    """Train, from the checkpoint if there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    order = torch.randperm(STEPS, generator=torch.Generator().manual_seed(2))
    data = torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(1))
    step = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, weights_only=True)
        step = state["step"]  # the position in the data, too
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if "scheduler" not in forgotten:
            scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])

    while step < STEPS:
        inputs = data[order[step]]
        loss = nn.functional.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % EVERY == 0:
            state = {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng": torch.get_rng_state(),
            }
            save(state, CHECKPOINT)
        print("step", step, flush=True)
        reached(str(step))

    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path("final.pt"))


if __name__ == "__main__":
    main(sys.argv[2:] if sys.argv[1:2] == ["--forget"] else [])
