"""What the suites reckon with: a job's times beforehand, figures of a finished bench. Pure.

What always holds: nothing here is measured. What comes out of a formula is called predicted or
derived wherever it is shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from gockpt.cli.plan import situation_of
from gockpt.cli.task import Task, modelled_work
from gockpt.plan import Plan, one_window_stall, plan
from gockpt.workloads import param_count

Json = dict[str, Any]

SPARE = 1.15
"""Interval over the seconds that the disk takes, so that no strategy waits for it."""

WITHOUT_PROFILE = 12
"""Steps between checkpoints where no profile says how fast the disk is, as in the default job."""

GRAIN = 64
"""Tokens that a part of a sequence is a multiple of."""

AROUND_S = 10.0
"""About what a row takes besides its loop: to start, drain, read the checkpoints back."""


def step_s(task: Task) -> float | None:
    """Modelled seconds of a step; None where nothing is emulated."""
    work = modelled_work(task)
    return None if work is None else work.forward_s + work.backward_s + work.update_s


def interval_for(task: Task, *, least: int, steps: int | None) -> int:
    """The fewest steps between checkpoints, and at least this many, at which the disk keeps up.

    Args:
        steps: of the bench, if the user said so; two checkpoints must then fit in.
    """
    interval = max(least, _disk_keeps_up(task))
    return interval if steps is None else min(interval, max(1, steps // 2))


def _disk_keeps_up(task: Task) -> int:
    profile, step = task.profile, step_s(task)
    if profile is None or step is None:
        return WITHOUT_PROFILE
    write_s = param_count(task.preset) * task.number_format.state_bytes / profile.ssd_write
    return math.ceil(SPARE * write_s / step)


def seconds_of(task: Task, *, rows: int, steps: int) -> float | None:
    """About how long a bench takes; None where nobody knows beforehand."""
    step = step_s(task)
    return None if step is None else (rows + 1) * AROUND_S + rows * (steps + 1) * step


def with_tokens(task: Task, tokens: int) -> Task:
    """The task with other tokens a step; times calibrated for its usual job then do not hold."""
    return replace(task, tokens=tokens, calibrated=False)


def tokens_for(task: Task, ratio: float) -> int:
    """Tokens of a step at which :func:`state_to_window` comes closest to this: whole sequences, or
    a part of one."""
    context = task.preset.context
    sequences = int(state_to_window(with_tokens(task, context)) / ratio)
    choice: list[int] = [
        *range(GRAIN, context, GRAIN),
        *(context * n for n in (sequences, sequences + 1) if n),
    ]

    def miss(tokens: int) -> float:
        return abs(math.log(state_to_window(with_tokens(task, tokens)) / ratio))

    return min(choice, key=miss)


def state_to_window(task: Task) -> float:
    """s·N/B ÷ T: how many windows the state alone would fill, at the link's rate in them."""
    s = situation_of(task, every=None)
    return s.sent_bytes / s.link_rate / s.window_s


def planned(task: Task, interval: int) -> Plan:
    """What ``gockpt plan`` says of it."""
    return plan(situation_of(task, every=interval))


def predicted_stall_s(task: Task, strategy: str, interval: int) -> float | None:
    """Seconds of stall that the cost model expects; None where it knows nothing of the strategy."""
    s = situation_of(task, every=interval)
    if strategy == "async":
        return s.sent_bytes / s.alone
    if strategy == "async-o":
        return one_window_stall(s)
    return planned(task, interval).stall_s if strategy == "gockpt" else None


# -- a finished bench ------------------------------------------------------------------------------


def strategies_of(document: Mapping[str, Any]) -> list[Json]:
    """The rows of a bench but for those of ``none``."""
    return [one for one in document["results"] if one["strategy"] != "none"]


def none_step_s(document: Mapping[str, Any]) -> float | None:
    """Seconds of a step without checkpoints: the mean of the rows of ``none`` that count."""
    rates = [
        one["tokens_per_s"]["loop"]
        for one in document["results"]
        if one["strategy"] == "none" and one["valid"]
    ]
    tokens: int = document["workload"]["tokens_per_step"]
    return tokens / statistics.fmean(rates) if rates else None


def throughput_at(interval: int, excess_s: float | None, step: float | None) -> float | None:
    """Throughput relative to none, of a stall measured at another interval. Derived: it holds while
    no checkpoint waits for the one before."""
    if excess_s is None or step is None:
        return None
    return 1 / (1 + excess_s / (interval * step))


def difference(ours: float | None, theirs: float | None) -> float | None:
    """Ours − theirs, where both are known."""
    return None if ours is None or theirs is None else ours - theirs
