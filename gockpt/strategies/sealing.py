"""What a checkpoint holds besides tensors of the model and its optimizers, taken at the target.

Runs on the training thread: the user's objects, the generators and the hyper-parameters would
change under any other thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gockpt.errors import ExtrasError
from gockpt.extras import Captured, Extras
from gockpt.inventory import Inventory
from gockpt.state import Entry, align, dtype_name
from gockpt.tagged import encode

INLINE = 256
"""Tensors of the extras of at most this many bytes go into the manifest."""

SPARE = 64 << 10
"""Least room in the image for tensors of the extras."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """The state of everything that is not a tensor of the training's, as JSON and small tensors."""

    options: list[dict[str, Any]]
    """Copies of the optimizers' group options, not encoded yet."""
    plain: Any
    """State of optimizers that is not a tensor, encoded."""
    model: Any
    """What modules return from ``get_extra_state``, encoded."""
    extras: Captured
    tensors: dict[str, Tensor]
    lr: float
    """The largest learning rate of all groups."""
    buffers: dict[int, Tensor]
    """Copies of the model's buffers on their device, by entry: the next forward may change them."""

    def groups(self) -> dict[str, Any]:
        """The manifest's ``groups`` (encoded by whoever asks; not on the training thread).

        Raises:
            ExtrasError: an option has no exact encoding.
        """
        groups = [
            {**group, "options": encode(group["options"], {}, root="options", inline=1 << 20)}
            for group in self.options
        ]
        return {"groups": groups, "plain": self.plain, "model": self.model}

    @property
    def nbytes(self) -> int:
        """Room that the tensors take in the image."""
        return sum(align(tensor.nbytes) for tensor in self.tensors.values())

    def entries(self, start: int, room: int) -> list[Entry]:
        """Where the tensors lie, from byte ``start`` of the image on.

        Raises:
            ExtrasError: they need more than ``room`` bytes.
        """
        if self.nbytes > room:
            raise ExtrasError(
                f"tensors of the extras grew to {self.nbytes} bytes, more than the {room} reserved "
                "at the start; keep large or growing tensors in the model"
            )
        entries: list[Entry] = []
        for name, tensor in self.tensors.items():
            entries.append(
                Entry(
                    name=name,
                    dtype=dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    order=tuple(range(tensor.dim())),
                    offset=start,
                )
            )
            start = align(start + tensor.nbytes)
        return entries


def take(inventory: Inventory, extras: Extras, buffers: Mapping[int, Tensor]) -> Sealing:
    """Record it now.

    Args:
        buffers: the model's, by entry.

    Raises:
        ExtrasError: something has no exact encoding.
    """
    tensors: dict[str, Tensor] = {}
    options = inventory.group_options()
    plain = inventory.plain_state()
    return Sealing(
        options=options,
        plain=encode(plain, {}, root="plain", inline=1 << 20),
        model=encode(inventory.extra_state(), tensors, root="model_extra", inline=INLINE),
        extras=extras.capture(tensors, inline=INLINE),
        tensors=tensors,
        lr=max((_number(group["options"].get("lr")) for group in options), default=0.0),
        buffers={index: tensor.clone() for index, tensor in buffers.items()},
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float | Tensor) else 0.0
