"""Layers whose weights may be narrower than the arithmetic.

A weight is cast to the dtype of its input. On CUDA both are bf16 and nothing is cast; a CPU
computes in fp32 on bf16 weights, since its bf16 kernels are up to ten times slower where the
processor has no such instructions. Either way gradients arrive in the dtype of the weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """``x @ weightᵀ + bias`` in the dtype of ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension in the dtype of ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """``x / rms(x) · weight`` over the last dimension in the dtype of ``x``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


def init_weights(model: nn.Module, layers: int) -> None:
    """GPT-2's start: N(0, 0.02), and projections back into the residual stream less by √(2·layers).

    Those projections are the linear layers named ``out`` and ``down``.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            inward = name.endswith((".out", ".down"))
            nn.init.normal_(module.weight, std=0.02 / (2 * layers) ** 0.5 if inward else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
