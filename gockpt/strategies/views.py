"""Flat views of everything that a capture copies, made once and used in every window.

Making a view costs microseconds, a model has thousands of them, and the training thread must not
spend milliseconds in a window. So they are kept until the optimizer's state tensors change their
identity. Runs on the training thread.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from gockpt import fingerprint
from gockpt.agent.protocol import Structure
from gockpt.arena import Segment
from gockpt.fingerprint import Fingerprinter
from gockpt.inventory import Inventory, LiveParam
from gockpt.optim import implementation
from gockpt.pace import UNHURRIED, gently
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
        self._states = [(opt, opt.state, len(opt.state)) for opt in inventory.optimizers.values()]
        self._dict_ids: list[int] = self._state_ids()
        lives = [*inventory.replayable, *inventory.others]
        self._held = [(live, state) for live in lives if (state := live.state)]
        self._probes = self._held[:1] + self._held[-1:]
        self._dicts = [state for _, state in self._held]
        self._values: list[int] = self._value_ids()
        entries = inventory.layout.entries
        self.params: list[ParamViews] = []
        both = zip(inventory.layout.params, inventory.replayable, strict=True)
        for layout, live in gently(both, pause=UNHURRIED):
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
        self._params = [live.param for live in inventory.replayable]
        self._addresses = list(map(Tensor.data_ptr, self._params))
        self.guards = _guards(lives)
        self.present = list(inventory.present())
        self.buffers = buffers = inventory.buffers()
        covered = inventory.layout.of_blocks() | buffers.keys()
        self.present_indices = [index for index, _ in self.present]
        self.whole = [(index, tensor) for index, tensor in self.present if index not in covered]
        """Neither made of blocks nor a buffer."""
        self._places = self._addresses_of_whole()
        lasting = [(index, tensor) for index, tensor in self.present if index not in buffers]
        place = fingerprint.home([tensor for _, tensor in self.present])
        self.fingerprinter = Fingerprinter(inventory.layout, lasting, place)
        self._slots: dict[int, tuple[Segment, list[list[Tensor]]]] = {}
        # Made beside the training, they may have seen half of a change: then they are good for
        # nothing.
        self._torn = self._state_ids() != self._dict_ids or self._value_ids() != self._values

    def _value_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._dicts))))

    def _state_ids(self) -> list[int]:
        return [i for opt, _, _ in self._states for i in map(id, opt.state.values())]

    def stale(self) -> bool:
        """Whether they must be made anew: a whole look, for the first and the last window."""
        return (
            self._torn
            or self.suspect()
            or self._state_ids() != self._dict_ids
            or self._value_ids() != self._values
            or list(map(Tensor.data_ptr, self._params)) != self._addresses
            or self._addresses_of_whole() != self._places
        )

    def _addresses_of_whole(self) -> list[int]:
        return [tensor.data_ptr() for _, tensor in self.whole]

    def suspect(self) -> bool:
        """Whether they may have to be made anew: a cheap look, for every window."""
        return any(
            opt.state is not state or len(state) != size for opt, state, size in self._states
        ) or any(live.state is not state for live, state in self._probes)

    def replaced(self) -> str | None:
        """What of the state that there was is another one now; more of it does not count."""
        if (
            any(live.state is not state for live, state in self._held)
            or self._value_ids()[: len(self._values)] != self._values
        ):
            return "optimizer state was replaced outside of its optimizer"
        both = zip(self.inventory.replayable, self._addresses, strict=True)
        moved = next((live.name for live, there in both if live.param.data_ptr() != there), None)
        return moved and f"the memory of {moved!r} was replaced outside of its optimizer"

    def slot(self, number: int, segment: Segment) -> list[list[Tensor]]:
        """Views of a slot: for each parameter one for each of its parts."""
        found = self._slots.get(number)
        if found is None or found[0] is not segment:
            made = [
                [segment.view(p.offset, p.flat.numel(), p.flat.dtype) for p in param.parts]
                for param in gently(self.params, pause=UNHURRIED)
            ]
            found = self._slots[number] = (segment, made)
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
    lives_of: dict[int, list[LiveParam]] = {}
    for live in lives:
        lives_of.setdefault(live.optimizer_index, []).append(live)
        params.setdefault(live.optimizer_index, []).append((live.name, live.param))
        state.setdefault(live.optimizer_index, []).extend(
            # Not 0-dim state: even a fused update counts it, and its value is sent with each block.
            value
            for value in live.state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        )
    still = {index: all(map(_is_fused, lives_of[index])) for index in params}
    return {
        index: Guard(found, state[index], still=still[index]) for index, found in params.items()
    }


def _is_fused(live: LiveParam) -> bool:
    return live.obstacle is None and implementation(live.group, live.param.device.type) == "fused"
