"""Whether a trial has passed, and what is wrong if not.

Pure, but for looking at the directory that is left. docs/crash-test.md gives the rules.
"""

from __future__ import annotations

import math

from gockpt.cli.bench_loop import compare
from gockpt.cli.crash_job import Pass
from gockpt.cli.crash_process import Life
from gockpt.cli.crash_setup import STEPS
from gockpt.cli.crash_trial import Facts, Trial, why
from gockpt.errors import GockptError
from gockpt.storage import open as open_checkpoint
from gockpt.storage import scan


def judge(trial: Trial) -> list[str]:
    """Everything that is wrong; nothing if the trial has passed."""
    return [
        *trial.facts.problems,
        *broke(trial),
        *_unfinished(trial),
        *(_restored(trial) if trial.facts.restarted else ()),
        *_states(trial),
        *_history(trial),
        *_failures(trial),
        *_checkpoints(trial),
        *trial.leftovers(),
    ]


def broke(trial: Trial) -> list[str]:
    """Exceptions that nobody had asked for."""
    found = []
    for number, life in enumerate(trial.lives, 1):
        if life.broke is not None and (number > 1 or life.broke.kind not in trial.facts.must_break):
            found.append(f"life {number} broke: {why(life)}")
    return found


def _unfinished(trial: Trial) -> list[str]:
    found = []
    if trial.facts.must_break and trial.lives[0].broke is None:
        found.append("the first life was to break, and did not")
    if trial.lives[-1].ended is None and trial.lives[-1].broke is None:
        found.append("the last life did not come to its end")
    return found


def restored(trial: Trial) -> int | None:
    """The step that the last life went on from."""
    if len(trial.lives) < 2:
        return None
    ready = trial.lives[-1].ready
    return None if ready is None else ready.restored


def lost(trial: Trial) -> int | None:
    """Steps that had to be made again."""
    facts = trial.facts
    if facts.injected_step is None or not facts.restarted or trial.lives[-1].ready is None:
        return 0 if not facts.restarted else None
    return max(0, facts.injected_step - (restored(trial) or 0))


def _restored(trial: Trial) -> list[str]:
    facts, step = trial.facts, restored(trial)
    found = []
    if facts.promised is not None and (step or 0) < facts.promised:
        what = "nothing was restored" if step is None else f"step {step} was restored"
        found.append(f"{what}, though step {facts.promised} had been committed")
    steps = lost(trial)
    if steps is not None and facts.lost_most is not None and steps > facts.lost_most:
        found.append(f"{steps} steps were lost, at most {facts.lost_most} may be")
    return found


def _states(trial: Trial) -> list[str]:
    """Restored and final states against the golden run's."""
    found = []
    for number, life in enumerate(trial.lives, 1):
        if life.ready is not None and life.ready.different:
            what = f"life {number}: the state of step {life.ready.restored or 0}"
            found.append(f"{what} {_named(life.ready.different)}")
        if life.ended is not None and life.ended.different:
            found.append(f"life {number} ended with a state that {_named(life.ended.different)}")
    last = trial.lives[-1]
    if last.ended is not None and last.ended.step != STEPS:
        found.append(f"the last life ended at step {last.ended.step} of {STEPS}")
    return found


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"differs from the golden run in {', '.join(names[:3])}{more}"


def different(trial: Trial) -> list[str]:
    """All tensors that differ anywhere."""
    names: set[str] = set()
    for life in trial.lives:
        names.update(life.ready.different if life.ready else ())
        names.update(life.ended.different if life.ended else ())
    return sorted(names)


def surviving(lives: list[Life]) -> list[Pass]:
    """The passes of which the final state is made: what was lost is left out."""
    history: list[Pass] = []
    for life in lives:
        start = (life.ready.restored or 0) if life.ready else len(history)
        history = [one for one in history if one.step <= start] + life.passes
    return history


def _history(trial: Trial) -> list[str]:
    """Each batch once, and every loss and random number as in the golden run."""
    found = []
    golden = trial.golden.passes
    history = surviving(trial.lives)
    if [one.batch for one in history] != [one.batch for one in golden[: len(history)]]:
        found.append("batches were left out or used twice")
    if len(history) != STEPS:
        found.append(f"the history has {len(history)} steps, not {STEPS}")
    for number, life in enumerate(trial.lives, 1):
        wrong = next((one for one in life.passes if one != golden[one.step - 1]), None)
        if wrong is not None:
            found.append(
                f"life {number}: loss, batch or random numbers of step {wrong.step} differ"
            )
    return found


def _failures(trial: Trial) -> list[str]:
    return [
        f"life {number}: {life.failed} checkpoints failed though nothing was done to them"
        for number, life in enumerate(trial.lives, 1)
        if life.failed > _allowed(trial.facts, number, life)
    ]


def _allowed(facts: Facts, number: int, life: Life) -> float:
    """How many checkpoints of a life may have failed."""
    if number == 1:
        return math.inf if facts.may_fail else 0
    start = (life.ready.restored or 0) if life.ready else 0
    return 1 if facts.recurs_at is not None and start < facts.recurs_at else 0


def _checkpoints(trial: Trial) -> list[str]:
    """What is on the disk in the end, against the golden run."""
    if trial.policy is None or not trial.directory.is_dir():
        return []
    found = []
    for one in scan(trial.directory):
        if one.problem is not None:
            continue
        try:
            wrong = compare(
                open_checkpoint(trial.directory, one.step), trial.golden.states[one.step]
            )
        except GockptError as error:
            wrong = str(error)
        if wrong is not None:
            found.append(f"on the disk: {wrong}")
    return found
