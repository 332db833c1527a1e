"""A sample of one real update, replayed before the first checkpoint that relies on replay.

Runs on the training thread, once for each optimizer: taken in the pre-hook of a real update,
compared after it. What always holds: neither parameters, state nor gradients are touched. It finds
what no table can know: a compiled step, a patched optimizer, a torch that computes differently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gockpt.optim import gradient_obstacle, kind_of, obstacle, state_keys
from gockpt.recipe import fill, take_recipe
from gockpt.replay import Replayer
from gockpt.state import CUT, flatten

SAMPLE = 4096
"""Elements of a parameter that are compared: its last ones, where a kernel's scalar tail is."""

RELATIVE = 1e-5
OF_LR = 1e-4
"""What the proof lets pass (:mod:`gockpt.agent.proof`), of the value and of the learning rate."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The end of one parameter before the update, on the CPU."""

    group: int
    live: Tensor
    start: int
    param: Tensor
    state: dict[str, Tensor]
    reserved: dict[str, Tensor]
    scalars: dict[str, Tensor]
    grad: Tensor


class Sample:
    """What one update started from: the end of one parameter of each group and dtype."""

    def __init__(self, optimizer: Optimizer, *, groups: Collection[int] | None = None) -> None:
        """Copy the pieces. Call it last in the pre-hook.

        Args:
            groups: indices of those to sample; None: all.
        """
        self._optimizer = optimizer
        self._pieces = [
            piece
            for index in range(len(optimizer.param_groups))
            if groups is None or index in groups
            for piece in _pieces(optimizer, index)
        ]
        self.groups = frozenset(piece.group for piece in self._pieces)
        """The groups that were sampled: some parameter can be replayed and had a gradient."""
        if self.groups:
            update, values = take_recipe(optimizer, groups=self.groups)
            self._update = fill(update, {name: float(value) for name, value in values})

    def repeats(self) -> dict[int, str]:
        """The groups whose update did not repeat, each with the reason. Call it after the update.

        On the CPU all bits are compared. An accelerator's last bits may differ: there a parameter
        has to be as right as the proof of a checkpoint will want it, within its rounding and 0.01 %
        of the learning rate. Optimizer state is measured by itself: at the start of a warm-up the
        learning rate is far smaller than that of any proof, or zero.
        """
        name = type(self._optimizer).__name__
        groups = len(self._optimizer.param_groups)
        replayer = Replayer([(name, groups)], threads=torch.get_num_threads())
        for piece in self._pieces:
            replayer.add(
                optimizer=0,
                group=piece.group,
                param=piece.param,
                state=piece.state,
                reserved=piece.reserved,
                scalars=piece.scalars,
            )
        if self._pieces:
            items = [(number, piece.grad) for number, piece in enumerate(self._pieces)]
            replayer.apply(0, self._update, items)
        reasons: dict[int, str] = {}
        for number, piece in enumerate(self._pieces):
            lr = float(self._optimizer.param_groups[piece.group]["lr"])
            real = self._optimizer.state[piece.live]
            if key := _difference(piece, real, replayer.scalars(number), lr):
                reasons[piece.group] = f"a replayed sample of {name}'s update differs in {key!r}"
        return reasons


def _pieces(optimizer: Optimizer, index: int) -> Iterator[_Piece]:
    """The first suitable parameter of each dtype of one group."""
    group = optimizer.param_groups[index]
    kind = kind_of(optimizer)
    seen: set[torch.dtype] = set()
    for param in group["params"]:
        grad = param.grad
        if kind is None or grad is None or param.dtype in seen or param.numel() == 0:
            continue
        if obstacle(optimizer, group, param, allow_slow=True) or gradient_obstacle(param, grad):
            continue
        seen.add(param.dtype)
        start = max(0, param.numel() - SAMPLE) // CUT * CUT
        state = {k: v for k, v in optimizer.state.get(param, {}).items() if v is not None}
        piece = _cut(param, start)
        yield _Piece(
            group=index,
            live=param,
            start=start,
            param=piece,
            state={k: _cut(v, start) for k, v in state.items() if k in kind.known},
            reserved={
                key: torch.zeros_like(piece)
                for key in state_keys(kind, group)[0]
                if key not in state
            },
            scalars={
                k: v.detach().to("cpu", copy=True) for k, v in state.items() if k in kind.scalar
            },
            grad=_cut(grad, start),
        )


def _cut(tensor: Tensor, start: int) -> Tensor:
    """A copy on the CPU of the elements from ``start`` on, in memory order."""
    return flatten(tensor)[start:].to("cpu", copy=True)


def _difference(
    piece: _Piece, real: Mapping[str, Any], scalars: Mapping[str, Tensor], lr: float
) -> str | None:
    """The first key in which the replay and the real update differ."""
    pairs = {"param": (piece.param, _cut(piece.live, piece.start))}
    for key, replayed in (piece.state | piece.reserved).items():
        if real.get(key) is not None:
            pairs[key] = (replayed, _cut(real[key], piece.start))
    for key, replayed in scalars.items():
        pairs[key] = (replayed, real[key].detach().cpu().reshape(()))
    exact = _exact(piece.live)
    for key, (replayed, truth) in pairs.items():
        if exact and not _bits_equal(replayed, truth):
            return key
        slip = OF_LR * lr if key == "param" else 1e-4 * float(truth.abs().max())
        if not exact and not _close(replayed, truth, slip):
            return key
    return None


def _exact(live: Tensor) -> bool:
    """Whether the real update ran where its replay runs, so that all bits must agree."""
    return live.device.type == "cpu"


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def _close(a: Tensor, b: Tensor, slip: float) -> bool:
    eps = torch.finfo(a.dtype).eps
    rounding = min(4 * eps, max(RELATIVE, eps))
    return torch.allclose(a.double(), b.double(), rtol=rounding, atol=slip, equal_nan=True)
