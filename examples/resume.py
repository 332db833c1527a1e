"""A run that is killed and started again ends as one that was never stopped, bit for bit.

    python examples/resume.py DIRECTORY [--kill-at 28 | --stop-at 28]

Everything that a step depends on is in the checkpoint: weights and optimizer state, the learning
rate's schedule, the position in the shuffled data, and the random generators that dropout draws
from. ``--kill-at`` ends the process as a crash would, with SIGKILL in the middle of a step;
``--stop-at`` leaves the loop between two steps; so does SIGTERM, with a checkpoint of the step it
came in. Run it again without either to go on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gockpt

STEPS = 40
EVERY = 5
SAMPLES, BATCH = 100, 8


class Shuffled:
    """Batches of a data set, in a new order in each epoch; its position can be saved."""

    def __init__(self) -> None:
        self._data = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
        self._epoch, self._position = 0, 0

    def __iter__(self) -> Iterator[tuple[list[int], Tensor]]:
        while True:
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._epoch))
            while self._position + BATCH <= SAMPLES:
                chosen = order[self._position : self._position + BATCH]
                # Moved on before the batch is given out: a step's checkpoint holds the next one.
                self._position += BATCH
                yield chosen.tolist(), self._data[chosen]
            self._epoch, self._position = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        self._epoch, self._position = state["epoch"], state["position"]


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kill-at", type=int, metavar="STEP")
    parser.add_argument("--stop-at", type=int, metavar="STEP", default=STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Dropout(0.2), nn.Linear(128, 16))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
    data = Shuffled()
    extras = {"scheduler": scheduler, "data": data}

    with gockpt.Checkpointer(model, optimizer, args.directory, every=EVERY, extras=extras) as ckpt:
        restored = ckpt.restore()
        print("start", 0 if restored is None else restored.step, flush=True)
        batches = iter(data)  # after restore, which sets the position
        while ckpt.current_step < args.stop_at and not ckpt.should_stop:
            chosen, inputs = next(batches)
            loss = nn.functional.mse_loss(model(inputs), inputs)
            optimizer.zero_grad()
            loss.backward()
            if ckpt.current_step + 1 == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            lr = scheduler.get_last_lr()[0]
            scheduler.step()
            ckpt.step()
            print(
                "step",
                ckpt.current_step,
                "loss",
                loss.item().hex(),
                "lr",
                lr.hex(),
                "samples",
                *chosen,
                flush=True,
            )

    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
