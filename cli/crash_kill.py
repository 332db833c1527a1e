"""The scenarios in which processes die, hang or are told to stop.

A point is struck exactly: a fault makes the process that comes to it stop itself (SIGSTOP), and
only then is anything done to it or to the other one.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable

from gockpt.cli.crash_job import Event
from gockpt.cli.crash_process import Life
from gockpt.cli.crash_scenarios import MULTI_STEP, RANDOM, TRAINERS_OWN
from gockpt.cli.crash_setup import INTERVAL, STEPS
from gockpt.cli.crash_trial import LIFE, Skipped, Trial, why
from gockpt.faults import Fault
from gockpt.workloads import param_count

HANG = 3.0
"""Seconds without a pass after which the parent takes a trainer for hung."""

GRACE = 25.0
"""Seconds that a trainer may take to end after SIGTERM."""

SLOTS = 2
EXTENT = 1 << 20
"""Bytes that small images are written in."""


def process(trial: Trial) -> None:
    """A scenario of the family ``process``."""
    name = trial.case.scenario.name
    trial.facts.lost_most = lost_most(trial)
    if name in ("exception", "out-of-memory"):
        _broken_loop(trial)
    elif name == "crash-in-restore":
        _crash_in_restore(trial)
    elif name == "crash-again":
        _crash_again(trial)
    else:
        ACTS[name](trial, to_the_point(trial))


def lost_most(trial: Trial) -> int:
    """Steps that a crash may cost, as docs/crash-test.md promises."""
    if trial.policy is None or trial.policy.wait_durable:
        return INTERVAL
    return (SLOTS + 1) * INTERVAL


def to_the_point(trial: Trial) -> Life:
    """A first life, at the moment or point of the case.

    Raises:
        Skipped: it does not come there.
    """
    point = trial.case.point
    if point == RANDOM:
        life = trial.live(pace=trial.setup.pace)
        trial.moment(life)
        return life
    trainer, agent = standstill(trial)
    life = trial.live(pace=trial.setup.pace, trainer_faults=trainer, agent_faults=agent)
    if not life.until(lambda: life.stopped_pid() is not None, LIFE):
        raise Skipped(f"the point {point} was not reached ({why(life)})")
    return life


def standstill(trial: Trial) -> tuple[tuple[Fault, ...], tuple[Fault, ...]]:
    """The faults, of trainer and agent, that make a process stop at the point of the case.

    Raises:
        Skipped: the strategy never comes there.
    """
    point = trial.case.point
    if trial.policy is None:
        return _of_plain(point, _target(trial) // INTERVAL)
    if trial.windows == 1 and point in MULTI_STEP:
        raise Skipped(f"{trial.case.strategy} takes each checkpoint in one window")
    if point.startswith("tier"):
        trial.tier = trial.place / "disk" / "tier"
    made = _stop(trial, point, _target(trial))
    return ((made,), ()) if point in TRAINERS_OWN else ((), (made,))


def _target(trial: Trial) -> int:
    """The step whose checkpoint is struck."""
    return trial.chance.randrange(2, STEPS // INTERVAL) * INTERVAL


def _stop(trial: Trial, point: str, target: int) -> Fault:
    windows, before = trial.windows, target // INTERVAL - 1
    here = f"*/checkpoints/step-{target:09d}-*"
    half = max(1, 12 * param_count(trial.setup.task.real_preset) // EXTENT // 2)
    where: dict[str, tuple[str, int, str | None]] = {
        "state-first": ("capture.window", before * windows, None),
        "state-middle": ("capture.window", before * windows + windows // 2, None),
        "state-last": ("capture.window", before * windows + windows - 1, None),
        "gradients": ("capture.gradients", before * (windows - 1), None),
        "replay": ("replay.update", before * (windows - 1), None),
        "half-written": ("fs.pwrite", half, f"{here}.safetensors"),
        "unsynced": ("fs.fdatasync", 0, f"{here}.safetensors"),
        "manifest": ("fs.rename", 0, f"{here}.json.tmp"),
        "committed": ("output.committed", 0, here),
        "retention": ("fs.rmtree", 0, "*/checkpoints/.trash-*"),
        "tier-half": ("fs.pwrite", half, "*/tier/step-*.safetensors"),
        "tier-unsynced": ("fs.fdatasync", 0, "*/tier/step-*.safetensors"),
    }
    name, after, match = where[point]
    return Fault(point=name, action="stop", after=after, match=match)


def _of_plain(point: str, nth: int) -> tuple[tuple[Fault, ...], tuple[Fault, ...]]:
    if point != "half-written":
        raise Skipped(f"a plain torch.save does not pass the point {point}")
    return (Fault(point="plain.half", action="stop", after=nth - 1),), ()


# -- what is done ----------------------------------------------------------------------------------


def _kill_trainer(trial: Trial, life: Life) -> None:
    trial.strike(life)
    trial.kill(life, agents=False)
    life.send_agents(signal.SIGCONT)
    trial.finish()


def _kill_agent(trial: Trial, life: Life) -> None:
    if not life.agents:
        raise Skipped("the method has no agent")
    trial.strike(life)
    trial.facts.restarted, trial.facts.may_fail = False, True
    life.send_agents(signal.SIGKILL)
    life.send(signal.SIGCONT)
    life.until_over(LIFE)


def _kill_both(trial: Trial, life: Life) -> None:
    trial.strike(life)
    trial.kill(life, apart=0.1 * trial.chance.random())
    trial.finish()


def reboot(trial: Trial, life: Life) -> None:
    """Both die at the same instant, and nothing of what was in memory is left."""
    life.send(signal.SIGSTOP)
    life.send_agents(signal.SIGSTOP)
    trial.strike(life)
    life.send_agents(signal.SIGKILL)
    trial.kill(life)
    for path in trial.scratch.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    trial.finish()


def _hang_trainer(trial: Trial, life: Life) -> None:
    trial.strike(life)
    life.send(signal.SIGSTOP)
    until_hung(trial, life)
    trial.kill(life)
    trial.finish()


def _hang_agent(trial: Trial, life: Life) -> None:
    if not life.agents:
        raise Skipped("the method has no agent")
    trial.strike(life)
    life.send_agents(signal.SIGSTOP)
    until_hung(trial, life)
    if life.over:  # it needed no agent any more
        raise Skipped(f"the trainer did not need the agent any more ({why(life)})")
    trial.facts.lost_most = None
    trial.kill(life)
    trial.finish()


def until_hung(trial: Trial, life: Life) -> None:
    """Wait until a trainer says nothing any more, or has ended."""
    began = time.monotonic()
    while not life.over and life.silent() < HANG:
        life.poll(0.05)
    trial.facts.detect_s = time.monotonic() - began


def _sigterm(trial: Trial, life: Life) -> None:
    trial.strike(life)
    life.send(signal.SIGTERM)
    life.send(signal.SIGCONT)
    life.send_agents(signal.SIGCONT)
    deadline = time.monotonic() + GRACE
    while not life.over and time.monotonic() < deadline:
        life.poll(0.05)
    if not life.over:
        trial.facts.problems.append(f"it had not ended {GRACE:.0f} s after SIGTERM")
    trial.kill(life)
    if trial.policy is not None:
        trial.facts.lost_most = 0
        trial.facts.injected_step = life.step
        if life.ended is None:
            trial.facts.problems.append(f"SIGTERM did not end the loop ({why(life)})")
    trial.finish()


ACTS: dict[str, Callable[[Trial, Life], None]] = {
    "kill-trainer": _kill_trainer,
    "kill-agent": _kill_agent,
    "kill-both": _kill_both,
    "reboot": reboot,
    "hang-trainer": _hang_trainer,
    "hang-agent": _hang_agent,
    "sigterm": _sigterm,
}


# -- the others ------------------------------------------------------------------------------------


def _broken_loop(trial: Trial) -> None:
    """An exception, or too little memory, in the loop itself."""
    kind = "memory" if trial.case.scenario.name == "out-of-memory" else trial.case.point
    step = trial.chance.randint(INTERVAL + 1, STEPS - 2)
    life = trial.live(pace=trial.setup.pace, failure=Event(kind=kind, step=step))
    life.until_over(LIFE)
    trial.facts.must_break = ("Injected",) if kind != "memory" else ("RuntimeError", "MemoryError")
    trial.strike(life)
    trial.kill(life, agents=False)
    trial.gone()
    trial.finish()


def _crash_in_restore(trial: Trial) -> None:
    if trial.policy is None:
        raise Skipped("a plain torch.load has no such point")
    first = trial.live(pace=trial.setup.pace)
    trial.moment(first, earliest=2 * INTERVAL)
    trial.strike(first)
    trial.kill(first)
    reads = Fault(point="fs.pread", action="stop", after=2, match="*.safetensors")
    second = trial.live(trainer_faults=(reads,))
    if not second.until(lambda: second.stopped_pid() is not None, LIFE):
        raise Skipped(f"the restart did not read a checkpoint ({why(second)})")
    trial.kill(second)
    trial.finish()


def _crash_again(trial: Trial) -> None:
    first = trial.live(pace=trial.setup.pace)
    trial.moment(first)
    trial.strike(first)
    trial.kill(first)
    second = trial.live(pace=trial.setup.pace)
    if not second.until(lambda: bool(second.stepped), LIFE):
        raise Skipped(f"the restart made no step ({why(second)})")
    time.sleep(0.1 * trial.chance.random())
    trial.promise(trial.newest())
    trial.kill(second)
    trial.finish()
