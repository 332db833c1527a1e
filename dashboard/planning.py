"""What each strategy would cost on a machine that is described by sliders: the Plan page.

Pure functions over :mod:`gockpt.plan`. Everything here is a prediction for the model's true size.
Expected goodput is that of :func:`gockpt.goodput.expected_goodput`: the share of the time that is
useful work, where something dies every ``mtbf_s`` seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from gockpt.cli.plan import situation_of
from gockpt.cli.task import resolve
from gockpt.goodput import expected_goodput
from gockpt.plan import Plan, Situation, one_window_stall, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the sliders say; None: as the profile has it."""

    model: str
    profile: str
    interval: int
    tokens: int | None = None
    link_gb_s: float | None = None
    mtbf_s: float = 6 * 3600.0
    recovery_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One strategy on that machine. Seconds and bytes."""

    strategy: str
    windows: int
    stall_s: float
    """For each checkpoint."""
    slowdown: float
    """Share by which training takes longer, all stalls counted."""
    traffic_factor: float
    memory_bytes: int
    durable_s: float
    """From the start of a checkpoint until it survives the machine."""
    lost_s: float
    """Work that a crash takes away on average."""
    goodput: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """All strategies, and the machine that they were predicted for."""

    step_s: float
    interval_s: float
    link_bytes_per_s: float
    link_given: bool
    state_bytes: float
    gradient_bytes: float
    tokens: int
    predictions: list[Prediction]


def outlook(wishes: Wishes) -> Outlook:
    """
    Raises:
        ConfigError, DeviceError: a model or profile that there is not, a number that cannot be.
    """
    task, _ = resolve(
        model=wishes.model,
        device=f"emulated:{wishes.profile}",
        tokens=wishes.tokens,
        precision=None,
    )
    situation = situation_of(task, every=wishes.interval, link_gb_s=wishes.link_gb_s)
    step = situation.window_s + situation.update_s
    return Outlook(
        step_s=step,
        interval_s=step * wishes.interval,
        link_bytes_per_s=situation.link_rate,
        link_given=wishes.link_gb_s is not None,
        state_bytes=situation.sent_bytes,
        gradient_bytes=situation.grad_bytes * situation.params,
        tokens=task.tokens,
        predictions=[_blocking("sync", situation, wishes), _blocking("async", situation, wishes),
                     _one_window(situation, wishes), _planned(situation, wishes)],
    )  # fmt: skip


def _write_s(s: Situation) -> float:
    return s.image / s.write_rate if s.write_rate else 0.0


def _late_disk_s(s: Situation) -> float:
    """Seconds of each interval for which training waits for a disk that does not keep up."""
    step = s.window_s + s.update_s
    return max(0.0, _write_s(s) - step * (s.every or 1))


def _blocking(name: str, s: Situation, wishes: Wishes) -> Prediction:
    """Training waits for the copy (``async``), for the disk too (``sync``)."""
    copy = s.sent_bytes / s.alone
    stall = copy + (_write_s(s) if name == "sync" else _late_disk_s(s))
    words = {
        "sync": "training waits for the copy and for the disk",
        "async": "training waits for the copy; the disk comes behind",
    }[name]
    return _prediction(name, s, wishes, stall=stall, durable=copy + _write_s(s), note=words)


def _one_window(s: Situation, wishes: Wishes) -> Prediction:
    stall = one_window_stall(s) + _late_disk_s(s)
    durable = s.window_s + one_window_stall(s) + _write_s(s)
    words = "the copy hides behind one forward and backward; training waits for the rest"
    return _prediction("async-o", s, wishes, stall=stall, durable=durable, note=words)


def _planned(s: Situation, wishes: Wishes) -> Prediction:
    made = plan(s)
    step = s.window_s + s.update_s
    durable = (made.windows - 1) * step + s.window_s + made.replay_s + _write_s(s)
    return _prediction(
        "gockpt", s, wishes, stall=made.stall_s, durable=durable, note=made.note, made=made
    )


def _prediction(
    name: str,
    s: Situation,
    wishes: Wishes,
    *,
    stall: float,
    durable: float,
    note: str,
    made: Plan | None = None,
) -> Prediction:
    step = s.window_s + s.update_s
    interval, windows = step * wishes.interval, 1 if made is None else made.windows
    lag = durable - (windows - 1) * step  # the state is that of the last window
    share = expected_goodput(
        wishes.mtbf_s,
        interval_s=interval,
        stall_s=stall,
        lag_s=lag,
        recovery_s=wishes.recovery_s,
    )
    return Prediction(
        strategy=name,
        windows=windows,
        stall_s=stall,
        slowdown=stall / interval,
        traffic_factor=1.0 if made is None else made.traffic_factor,
        memory_bytes=s.slots * s.image if made is None else made.memory_bytes,
        durable_s=durable,
        lost_s=(interval + stall) / 2 + lag,
        goodput=share,
        note=note,
    )
