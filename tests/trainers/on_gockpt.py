"""Trains with gockpt: checkpoints every 4 steps, dropout, a schedule.

python on_gockpt.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from handshake import reached
from safetensors.torch import save_file
from torch import nn

import gockpt

STEPS = 12


def main(directory: Path) -> None:
    """Train, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    data = torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(1))

    with gockpt.Checkpointer(
        model, optimizer, directory / "checkpoints", every=4, extras={"scheduler": scheduler}
    ) as ckpt:
        ckpt.restore()
        while ckpt.current_step < STEPS:
            inputs = data[ckpt.current_step]
            loss = nn.functional.mse_loss(model(inputs), inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.step()
            print("step", ckpt.current_step, flush=True)
            reached(str(ckpt.current_step))

    # Not the loss of the last step: a run that is killed behind that one makes no further step.
    loss = nn.functional.mse_loss(model.eval()(data), data)
    save_file(model.state_dict(), directory / "final.safetensors")
    (directory / "final.json").write_text(json.dumps({"loss": loss.item()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
