"""The plan of a checkpoint: over how many windows, how much in each, and what it will cost.

Pure functions of what is known (:mod:`gockpt.situation`), by the model of :mod:`gockpt.course`;
called on the training thread before a capture, and by ``gockpt plan``. What always holds: the
target is fixed elsewhere and never moves, the plan only says how early the first window opens; the
budgets add up to all parameters.

Of the possible K the first is taken at which nothing stalls; what its windows have to spare is left
out of the first one, because everything captured later costs fewer gradients. Where there is no
such K, the one with the least stall is taken, and the note says what is in the way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gockpt.course import Course, fill
from gockpt.situation import Estimates, Situation

__all__ = ["Estimates", "Plan", "Situation", "one_window_stall", "plan"]

MAX_WINDOWS = 64
"""More windows than this cost more in gradients than they can ever save."""

_LIMITS: tuple[tuple[str, Any, str], ...] = (
    ("write_rate", None, "storage does not keep up with a checkpoint every {s.every} steps"),
    ("headroom", None, "the device has no memory for the gradients of more parameters"),
    ("memory_limit", None, "more windows need more host memory than the limit"),
    ("ring", None, "the ring has no room for more gradients until the replay has used them"),
    ("gradients", "fresh", "gradients are {s.gradients} before more of them can be copied"),
    ("replay_rate", None, "the replay does not keep up with a checkpoint every {s.every} steps"),
    ("every", None, "every={s.every} leaves no time for more windows"),
)
"""What may be in the way: a field, the value that lifts it, what to say of it."""

INDIFFERENT = 0.01
"""Predicted stalls closer than this share of the one-window stall count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one checkpoint is taken, with the costs predicted for it."""

    windows: int
    """K. The first window opens K − 1 steps before the target."""
    budgets: tuple[int, ...]
    """Parameter elements to capture in each window; they add up to all of them."""
    stall_s: float
    """Seconds for which training is held up, for each checkpoint."""
    hides: bool
    """Nothing is expected to stall."""
    state_bytes: int
    gradient_bytes: int
    traffic_factor: float
    """All bytes sent, over those of the state."""
    ring_bytes: int
    """Host memory for gradients that have arrived and are not yet replayed."""
    burst_bytes: int
    """The gradients that follow the largest update, of all that was captured by then."""
    held_bytes: int
    """Device memory that gradients take in the next forward, at the most."""
    replay_s: float
    """Seconds from the end of the last window until the replay is done."""
    memory_bytes: int
    """Host memory of slots and ring."""
    note: str
    """Why this K, or what keeps a better one away: one line for a person."""


def one_window_stall(s: Situation) -> float:
    """Seconds of stall when all state is copied in one window, as ``async-o`` does."""
    return max(0.0, s.sent_bytes - s.link_rate * s.window_s) / s.alone


def plan(s: Situation, *, windows: int | None = None) -> Plan:
    """The plan with the least predicted stall within the limits, then with the least traffic.

    Takes about 1 ms.

    Args:
        windows: force this K (tests, experiments); what it breaks is predicted and noted.

    Raises:
        ValueError: ``windows`` is below one.
    """
    if windows is not None:
        if windows < 1:
            raise ValueError("windows must be at least 1")
        forced = _least(s, [fill(s, windows, timely=timely) for timely in _timely(s)])
        forced = _even(forced) if forced.fits() else forced
        return _plan(forced, _note(s, forced, forced=True))
    chosen = _choose(s)
    return _plan(chosen, _note(s, chosen, forced=False))


def _choose(s: Situation) -> Course:
    options = [option for timely in _timely(s) for option in _options(s, timely)]
    affordable = [o for o in options if s.memory_limit is None or o.memory() <= s.memory_limit]
    return _least(s, affordable or options[:1])


def _timely(s: Situation) -> tuple[bool, ...]:
    # Without a deadline all gradients are in time.
    return (True,) if math.isinf(s.grace_s) else (True, False)


def _options(s: Situation, timely: bool) -> Iterator[Course]:
    """The courses to choose from: K = 1, 2, … until nothing stalls or nothing changes any more."""
    most = min(s.every or MAX_WINDOWS, MAX_WINDOWS)
    longest = fill(s, most, timely=timely)
    for k in range(1, most + 1):
        course = replace(longest, captured=longest.captured[:k])
        if course.fits():
            yield _late(course)
            return
        yield course
        gained = course.captured[-1] - course.captured[-2] if k > 1 else math.inf
        if gained < s.params / 10_000:
            return


def _least(s: Situation, options: list[Course]) -> Course:
    """The course with the least stall; of nearly equal ones that with the least traffic."""
    equal = INDIFFERENT * one_window_stall(s)
    near = min(option.stall() for option in options) + equal
    # Waiting for a slot is not the windows' doing, where none of them can help it.
    wait = min(option.wait() for option in options) + equal
    clean = [option for option in options if option.fits() and option.wait() <= wait]
    return min(clean or [o for o in options if o.stall() <= near], key=lambda o: o.traffic)


def _late(course: Course) -> Course:
    """The same windows with the least in the first at which it still fits: the least traffic."""
    if course.windows == 1:
        return course

    def make(first: float) -> Course:
        return fill(course.s, course.windows, timely=course.timely, first=first)

    return make(_least_number(course.captured[1], lambda first: make(first).fits()))


def _even(course: Course) -> Course:
    """The same windows with the least in any of them.

    For a number of windows that was forced: there may be more than are needed, and each of them is
    to have its part.
    """

    def make(each: float) -> Course:
        return fill(course.s, course.windows, timely=course.timely, each=each)

    def enough(each: float) -> bool:
        tried = make(each)
        return tried.fits() and course.s.params - tried.captured[-1] <= each

    return make(_least_number(course.s.params, enough))


def _least_number(most: float, enough: Callable[[float], bool]) -> float:
    """The least number that is enough, to 5 digits; ``most`` is."""
    low, high = 0.0, most
    for _ in range(16):
        middle = (low + high) / 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def _plan(course: Course, note: str) -> Plan:
    s = course.s
    edges = [round(captured) for captured in course.captured] + [s.params]
    gradients = s.grad_bytes * course.traffic
    stall = course.stall()
    return Plan(
        windows=course.windows,
        budgets=tuple(after - before for before, after in itertools.pairwise(edges)),
        stall_s=stall,
        hides=stall == 0,
        state_bytes=math.ceil(s.sent_bytes),
        gradient_bytes=math.ceil(gradients),
        traffic_factor=1 + gradients / s.sent_bytes if s.sent_bytes else 1.0,
        ring_bytes=math.ceil(course.ring()),
        burst_bytes=math.ceil(s.grad_bytes * course.captured[-1]),
        held_bytes=math.ceil(course.held()),
        replay_s=course.tail(),
        memory_bytes=math.ceil(course.memory()),
        note=note,
    )


def _note(s: Situation, chosen: Course, *, forced: bool) -> str:
    """Why this K; where it stalls, what keeps it from not stalling."""
    if s.memory_limit is not None and chosen.memory() > s.memory_limit:
        return (
            f"needs {_gb(chosen.memory())} of host memory but {_gb(s.memory_limit)} is the limit; "
            "use fewer slots, or checkpoint a smaller model on this host"
        )
    many = f"{chosen.windows} window{'s' if chosen.windows > 1 else ''}"
    how = f"{many}, as forced" if forced else many
    stall = chosen.stall()
    if chosen.fits() and not chosen.wait():
        return f"{how}: everything is hidden behind forward and backward"
    if stall == 0:
        return f"{how}: everything is just hidden, without the planned slack"
    return f"{how}: stalls {stall:.3f} s, {_obstacle(s, chosen, forced)}"


def _obstacle(s: Situation, chosen: Course, forced: bool) -> str:
    """What is in the way of a plan without stall."""
    if forced:
        return "as no other number was considered"
    window = s.share * s.link_rate * s.window_s
    if s.whole_bytes > window:
        return f"as {_gb(s.whole_bytes)} cannot be replayed and must be copied in one window"
    limits = [limit for limit in _LIMITS if getattr(s, limit[0]) != limit[1]]
    for name, lifted, text in limits:
        if _choose(replace(s, **{name: lifted})).stall() == 0:
            return f"as {text.format(s=s)}"
    if limits and _choose(replace(s, **{name: lifted for name, lifted, _ in limits})).stall() == 0:
        return f"as {' and '.join(text.format(s=s) for _, _, text in limits)}"
    return (
        f"as the gradients of all parameters ({_gb(s.grad_bytes * s.params)}) and the state do not "
        f"fit in windows of {_gb(window)}"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
