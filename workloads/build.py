"""From a preset to everything a training loop needs. Runs on the training thread.

What always holds: the same arguments give the same weights, batches and losses, bit for bit, in any
process of one machine with the same number of torch threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from gockpt.errors import ConfigError
from gockpt.workloads.data import Loader, read_text
from gockpt.workloads.gpt import GPT
from gockpt.workloads.llama import Llama
from gockpt.workloads.precision import MasterWeights, Precision, find_precision
from gockpt.workloads.presets import Preset, find_preset, param_count, shrunk

WARMUP = 10
"""Steps in which the learning rate rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model in training, and the figures that a cost model asks for."""

    preset: Preset
    """The model in its true size."""
    built: Preset
    """The model that is really here: ``preset``, or its shrunk form."""
    shrink: int
    """The factor w between the two; 1 if they are the same."""
    precision: Precision
    seed: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    """Over the model's parameters or their masters; its groups name them as the model does."""
    masters: MasterWeights | None
    scheduler: LambdaLR
    loader: Loader
    clip: float | None
    """Largest norm of all gradients together, if they are clipped."""
    device: torch.device

    @property
    def params(self) -> int:
        """Parameters of the model in its true size."""
        return param_count(self.preset)

    @property
    def device_params(self) -> int:
        """Parameters of the model that is really here."""
        return param_count(self.built)

    @property
    def scale(self) -> float:
        """True parameters per built one, about ``shrink``²: the divisor of all emulated rates."""
        return self.params / self.device_params

    @property
    def tokens(self) -> int:
        """Tokens that one step really trains on."""
        return self.loader.rows * self.loader.length

    @property
    def extras(self) -> dict[str, Any]:
        """What else a checkpoint of this run must hold."""
        return {"scheduler": self.scheduler, "data": self.loader}

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of one batch, a 0-dim fp32 tensor."""
        autocast = self.device.type == "cuda" and not self.precision.master
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            logits = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def zero_grad(self) -> None:
        """Drop all gradients, so that the next ones are new tensors."""
        self.model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)

    def update(self) -> None:
        """One optimizer update from the gradients of the last backward, and the next lr."""
        if self.masters is not None:
            self.masters.take_gradients()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self._optimized(), self.clip)
        self.optimizer.step()
        if self.masters is not None:
            self.masters.store_weights()
        self.scheduler.step()

    def _optimized(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]


def build(
    preset: Preset | str,
    *,
    precision: str | None = None,
    seed: int = 0,
    shrink: int = 1,
    device: torch.device | str = "cpu",
    tokens: int | None = None,
    data: str | Path | None = None,
    horizon: int = 1_000,
    clip: float | None = None,
) -> Workload:
    """Everything for training this model. Seeds torch's global generators.

    Args:
        preset: the model, or its name.
        precision: ``fp32`` or ``bf16-master``; the preset's own by default.
        shrink: divide widths, vocabulary and context by this (emulation).
        tokens: tokens of a step, cut into sequences no longer than the context; the preset's own
            by default. An emulated step takes a few (:func:`~.measure.measure_real_tokens`).
        data: text file; the standard library's sources by default.
        horizon: steps over which the learning rate falls to a tenth. A resumed run needs the same.

    Raises:
        ConfigError: unknown names, a factor that does not divide, tokens that make no full
            sequences, a data file that is missing or too short.
    """
    true = find_preset(preset) if isinstance(preset, str) else preset
    number = find_precision(precision or true.precision)
    built = shrunk(true, shrink) if shrink != 1 else true
    place = torch.device(device)
    rows, length = batch_shape(built, true.tokens if tokens is None else tokens)
    loader = Loader(read_text(data), rows=rows, length=length, seed=seed, device=place)

    torch.manual_seed(seed)
    model = build_model(built, number, place)
    masters = MasterWeights(model) if number.master else None
    named = dict(model.named_parameters()) if masters is None else masters.masters
    optimizer = build_optimizer(named, true.learning_rate)
    return Workload(
        preset=true,
        built=built,
        shrink=shrink,
        precision=number,
        seed=seed,
        model=model,
        optimizer=optimizer,
        masters=masters,
        scheduler=LambdaLR(optimizer, lambda step: rate(step, horizon)),
        loader=loader,
        clip=clip,
        device=place,
    )


def batch_shape(preset: Preset, tokens: int) -> tuple[int, int]:
    """Rows and length of a batch of this many tokens.

    Raises:
        ConfigError: the tokens are not a positive number of whole sequences.
    """
    length = min(tokens, preset.context)
    if length < 1 or tokens % length:
        raise ConfigError(
            f"a step of {tokens} tokens cannot be cut into sequences of {preset.context}; "
            f"give a multiple of that, or fewer"
        )
    return tokens // length, length


def build_model(preset: Preset, precision: Precision, device: torch.device) -> nn.Module:
    """The model on its device, in training mode. A CPU computes in fp32 even on 16-bit weights."""
    compute = precision.weights if device.type == "cuda" else torch.float32
    kind = GPT if preset.family == "gpt" else Llama
    with device:
        return kind(preset, compute).to(precision.weights)


def build_optimizer(named: Mapping[str, nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, norms and biases do not (as GPT-3 was trained)."""
    matrices = [(name, param) for name, param in named.items() if param.ndim >= 2]
    vectors = [(name, param) for name, param in named.items() if param.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def rate(step: int, horizon: int) -> float:
    """Factor on the learning rate: a linear rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / WARMUP)
    done = min(1.0, step / horizon)
    return rise * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))
