"""Flat views of everything that a capture copies, made once and used in every window.

Making a view costs microseconds, a model has thousands of them, and the training thread must not
spend milliseconds in a window. So they are kept until the optimizer's state tensors change their
identity. Runs on the training thread.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor

from gockpt.agent.protocol import Structure
from gockpt.arena import Segment
from gockpt.fingerprint import Fingerprinter
from gockpt.inventory import Inventory, LiveParam
from gockpt.state import flatten
from gockpt.strategies.guard import Guard


@dataclass(frozen=True, slots=True)
class Part:
    """The parameter itself, or one elementwise state tensor of it."""

    offset: int
    """Of its first byte in the image."""
    itemsize: int
    tensor: Tensor
    flat: Tensor


@dataclass(frozen=True, slots=True)
class ParamViews:
    """One replayable parameter with the state that it has."""

    live: LiveParam
    numel: int
    parts: tuple[Part, ...]
    state_keys: tuple[str, ...]
    scalars: tuple[tuple[str, Tensor], ...]


class Views:
    """All views for one structure of model and optimizers."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.structure = _structure(inventory)
        entries = inventory.layout.entries
        self.params: list[ParamViews] = []
        for layout, live in zip(inventory.layout.params, inventory.replayable, strict=True):
            state = live.state
            keys = tuple(key for key in layout.state if isinstance(state.get(key), Tensor))
            indices = [(layout.param, live.param)] + [(layout.state[k], state[k]) for k in keys]
            self.params.append(
                ParamViews(
                    live=live,
                    numel=live.param.numel(),
                    parts=tuple(
                        Part(entries[i].offset, t.element_size(), t, flatten(t)) for i, t in indices
                    ),
                    state_keys=keys,
                    scalars=tuple(
                        (key, value)
                        for key in layout.scalars
                        if isinstance(value := state.get(key), Tensor)
                    ),
                )
            )
        lives = [*inventory.replayable, *inventory.others]
        self._states = [(opt, len(opt.state)) for opt in inventory.optimizers.values()]
        self._held = [(live, state) for live in lives if (state := live.state)]
        self._values: list[int] = self._value_ids()
        self._flats = [part.flat.data_ptr() for param in self.params for part in param.parts]
        self._tensors = [part.tensor for param in self.params for part in param.parts]
        self.guards = _guards(lives)
        self.present = list(inventory.present())
        covered = {
            index
            for param in inventory.layout.params
            for index in (
                param.param,
                param.derived,
                *param.state.values(),
                *param.scalars.values(),
            )
        }
        buffers = inventory.buffers()
        covered.update(buffers)
        self.whole = [(index, tensor) for index, tensor in self.present if index not in covered]
        """Neither made of blocks nor a buffer."""
        lasting = [(index, tensor) for index, tensor in self.present if index not in buffers]
        self.fingerprinter = Fingerprinter(inventory.layout, lasting)
        self._slots: dict[int, tuple[int, list[list[Tensor]]]] = {}

    def _value_ids(self) -> list[int]:
        return [id(value) for _, state in self._held for value in state.values()]

    def stale(self) -> bool:
        """Whether they must be made anew."""
        return (
            self.replaced()
            or any(len(opt.state) != size for opt, size in self._states)
            or self._value_ids() != self._values
            or [tensor.data_ptr() for tensor in self._tensors] != self._flats
        )

    def replaced(self) -> bool:
        """Whether state that there was is no longer what it was; more of it does not count."""
        return (
            any(live.state is not state for live, state in self._held)
            or self._value_ids()[: len(self._values)] != self._values
        )

    def slot(self, number: int, segment: Segment) -> list[list[Tensor]]:
        """Views of a slot: for each parameter one for each of its parts."""
        found = self._slots.get(number)
        if found is None or found[0] != id(segment):
            made = [
                [segment.view(p.offset, p.flat.numel(), p.flat.dtype) for p in param.parts]
                for param in self.params
            ]
            found = self._slots[number] = (id(segment), made)
        return found[1]


_numbers = itertools.count(1)


def _structure(inventory: Inventory) -> Structure:
    replayed = inventory.optimizers.values() if inventory.replayable else ()
    return Structure(
        number=next(_numbers),
        layout=inventory.layout,
        optimizers=[(type(one).__name__, len(one.param_groups)) for one in replayed],
    )


def _guards(lives: list[LiveParam]) -> dict[int, Guard]:
    """One guard for each optimizer, over all that it updates."""
    params: dict[int, list[tuple[str, Tensor]]] = {}
    state: dict[int, list[Tensor]] = {}
    for live in lives:
        params.setdefault(live.optimizer_index, []).append((live.name, live.param))
        state.setdefault(live.optimizer_index, []).extend(
            value for value in live.state.values() if isinstance(value, Tensor)
        )
    return {index: Guard(found, state[index]) for index, found in params.items()}
