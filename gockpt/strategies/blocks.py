"""The blocks of one checkpoint, cut and with their views, made before its first window.

So that opening a window costs the training thread one call with a slice of a list. Made on the
outbox thread as soon as there is a plan, or on the training thread where there was no time for
that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor

from gockpt.agent.protocol import Block
from gockpt.arena import Segment
from gockpt.devices.base import Pair
from gockpt.pace import UNHURRIED, gently
from gockpt.state import CUT
from gockpt.strategies.gradients import Wanted, Wants
from gockpt.strategies.staging import Staging
from gockpt.strategies.views import ParamViews, Views

PORTIONS = 8
"""Most portions that a last window is copied in."""

PORTION_S = 0.005
"""Seconds on the link below which another portion is not worth its message."""


class Blocks:
    """All blocks of a checkpoint in one slot, in the order in which they are captured."""

    def __init__(
        self,
        views: Views,
        *,
        slot: int,
        segment: Segment,
        budgets: Sequence[int],
        piece_bytes: int | None,
        staging: Staging,
    ) -> None:
        """
        Args:
            budgets: elements for each window; the last one takes what is left.
            piece_bytes: no parameter part of a block is larger than this.
        """
        self.views = views
        self.segment = segment
        self.budgets = tuple(budgets)
        self.cuts: list[tuple[int, int, int]] = []
        """(parameter, start, stop) of each block."""
        self.window_ends: list[int] = []
        """The number of blocks up to and including each window."""
        self.pairs: list[Pair] = []
        self.pair_ends: list[int] = []
        """The number of pairs up to and including each block."""
        self.byte_ends: list[int] = []
        self.element_ends: list[int] = []
        self._wants: dict[int, Wants] = {}
        self._scalars: list[list[tuple[str, Tensor]]] = []
        self._staging = staging
        self._cut(budgets, piece_bytes)
        places = views.slot(slot, segment)
        for number, (index, start, stop) in gently(enumerate(self.cuts), pause=UNHURRIED):
            self._add(number, views.params[index], start, stop, places[index])

    def _cut(self, budgets: Sequence[int], piece_bytes: int | None) -> None:
        """Cut the parameters at multiples of 64 elements, window by window."""
        index = start = 0
        params = self.views.params
        for number, budget in enumerate(budgets):
            last = number == len(budgets) - 1
            while index < len(params):
                numel = params[index].numel
                size = numel if piece_bytes is None else _elements(params[index], piece_bytes)
                size = size if last else min(size, budget)
                if start + size < numel:
                    size -= size % CUT
                    if size <= 0:
                        break
                stop = min(numel, start + size)
                self.cuts.append((index, start, stop))
                budget -= stop - start
                index, start = (index + 1, 0) if stop >= numel else (index, stop)
            self.window_ends.append(len(self.cuts))

    def _add(
        self, number: int, param: ParamViews, start: int, stop: int, places: list[Tensor]
    ) -> None:
        whole = start == 0 and stop == param.numel
        scalars = [(key, self._staging.keep(value.dtype)) for key, value in param.scalars]
        self._scalars.append(scalars)
        self.pairs += [
            (place, value.detach().reshape(1))
            for (_, place), (_, value) in zip(scalars, param.scalars, strict=True)
        ]
        for place, part in zip(places, param.parts, strict=True):
            if whole:
                self.pairs.append((place, part.flat))
            else:
                self.pairs.append((place[start:stop], part.flat[start:stop]))
        size = sum(part.itemsize for part in param.parts) * (stop - start)
        self.pair_ends.append(len(self.pairs))
        self.byte_ends.append(size + (self.byte_ends[-1] if self.byte_ends else 0))
        self.element_ends.append(stop - start + (self.element_ends[-1] if self.element_ends else 0))
        self._wants.setdefault(param.live.optimizer_index, Wants()).add(
            Wanted(
                number, param.live, param.live.param, param.live.model_tensor, start, stop, whole
            )
        )

    def __len__(self) -> int:
        return len(self.cuts)

    def pairs_of(self, first: int, last: int) -> list[Pair]:
        """What to copy for the blocks from ``first`` to before ``last``."""
        begin = self.pair_ends[first - 1] if first else 0
        end = self.pair_ends[last - 1] if last else 0
        return self.pairs[begin:end]

    def bytes_of(self, first: int, last: int) -> int:
        """Bytes of their parameters and elementwise state."""
        return _between(self.byte_ends, first, last)

    def whole_blocks(self, first: int, pairs: int) -> int:
        """How many blocks from ``first`` on are complete with this many pairs."""
        begin = self.pair_ends[first - 1] if first else 0
        done = first
        while done < len(self) and self.pair_ends[done] <= begin + pairs:
            done += 1
        return done - first

    def wants(self, optimizer: int) -> Wants:
        """All blocks that this optimizer updates."""
        return self._wants.get(optimizer) or Wants()

    def messages(self, first: int, last: int, version: int) -> list[Block]:
        """What to tell the agent of these blocks, once their copies have arrived."""
        return [
            Block(
                param=self.cuts[number][0],
                start=self.cuts[number][1],
                stop=self.cuts[number][2],
                version=version,
                state=self.views.params[self.cuts[number][0]].state_keys,
                scalars={key: place.item() for key, place in self._scalars[number]},
            )
            for number in gently(range(first, last))
        ]


def portions(byte_ends: Sequence[int], first: int, *, link_rate: float) -> list[int]:
    """Divide the blocks from ``first`` on into stretches of about equal bytes.

    Args:
        byte_ends: bytes up to and including each block.
        link_rate: bytes per second that they will be copied with.

    Returns:
        The number of blocks up to and including each stretch.
    """
    if first == len(byte_ends):
        return []
    begin = byte_ends[first - 1] if first else 0
    left = byte_ends[-1] - begin
    count = max(1, min(PORTIONS, int(left / (link_rate * PORTION_S))))
    ends = {bisect_left(byte_ends, begin + left * n // count) + 1 for n in range(1, count)}
    return [*sorted(end for end in ends if first < end < len(byte_ends)), len(byte_ends)]


def _elements(param: ParamViews, piece_bytes: int) -> int:
    return max(CUT, piece_bytes // param.parts[0].itemsize)


def _between(ends: list[int], first: int, last: int) -> int:
    return (ends[last - 1] if last else 0) - (ends[first - 1] if first else 0)
