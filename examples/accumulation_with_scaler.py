"""Gradient accumulation and loss scaling, with one update that the scaler has to leave out.

    python examples/accumulation_with_scaler.py DIRECTORY

Four micro-batches make one step. The loss of one of them is made infinite, so the scaler skips that
step's update, in the middle of a capture. A skipped update is a step like any other: it counts, it
changes nothing, and it is replayed as nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import gockpt

ACCUMULATE = 4
STEPS = 12
EVERY = 6
INFINITE_AT = 5
"""The step, inside the windows of the checkpoint of step 6, whose update is skipped."""


def main() -> None:
    """Train, and compare the checkpoints with plain copies taken at the same steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    extras = {"scaler": scaler}
    copies: dict[int, dict[str, torch.Tensor]] = {}

    # windows=3 makes a capture of three steps of a model that one window would hold easily, so that
    # the skipped update falls inside it. In real use leave it out: the engine plans it.
    with gockpt.Checkpointer(
        model, optimizer, args.directory, every=EVERY, windows=3, extras=extras
    ) as ckpt:
        while ckpt.current_step < STEPS:
            step = ckpt.current_step + 1
            for micro in range(ACCUMULATE):
                inputs = torch.randn(8, 32)
                loss = model(inputs).square().mean() / ACCUMULATE
                if step == INFINITE_AT and micro == 2:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                ckpt.step()  # no update since the last call: this does nothing
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            ckpt.step()  # the end of the step, whether the update was made or skipped
            print("step", ckpt.current_step, "scale", scaler.get_scale())
            if ckpt.current_step % EVERY == 0:
                copies[ckpt.current_step] = {
                    f"model.{name}": value.clone() for name, value in model.state_dict().items()
                }

    for step, copy in copies.items():
        checkpoint = gockpt.open(args.directory, step)
        same = all(torch.equal(checkpoint.tensor(name), value) for name, value in copy.items())
        updates = int(checkpoint.tensor("optim.0.weight.step"))
        info = checkpoint.info
        print(
            f"checkpoint {step}: windows {info.windows}, fallback {info.fallback}, "
            f"proof {info.proof['outcome']}, updates {updates}, identical {same}"
        )


if __name__ == "__main__":
    main()
