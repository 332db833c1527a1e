"""A training whose every choice is random, and that can be killed anywhere: what test_resume runs.

``python resume_kit.py DIRECTORY STEP POINT THREADS`` trains until it kills itself with SIGKILL at a
point of a step. Dropout, shuffling by epoch, noise by numpy and Python, and a schedule are all on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import gockpt

STEPS, EVERY, WINDOWS = 30, 5, 3
SAMPLES, BATCH = 44, 4


class Loader:
    """Shuffled anew in each epoch; knows its position."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.epoch, self.position = 0, 0
        self.order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order: list[int] = torch.randperm(SAMPLES, generator=self.generator).tolist()
        return order

    def __next__(self) -> list[int]:
        if self.position == SAMPLES:
            self.epoch, self.position, self.order = self.epoch + 1, 0, self._shuffled()
        batch = self.order[self.position : self.position + BATCH]
        self.position += BATCH
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": self.order,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self.order = state["epoch"], state["position"], state["order"]
        self.generator.set_state(state["generator"])


class Run:
    """One launch of the training."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(
            nn.Embedding(SAMPLES, 24), nn.Dropout(0.3), nn.Linear(24, 33), nn.BatchNorm1d(33),
            nn.GELU(), nn.Dropout(0.2), nn.Linear(33, 5),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, fused=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, STEPS)
        self.loader = Loader()
        self.history: list[dict[str, Any]] = []
        self.restored: gockpt.Restored | None = None

    def train(
        self,
        path: Path,
        *,
        at: Callable[[int, str], None] = lambda step, point: None,
        log: Path | None = None,
        **arguments: Any,
    ) -> None:
        """Restore and train to the end; ``at`` is called at two points of each step."""
        extras = {"scheduler": self.scheduler, "data": self.loader}
        settings = {"every": EVERY, "windows": WINDOWS, "keep": None} | arguments
        with gockpt.Checkpointer(
            self.model, self.optimizer, path, extras=extras, **settings
        ) as ckpt:
            self.restored = ckpt.restore()
            while ckpt.current_step < STEPS:
                step = ckpt.current_step + 1
                batch = next(self.loader)
                loss = self._loss(batch)
                loss.backward()
                at(step, "update")
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self._note(
                    log, step=step, epoch=self.loader.epoch, batch=batch, loss=loss.item().hex()
                )
                ckpt.step()
                at(step, "end")

    def _loss(self, batch: list[int]) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        out = self.model(torch.tensor(batch)) * noise
        return F.cross_entropy(out, torch.tensor(batch) % 5)

    def _note(self, log: Path | None, **entry: Any) -> None:
        self.history.append(entry)
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def main(directory: str, step: str, point: str, threads: str) -> None:
    torch.set_num_threads(int(threads))  # sums of other threads have other last bits

    def at(now: int, where: str) -> None:
        if (now, where) == (int(step), point):
            os.kill(os.getpid(), signal.SIGKILL)

    path = Path(directory)
    Run().train(path, at=at, log=path.with_suffix(".log"), linger=0.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
