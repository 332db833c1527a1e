"""The library in a plain training loop: a checkpoint every 10 steps, and a resume when run again.

    python examples/plain_loop.py DIRECTORY [--steps 30]

Run it twice with a higher ``--steps`` and the second run goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from torch import nn

import gockpt


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of one step: a made-up regression, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 64, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    # Named parameters: state is kept under the model's own names, whatever the order of the groups.
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3, fused=True)

    with gockpt.Checkpointer(model, optimizer, args.directory, every=10) as ckpt:
        restored = ckpt.restore()
        print("start", 0 if restored is None else restored.step)
        while ckpt.current_step < args.steps:
            inputs, targets = batch(ckpt.current_step + 1)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step()
            print("step", ckpt.current_step, "loss", loss.item().hex())

    # Leaving the `with` block has waited until the last checkpoint was durable. It can be read
    # without a model, and every byte of it checked.
    checkpoint = gockpt.open(args.directory)
    print("newest", checkpoint.step, "proof", checkpoint.info.proof["outcome"])
    print("problems", checkpoint.verify())
    print("tensors", *checkpoint.names())


if __name__ == "__main__":
    main()
