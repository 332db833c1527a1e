"""GPT: learned positions, pre-norm blocks, torch's attention, tied output. Reads top to bottom."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gockpt.workloads.layers import LayerNorm, Linear, init_weights
from gockpt.workloads.presets import Preset


class Attention(nn.Module):
    """Causal self-attention of all heads at once."""

    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.heads = p.heads
        self.qkv = Linear(p.d_model, 3 * p.q_dim)
        self.out = Linear(p.q_dim, p.d_model)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (rows, heads, length, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.out(y.transpose(1, 2).reshape(rows, length, -1))
        return joined


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.up = Linear(p.d_model, p.d_ff)
        self.down = Linear(p.d_ff, p.d_model)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class Block(nn.Module):
    """Attention and MLP, each on the normed stream and added back to it."""

    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.norm1 = LayerNorm(p.d_model)
        self.attention = Attention(p)
        self.norm2 = LayerNorm(p.d_model)
        self.mlp = MLP(p)
        self.dropout = p.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """Tokens (rows, length) to logits (rows, length, vocab); ``length`` is at most the context.

    ``compute`` is the dtype of the activations.
    """

    def __init__(self, p: Preset, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.compute = compute
        self.tokens = nn.Embedding(p.vocab, p.embed_dim)
        self.positions = nn.Embedding(p.context, p.d_model)
        self.into: nn.Module = nn.Identity()
        self.outof: nn.Module = nn.Identity()
        if p.embed_dim != p.d_model:
            self.into = Linear(p.embed_dim, p.d_model, bias=False)
            self.outof = Linear(p.d_model, p.embed_dim, bias=False)
        self.blocks = nn.ModuleList(Block(p) for _ in range(p.layers))
        self.norm = LayerNorm(p.d_model)
        self.head = Linear(p.embed_dim, p.vocab, bias=False)
        init_weights(self, p.layers)
        if p.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions.weight[: tokens.shape[1]]
        x = self.into(self.tokens(tokens).to(self.compute)) + positions.to(self.compute)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.outof(self.norm(x)))
        return logits
