"""Number formats of a training run, and fp32 master weights behind 16-bit ones.

``fp32``: everything is 32 bits wide (CUDA computes under bf16 autocast). ``bf16-master``: the model
holds bf16 weights and gets bf16 gradients, the optimizer works on fp32 copies, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gockpt.errors import ConfigError, suggestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes per parameter of one number format, under Adam."""

    name: str
    weights: torch.dtype
    """Of the model's weights and gradients."""
    master: bool
    state_bytes: int
    """Weights, both moments and, where there is one, the master copy."""
    grad_bytes: int
    update_bytes: int
    """Device memory read and written by one update: 28 by the fused kernel (weight and moments read
    and written, gradient read); a master copy adds 6 for the upcast and 6 for the cast back."""


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(
            name="fp32",
            weights=torch.float32,
            master=False,
            state_bytes=12,
            grad_bytes=4,
            update_bytes=28,
        ),
        Precision(
            name="bf16-master",
            weights=torch.bfloat16,
            master=True,
            state_bytes=14,
            grad_bytes=2,
            update_bytes=40,
        ),
    )
}


def find_precision(name: str) -> Precision:
    """The number format of this name.

    Raises:
        ConfigError: no such format; names the nearest one.
    """
    if name in PRECISIONS:
        return PRECISIONS[name]
    hint = suggestion(name.lower(), PRECISIONS, cutoff=0.3)
    raise ConfigError(f"no precision named {name!r}; {hint}")


class MasterWeights:
    """fp32 copies of a model's trainable parameters, under the model's own names.

    The optimizer is built over :attr:`masters`; around its ``step()`` the loop calls
    :meth:`take_gradients` and :meth:`store_weights`. What always holds between two updates: each
    weight of the model is, bit for bit, the cast of its master.
    """

    def __init__(self, model: nn.Module) -> None:
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.weights: list[Tensor] = list(trainable.values())
        self.masters: dict[str, nn.Parameter] = {
            name: nn.Parameter(weight.detach().to(torch.float32, copy=True))
            for name, weight in trainable.items()
        }

    def take_gradients(self) -> None:
        """Give each master the exact upcast of its weight's gradient, or none if it has none.

        The upcasts are new tensors each time, so whoever still holds the last ones keeps them
        unchanged.
        """
        for weight, master in zip(self.weights, self.masters.values(), strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()

    @torch.no_grad()
    def store_weights(self) -> None:
        """Cast the masters back into the model's weights."""
        torch._foreach_copy_(self.weights, list(self.masters.values()))
