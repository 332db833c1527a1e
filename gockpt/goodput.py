"""What is left of the time as useful work, where training dies now and then.

Pure functions; used for the table of ``crash-test`` and for predictions. Times are seconds of the
wall clock.
"""

from __future__ import annotations

import math


def goodput(mtbf: float, lost_s: float, recovery_s: float) -> float:
    """Share of the time that is useful work, where something dies every ``mtbf`` seconds.

    Args:
        lost_s: work that is done again after a crash.
        recovery_s: from the crash to the first new step.
    """
    return max(0.0, mtbf - lost_s) / (mtbf + recovery_s)


def expected_goodput(
    mtbf: float, *, interval_s: float, stall_s: float, lag_s: float, recovery_s: float
) -> float:
    """:func:`goodput` of a training that saves at an interval, the cost of saving included.

    A crash comes at any moment of an interval alike, so half of it is lost on average, and with it
    what was trained while the newest checkpoint was not yet durable. Of the rest only the share
    counts that checkpoints do not hold up. This is the first-order model of J. W. Young, "A first
    order approximation to the optimum checkpoint interval" (CACM 17, 1974), with an overlapped
    write (``lag_s``) and the restart; it holds while intervals are short against ``mtbf``.

    Args:
        mtbf: mean time between failures.
        interval_s: training alone, from one checkpoint to the next; 0: as if every moment were
            saved, so that only what ``lag_s`` says is lost.
        stall_s: what each checkpoint adds to it.
        lag_s: from the end of the step that a checkpoint holds until it is durable.
        recovery_s: from the crash to the first new step.
    """
    whole = interval_s + stall_s
    share = interval_s / whole if whole else 1.0
    return share * goodput(mtbf, whole / 2 + lag_s, recovery_s)


def best_interval(
    mtbf: float, *, step_s: float, stall_s: float, lag_s: float, least_s: float = 0.0
) -> int:
    """Steps between checkpoints at which :func:`expected_goodput` is greatest; at least 1.

    With w = interval + stall that is where (1 − stall/w) · (mtbf − lag − w/2) is: it rises until
    w = √(2 · stall · (mtbf − lag)), Young's interval with a lag, and falls from there. Without a
    stall that is nothing, and ``least_s`` decides. The restart plays no part in it.

    Args:
        step_s: seconds of a step.
        least_s: no interval is shorter, as the next checkpoint would wait for this one.
    """
    free = math.sqrt(2 * stall_s * max(0.0, mtbf - lag_s)) - stall_s
    steps = max(1, math.ceil(least_s / step_s), math.floor(free / step_s))

    def share(steps: int) -> float:
        return expected_goodput(
            mtbf, interval_s=steps * step_s, stall_s=stall_s, lag_s=lag_s, recovery_s=0.0
        )

    return max((steps, steps + 1), key=share)
