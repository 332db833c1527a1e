"""The scenarios of the family ``training``: the training does what checkpoints do not expect.

Nothing is broken by it, and no promised step may be missing: the checkpoint in whose window it
happens is taken in another way. The golden run does the same at the same step.
"""

from __future__ import annotations

from gockpt.cli.crash_job import Event
from gockpt.cli.crash_kill import lost_most
from gockpt.cli.crash_scenarios import WINDOWS
from gockpt.cli.crash_setup import INTERVAL, Case, policy_of
from gockpt.cli.crash_setup import WINDOWS as COUNT
from gockpt.cli.crash_trial import LIFE, Skipped, Trial
from gockpt.errors import GockptError

TARGET = 3 * INTERVAL
"""The step whose checkpoint is disturbed."""


def event_of(case: Case) -> Event | None:
    """What happens in the training of a case, and in its golden run."""
    if case.scenario.family != "training":
        return None
    window = WINDOWS.index(case.point)
    # Ahead of the pass that follows the opening of this window.
    return Event(kind=case.scenario.name, step=TARGET - COUNT + 2 + window)


def training(trial: Trial) -> None:
    """A scenario of the family ``training``."""
    event = event_of(trial.case)
    if event is None:
        raise GockptError(f"{trial.case.scenario.name} is no event of a training")
    policy = policy_of(trial.case.strategy)
    if policy is not None and policy.max_windows == 1 and trial.case.point != WINDOWS[-1]:
        raise Skipped(f"{trial.case.strategy} takes each checkpoint in one window")
    life = trial.live(pace=trial.setup.pace, event=event)
    trial.moment(life, earliest=TARGET + 2, latest=TARGET + INTERVAL)
    # What changes the state behind the target while it is being copied may cost its checkpoint,
    # as the state of the target is not there any more; then it has failed, and says so.
    trial.facts.may_fail = trial.case.point == WINDOWS[-1]
    if trial.facts.may_fail:
        trial.facts.recurs_at = TARGET  # a life that comes past it again does the same again
        life.until(lambda: TARGET in life.durable or life.failed > 0, LIFE)
    elif policy is not None and not life.until(lambda: TARGET in life.durable, 60):
        trial.facts.problems.append(f"the checkpoint of step {TARGET} is missing")
    trial.strike(life)
    trial.facts.lost_most = lost_most(trial)
    trial.kill(life)
    trial.finish(event=event)
