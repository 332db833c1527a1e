"""The cost model of a checkpoint: one way through its windows, and what it stalls and takes.

Pure functions, used by :mod:`gockpt.plan` alone.

The model. In a window (forward and backward, T seconds) the link moves C = φ·B·T bytes: first what
is left of the gradients of everything captured before, then state. With S_w parameters captured
before window w, and gradients that also use the update (U seconds):

    b_w = (C − max(0, g·S_w − φ·B·U)) / s,    S_{w+1} = S_w + b_w,    K = first count with S_K ≥ N

The last window is planned with slack, because only what is late *there* holds up training. Stall
also comes from gradients that miss their deadline or find the ring full, and where the next
checkpoint finds no slot because replay or writing does not keep up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from gockpt.situation import Situation

ROUNDING = 1e-9
"""Relative error of the arithmetic here; a window that is full to the last byte still fits."""

RING_SHARE = 0.9
"""Of the ring, to be planned with: pieces lie whole and in order, and leave gaps where it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How much is captured before each of K windows.

    Attributes:
        timely: only so much is captured that its gradients meet their deadline; if False, what is
            late is stall.
        captured: S_0 … S_{K−1}, in parameters; the last window takes the rest.
    """

    s: Situation
    timely: bool
    captured: tuple[float, ...]

    @property
    def windows(self) -> int:
        """K."""
        return len(self.captured)

    @property
    def traffic(self) -> float:
        """Gradients sent, in parameters."""
        return sum(self.captured[1:])

    def fits(self) -> bool:
        """Whether each window holds what is planned for it, the last with slack."""
        s, rate, most = self.s, self.s.share * self.s.link_rate, self.captured[-1]
        room = (1 - s.slack) * rate * s.window_s
        in_time = s.grad_bytes * most <= rate * s.grace_s * (1 + ROUNDING)
        return (
            in_time
            and self._last_window(s.share) <= room * (1 + ROUNDING)
            and not self._levels().waited_s
        )

    def stall(self) -> float:
        """Seconds of stall to expect, with all of the link at work and no slack."""
        s = self.s
        late = sum(
            max(0.0, s.grad_bytes * captured - s.link_rate * s.grace_s)
            for captured in self.captured[1:]
        )
        last = max(0.0, self._last_window(1.0) - s.link_rate * s.window_s)
        return (late + last) / s.alone + self._levels().waited_s + self.wait()

    def wait(self) -> float:
        """Seconds of it for which the next checkpoint waits for a slot.

        The newest consistent slot is never taken, so that of n slots n − 1 must be through the
        replay, and the one to be taken written, when the interval has passed that often. A window
        opens without waiting where there is no slot; only the last one waits, at the target.
        """
        s = self.s
        if s.every is None:
            return 0.0
        step = s.window_s + s.update_s
        interval = s.every * step
        consistent = s.window_s + self.tail()
        write = 0.0 if s.write_rate is None else s.image / s.write_rate
        return max(
            0.0,
            consistent - max(1, s.slots - 1) * interval,
            consistent + write - s.slots * interval,
            write - interval,
        )

    def tail(self) -> float:
        """Seconds from the end of the last window until all is replayed."""
        rate = self.s.replay_rate
        return 0.0 if rate is None else self._levels().end / (self.s.grad_bytes * rate)

    def ring(self) -> float:
        """Bytes of the gradient ring."""
        if self.windows == 1:
            return 0.0
        return self._levels().peak if self.s.ring is None else float(self.s.ring)

    def memory(self) -> float:
        """Host bytes of slots and ring."""
        return self.s.slots * self.s.image + self.ring()

    def held(self) -> float:
        """Device bytes that gradients take in the next forward, at the most."""
        if self.s.gradients != "fresh":
            return 0.0
        return _after_update(self.s, self.captured[-1], self.s.share)

    def _last_window(self, share: float) -> float:
        """Bytes to send in the last window."""
        s, before = self.s, self.captured[-1]
        return s.state_bytes * (s.params - before) + s.whole_bytes + _leftover(s, before, share)

    def _levels(self) -> _Levels:
        """How full the ring gets.

        Each burst arrives at the link's rate from the start of an update, and can be replayed when
        all of it is there; what was there before is replayed meanwhile, R updates of g bytes a
        second. A burst that does not fit waits for that, and the state behind it too.
        """
        s = self.s
        size = math.inf if s.ring is None else s.ring * (1 + ROUNDING)
        peak = level = waited = 0.0
        for captured in self.captured[1:]:
            high, end = _after_burst(s, level, s.grad_bytes * captured)
            excess = max(0.0, high - size)
            waited += excess / _drain(s)
            peak = max(peak, high - excess)
            level = max(0.0, end - excess)
        return _Levels(peak, level, waited)


class _Levels(NamedTuple):
    """Bytes in the ring: the most, and when the last window ends; seconds waited for room."""

    peak: float
    end: float
    waited_s: float


def fill(
    s: Situation, windows: int, *, timely: bool, first: float = math.inf, each: float = math.inf
) -> Course:
    """Fill each window but the last as far as the share of the link, and of the ring, allows.

    Args:
        first: capture at most this many parameters in the first window,
        each: and this many in each.
    """
    rate = s.share * s.link_rate
    limit = min(s.params, _most_captured(s, timely))
    captured, level = [0.0], 0.0
    for window in range(windows - 1):
        before = captured[-1]
        room = max(0.0, rate * s.window_s - _leftover(s, before, s.share))
        budget = min(room / s.state_bytes, each, first if window == 0 else math.inf)
        upto = min(before + budget, limit, _room_in_ring(s, level) / s.grad_bytes)
        captured.append(max(before, upto))
        _, level = _after_burst(s, level, s.grad_bytes * captured[-1])
    return Course(s=s, timely=timely, captured=tuple(captured))


def _drain(s: Situation) -> float:
    """Bytes of gradients that the replay uses up in a second."""
    return math.inf if s.replay_rate is None else s.grad_bytes * s.replay_rate


def _after_burst(s: Situation, level: float, burst: float) -> tuple[float, float]:
    """Bytes in the ring when all of a burst is there, and when the window after it ends."""
    arriving = min(burst / s.link_rate, s.update_s + s.window_s)
    high = burst + max(0.0, level - _used(s, arriving))
    return high, max(0.0, high - _used(s, s.update_s + s.window_s - arriving))


def _used(s: Situation, seconds: float) -> float:
    """Bytes of gradients that the replay uses up in this time, if there are any."""
    return _drain(s) * seconds if seconds else 0.0


def _filling(s: Situation) -> float:
    """How much fuller the ring gets while a burst arrives, for each byte of it."""
    return max(0.0, 1 - _drain(s) / s.link_rate)


def _room_in_ring(s: Situation, level: float) -> float:
    """Bytes of the largest burst that fits, with so much in the ring already."""
    if s.ring is None:
        return math.inf
    room, filling = RING_SHARE * s.ring, _filling(s)
    return min(room, max(0.0, room - level) / filling) if filling else room


def _most_captured(s: Situation, timely: bool) -> float:
    """How many parameters may be captured while gradients still have to follow."""
    rate = s.share * s.link_rate
    in_memory = math.inf if s.headroom is None else s.headroom + rate * s.update_s
    in_time = rate * s.grace_s if timely else math.inf
    return min(in_memory, in_time) / s.grad_bytes


def _after_update(s: Situation, captured: float, share: float) -> float:
    """Bytes of gradients that do not go during the update."""
    return max(0.0, s.grad_bytes * captured - share * s.link_rate * s.update_s)


def _leftover(s: Situation, captured: float, share: float) -> float:
    """Bytes of gradients that go in the window after the update; what is later still stalls."""
    in_window = share * s.link_rate * max(0.0, s.grace_s - s.update_s)
    return min(_after_update(s, captured, share), in_window)
