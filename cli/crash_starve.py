"""The scenarios of the family ``disk``: it is full, slow, stuck, or fails.

The faults are armed in the agent and hit the files of one checkpoint, or all. What is expected: the
training goes on, the checkpoint that could not be written is reported, older ones stand.
"""

from __future__ import annotations

from gockpt.cli.crash_kill import lost_most, until_hung
from gockpt.cli.crash_setup import INTERVAL, STEPS
from gockpt.cli.crash_trial import LIFE, Skipped, Trial, why
from gockpt.faults import Fault

SLOW = 0.05
"""Seconds that a write takes longer on a slow disk: about ten times as long as it does."""


def disk(trial: Trial) -> None:
    """A scenario of the family ``disk``."""
    if trial.policy is None:
        raise Skipped("a plain torch.save has no agent whose disk could fail")
    name = trial.case.scenario.name
    target = trial.chance.randrange(2, STEPS // INTERVAL - 2) * INTERVAL
    harmless = name in ("short-write", "slow-disk")
    life = trial.live(pace=trial.setup.pace, agent_faults=(_fault(trial, target),))
    if name == "stuck-disk":
        until_hung(trial, life)
        if life.over:
            raise Skipped(f"the write that is stuck did not hold it up ({why(life)})")
    elif harmless:
        trial.moment(life, earliest=target + 2, latest=target + INTERVAL + 2)
    elif not life.until(lambda: life.failed > 0, LIFE):
        raise Skipped(f"no checkpoint failed ({why(life)})")
    else:
        trial.moment(life, earliest=life.step, latest=life.step + 2)
    trial.facts.may_fail = not harmless
    trial.facts.lost_most = lost_most(trial) if harmless else None
    trial.strike(life)
    trial.kill(life)
    trial.finish()


def _fault(trial: Trial, target: int) -> Fault:
    image = f"*/step-{target:09d}-*.safetensors"
    manifest = f"*/step-{target:09d}-*.json.tmp"
    files = manifest if trial.case.point == "manifest" else image
    name = trial.case.scenario.name
    if name == "short-write":
        return Fault(point="fs.pwrite.short", action="mark", times=0, match="*.safetensors")
    if name == "slow-disk":
        return Fault(point="fs.pwrite", action=f"delay:{SLOW}", times=0, match="*.safetensors")
    if name == "stuck-disk":
        return Fault(point="fs.pwrite", action="delay:3600", match=image)
    if name == "read-only":
        return Fault(point="fs.create", action="errno:EROFS", times=0, match=image)
    number = {"disk-full": "ENOSPC", "quota": "EDQUOT", "io-error": "EIO"}[name]
    call = "fs.fdatasync" if trial.case.point == "sync" else "fs.pwrite"
    return Fault(point=call, action=f"errno:{number}", times=0, match=files)
