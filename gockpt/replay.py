"""Replay: bring blocks of the state from the version they were captured at to the target's.

Runs in the agent (one thread), over views of a slot. What always holds: every number is computed by
torch's own optimizer class, over the elements and in the order of operations of the real update, so
the result has the bits of the real state; nothing outside the blocks that were added is written,
save the gradients given (an update may use them as scratch space).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gockpt.errors import StateError
from gockpt.optim import FLAGS, KINDS, LOOP_GRAIN, Kind
from gockpt.recipe import OptimizerUpdate, revive

PIECE = 1024 * 1024
"""Elements of one tensor given to torch."""

BATCH = 4 * PIECE
"""Elements updated by one ``step()``: enough that Python's share of the time is small."""

WIDENED = BATCH // 4
"""Of these, gradients that are widened first: few enough that they stay in the cache."""


@dataclass(slots=True)
class _Piece:
    """A run of one block, as a parameter of torch's optimizer."""

    param: Tensor
    state: dict[str, Tensor]
    """What the optimizer sees: elementwise views of the slot, and scalars of its own."""
    views: dict[str, Tensor]
    """Where each elementwise key has to be in the end, whether it exists yet or not."""
    start: int
    stop: int


@dataclass(slots=True)
class _Block:
    optimizer: int
    group: int
    pieces: list[_Piece]


@dataclass(slots=True)
class _Engine:
    """One of torch's optimizers, with groups that are set anew for each update."""

    kind: Kind
    optimizer: Optimizer
    step: Callable[[Optimizer], Any]
    widened: dict[torch.dtype, Tensor] = field(default_factory=dict)
    """Scratch memory for gradients sent in 16 bits, by the dtype they are widened to."""


class Replayer:
    """Replays updates over the blocks of one checkpoint.

    Args:
        optimizers: class name and number of groups of each optimizer, in the recipes' order.
        threads: torch's thread count, set in the thread that calls :meth:`apply`.
    """

    def __init__(self, optimizers: Sequence[tuple[str, int]], *, threads: int) -> None:
        self._optimizers = optimizers
        self._engines: dict[int, _Engine] = {}
        self._blocks: list[_Block] = []
        self._threads = threads

    def add(
        self,
        *,
        optimizer: int,
        group: int,
        param: Tensor,
        state: Mapping[str, Tensor],
        reserved: Mapping[str, Tensor],
        scalars: Mapping[str, Tensor],
    ) -> int:
        """Take in a block and return its number.

        Args:
            param: 1-D view of the slot; its length is the block's.
            state: views of the elementwise state that the block has.
            reserved: views for elementwise state that its first gradient may create.
            scalars: its 0-dim state, copied privately.

        Raises:
            StateError: a view of another length or shape than the parameter's, or an optimizer
                that cannot be replayed.
        """
        if optimizer not in self._engines:  # not before: others need not be of a known kind
            self._engines[optimizer] = _engine(*self._optimizers[optimizer])
        views = {**reserved, **state}
        for key, view in views.items():
            if view.shape != param.shape or param.dim() != 1:
                raise StateError(
                    f"state {key!r} has shape {tuple(view.shape)} in a block of "
                    f"{tuple(param.shape)}; this is a defect of gockpt"
                )
        pieces = []
        for start, stop in _cuts(param):
            cut = {key: view[start:stop] for key, view in views.items()}
            had = {key: cut[key] for key in state}
            had |= {key: value.detach().reshape(()).clone() for key, value in scalars.items()}
            pieces.append(_Piece(param[start:stop], had, cut, start, stop))
        self._blocks.append(_Block(optimizer, group, pieces))
        return len(self._blocks) - 1

    def apply(
        self, optimizer: int, update: OptimizerUpdate, items: Iterable[tuple[int, Tensor]]
    ) -> None:
        """Replay one update of one optimizer on the blocks that had a gradient in it.

        Args:
            optimizer: its index.
            update: with all device values filled in.
            items: (block, its 1-D gradient) pairs, each block once; the gradient has the
                parameter's dtype, or a 16-bit one that widens to it exactly. May be overwritten.

        Raises:
            StateError: the update cannot be replayed on these blocks; their state is then of no
                version and the checkpoint has to be given up.
        """
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        engine = self._engines[optimizer]
        _configure(engine, update)
        for batch in _batches(self._pieces(optimizer, items)):
            self._step(engine, update, batch)

    def scalars(self, block: int) -> dict[str, Tensor]:
        """The block's 0-dim state as it stands now, on which all its pieces agree.

        Raises:
            StateError: they don't.
        """
        found = self._blocks[block]
        keys = self._engines[found.optimizer].kind.scalar
        first, *others = [
            {key: piece.state[key] for key in keys if key in piece.state} for piece in found.pieces
        ]
        for other in others:
            if other.keys() != first.keys() or any(first[k].ne(v) for k, v in other.items()):
                raise StateError(f"pieces of block {block} differ in their 0-dim state")
        return first

    def has_state(self, block: int) -> frozenset[str]:
        """The elementwise keys that the block has by now."""
        found = self._blocks[block]
        return frozenset(found.pieces[0].state.keys() & found.pieces[0].views.keys())

    def _pieces(
        self, optimizer: int, items: Iterable[tuple[int, Tensor]]
    ) -> Iterable[tuple[int, _Piece, Tensor]]:
        for number, grad in items:
            block = self._blocks[number]
            if block.optimizer != optimizer or grad.numel() != block.pieces[-1].stop:
                raise StateError(
                    f"a gradient of {grad.numel()} elements for optimizer {optimizer} "
                    f"does not belong to block {number}"
                )
            for piece in block.pieces:
                yield block.group, piece, grad[piece.start : piece.stop]

    def _step(
        self, engine: _Engine, update: OptimizerUpdate, batch: list[tuple[int, _Piece, Tensor]]
    ) -> None:
        optimizer = engine.optimizer
        for emptied in optimizer.param_groups:
            emptied["params"] = []
        optimizer.state.clear()
        for (group, piece, _), grad in zip(batch, _widen(engine, batch), strict=True):
            _check(engine, update, group, piece)
            piece.param.grad = grad
            optimizer.param_groups[group]["params"].append(piece.param)
            if piece.state:
                optimizer.state[piece.param] = piece.state
        every_group = optimizer.param_groups
        # Groups of which nothing was captured yet have no recipe, so torch must not look at them.
        optimizer.param_groups = [group for group in every_group if group["params"]]
        try:
            with torch.no_grad():
                engine.step(optimizer)
        finally:
            optimizer.param_groups = every_group
        for _, piece, _ in batch:
            piece.param.grad = None
            state = piece.state or optimizer.state.get(piece.param, {})
            piece.state = _adopt(engine.kind, piece, state)


def _engine(name: str, groups: int) -> _Engine:
    kind = KINDS.get(name)
    if kind is None:
        raise StateError(f"{name} is no optimizer that can be replayed")
    # Made as unpickling makes it: the constructor would import torch's compiler, which costs
    # seconds and a hundred megabytes. And the bare update is taken: hooks that a user registered
    # for all optimizers must not see a replay.
    optimizer = kind.cls.__new__(kind.cls)
    optimizer.__setstate__(
        {
            "defaults": {},
            "state": defaultdict(dict),
            "param_groups": [{"params": [], **dict.fromkeys(FLAGS, False)} for _ in range(groups)],
        }
    )
    return _Engine(kind=kind, optimizer=optimizer, step=inspect.unwrap(kind.cls.step))


def _configure(engine: _Engine, update: OptimizerUpdate) -> None:
    """Make the optimizer compute what it computed in this update."""
    optimizer = engine.optimizer
    if update.cls != engine.kind.name or len(update.groups) != len(optimizer.param_groups):
        raise StateError(
            f"a recipe of {update.cls} with {len(update.groups)} groups for "
            f"{engine.kind.name} with {len(optimizer.param_groups)}"
        )
    optimizer.defaults.update({key: revive(value) for key, value in update.defaults.items()})
    for group, taken in zip(optimizer.param_groups, update.groups, strict=True):
        if taken is None:
            continue
        group.update({key: revive(value) for key, value in taken.hyper.items()})
        group["foreach"] = taken.implementation == "foreach"
        group["fused"] = taken.implementation == "fused"
    for name in ("grad_scale", "found_inf"):
        value = getattr(update, name)
        setattr(optimizer, name, None if value is None else value.tensor())


def _check(engine: _Engine, update: OptimizerUpdate, group: int, piece: _Piece) -> None:
    taken = update.groups[group]
    if taken is None:
        raise StateError(f"the recipe lacks group {group}, of which a block was captured early")
    if (
        update.skipped
        and engine.kind.name == "SGD"
        and taken.hyper["momentum"] != 0
        and "momentum_buffer" not in piece.state
    ):
        raise StateError(
            "fused SGD skipped its very first update, which leaves its momentum "
            "uninitialised in torch itself; save in one window"
        )


def _cuts(param: Tensor) -> Iterable[tuple[int, int]]:
    # A 16-bit loop must not be shared by threads: see optim._loop_repeats.
    size = LOOP_GRAIN if param.dtype.itemsize == 2 else PIECE
    total = param.numel()
    for start in range(0, max(total, 1), size):
        yield start, min(start + size, total)


def _batches(
    pieces: Iterable[tuple[int, _Piece, Tensor]],
) -> Iterable[list[tuple[int, _Piece, Tensor]]]:
    batch: list[tuple[int, _Piece, Tensor]] = []
    room = BATCH
    for entry in pieces:
        _, piece, grad = entry
        size = grad.numel() * (1 if grad.dtype == piece.param.dtype else BATCH // WIDENED)
        if batch and size > room:
            yield batch
            batch, room = [], BATCH
        batch.append(entry)
        room -= size
    if batch:
        yield batch


def _widen(engine: _Engine, batch: list[tuple[int, _Piece, Tensor]]) -> Iterable[Tensor]:
    """The gradients in their parameters' dtype."""
    used: dict[torch.dtype, int] = {}
    for _, piece, grad in batch:
        dtype = piece.param.dtype
        if grad.dtype == dtype:
            yield grad
            continue
        if grad.dtype.itemsize != 2 or dtype not in (torch.float32, torch.float64):
            raise StateError(f"a {grad.dtype} gradient does not widen to {dtype} exactly")
        if dtype not in engine.widened:
            engine.widened[dtype] = torch.empty(WIDENED, dtype=dtype)
        start = used.get(dtype, 0)
        used[dtype] = start + grad.numel()
        yield engine.widened[dtype][start : start + grad.numel()].copy_(grad)


def _adopt(kind: Kind, piece: _Piece, state: dict[str, Any]) -> dict[str, Tensor]:
    """Move state that the update created, or replaced, to where it belongs in the slot."""
    views, scalar = piece.views, kind.scalar
    if all(views.get(key) is value or key in scalar for key, value in state.items()):
        return state
    adopted: dict[str, Tensor] = {}
    for key, value in state.items():
        if value is None:
            continue
        if key in kind.scalar:
            adopted[key] = value
            continue
        view = piece.views.get(key)
        if view is None or view.dtype != value.dtype:
            raise StateError(
                f"an update created state {key!r}, for which the image has no room; "
                "save in one window"
            )
        if value is not view:
            view.copy_(value)
        adopted[key] = view
    return adopted
