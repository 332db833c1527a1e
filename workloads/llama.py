"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Reads top to bottom.

With ``qk_norm`` it is Qwen3's block: queries and keys are normed per head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gockpt.workloads.layers import Linear, RMSNorm, init_weights
from gockpt.workloads.presets import Preset


def rotation(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (length, head_dim) of the rotary embedding (arXiv 2104.09864)."""
    half = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=like.device).float(), theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim/2) of ``x`` (…, length, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one head of keys and values."""

    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.heads, self.kv_heads = p.heads, p.kv_heads
        self.q = Linear(p.d_model, p.q_dim, bias=False)
        self.k = Linear(p.d_model, p.kv_dim, bias=False)
        self.v = Linear(p.d_model, p.kv_dim, bias=False)
        self.out = Linear(p.q_dim, p.d_model, bias=False)
        self.q_norm: nn.Module = RMSNorm(p.head_dim) if p.qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(p.head_dim) if p.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_norm(self.q(x).view(rows, length, self.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(rows, length, self.kv_heads, -1)).transpose(1, 2)
        v = self.v(x).view(rows, length, self.kv_heads, -1).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        joined: Tensor = self.out(y.transpose(1, 2).reshape(rows, length, -1))
        return joined


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) · up(x))``."""

    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.gate = Linear(p.d_model, p.d_ff, bias=False)
        self.up = Linear(p.d_model, p.d_ff, bias=False)
        self.down = Linear(p.d_ff, p.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Attention and SwiGLU, each on the normed stream and added back to it."""

    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.norm1 = RMSNorm(p.d_model)
        self.attention = Attention(p)
        self.norm2 = RMSNorm(p.d_model)
        self.mlp = SwiGLU(p)
        self.dropout = p.dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), cos, sin))
        return x + self.drop(self.mlp(self.norm2(x)))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Llama(nn.Module):
    """Tokens (rows, length) to logits (rows, length, vocab).

    ``compute`` is the dtype of the activations.
    """

    def __init__(self, p: Preset, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.compute = compute
        self.head_dim, self.theta = p.head_dim, p.rope_theta
        self.tokens = nn.Embedding(p.vocab, p.d_model)
        self.blocks = nn.ModuleList(Block(p) for _ in range(p.layers))
        self.norm = RMSNorm(p.d_model)
        self.head = Linear(p.d_model, p.vocab, bias=False)
        init_weights(self, p.layers)
        if p.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens).to(self.compute)
        cos, sin = rotation(tokens.shape[1], self.head_dim, self.theta, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits
