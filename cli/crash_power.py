"""The scenario of a power loss: from what a real agent did to the disk, what could be left of it.

The trainer's agent is a thread of it, so that every call is written down. Then a sample of the
states that a loss of power may have left at any of them is put on the disk. In each, the newest
checkpoint that had been reported as durable, or a later one, must be found and be that of the
golden run; from some of them the training is started again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from gockpt.cli.bench_golden import tensor_hash
from gockpt.cli.crash_disk import Disk, State, Tree, choices
from gockpt.cli.crash_recorder import Op, read
from gockpt.cli.crash_setup import INTERVAL, STEPS
from gockpt.cli.crash_trial import LIFE, Skipped, Trial
from gockpt.errors import NoCheckpointError, StorageError
from gockpt.storage import load_newest, parse_name

SAMPLE = 40
"""States that are looked at."""

LAST = 4 * INTERVAL
"""The training that is recorded ends here, behind the first deletion of a checkpoint."""


def power(trial: Trial) -> None:
    """The scenario ``power-loss``."""
    if trial.policy is None:
        raise Skipped("only what gockpt does to the disk can be written down")
    record = trial.place / "disk-operations"
    life = trial.live(record=str(record), steps=LAST + 1)
    life.until_over(LIFE)
    if life.ended is None:
        raise Skipped("the training that was to be recorded broke")
    trial.facts.injected_step = life.step
    log = read(record)
    record.unlink()
    found = list(_sample(trial, log))
    for state in found:
        _look(trial, state)
    _restart(trial, found)


def _sample(trial: Trial, log: Sequence[Op]) -> Iterator[State]:
    """A sample of the states, half of them right behind a commit."""
    commits = [at + 1 for at, op in enumerate(log) if op.call == "committed"]
    if not commits:
        raise Skipped("nothing was committed")
    often = [trial.chance.choice(commits) for _ in range(SAMPLE // 2)]
    anywhere = [trial.chance.randrange(len(log) + 1) for _ in range(SAMPLE - SAMPLE // 2)]
    disk, committed, done = Disk(), [], 0
    for at in sorted([*often, *anywhere]):
        for op in log[done:at]:
            if op.call == "committed":
                committed.append(op.path)
            else:
                disk.apply(op)
        done = at
        survives = trial.chance.choice(list(choices(trial.chance.randrange(1 << 30))))
        yield State(at=at, tree=disk.after_a_crash(survives), committed=tuple(committed))


def _look(trial: Trial, state: State) -> None:
    """Find the newest checkpoint of a state, and compare it."""
    top = trial.place / "disk" / "state"
    put(state.tree, top)
    try:
        checkpoint, tensors, _ = load_newest(top / "checkpoints", threads=1)
    except (NoCheckpointError, StorageError) as error:
        if state.committed:
            trial.facts.problems.append(f"power lost at operation {state.at}: {error}")
    else:
        _judge(trial, state, checkpoint.step, checkpoint.path.name)
        hashes = {name: tensor_hash(one) for name, one in tensors.items()}
        golden = trial.golden.states[checkpoint.step]
        wrong = [name for name in golden if hashes.get(name) != golden[name]]
        if wrong:
            trial.facts.problems.append(
                f"power lost at operation {state.at}: {wrong[0]} of step {checkpoint.step} is wrong"
            )
    finally:
        shutil.rmtree(top)


def _judge(trial: Trial, state: State, step: int, name: str) -> None:
    newest = max((_sequence(path.name) for path in state.committed), default=0)
    if _sequence(name) < newest:
        trial.facts.problems.append(
            f"power lost at operation {state.at}: step {step} was found, though a newer one "
            "had been committed"
        )


def _sequence(name: str) -> int:
    parsed = parse_name(name)
    return 0 if parsed is None else parsed.sequence


def _restart(trial: Trial, states: Sequence[State]) -> None:
    """Start the training again from the state of one of the later losses."""
    later = [state for state in states if state.committed] or list(states)
    state = trial.chance.choice(later)
    shutil.rmtree(trial.directory.parent)
    put(state.tree, trial.directory.parent)
    steps = [name.step for path in state.committed if (name := parse_name(path.name))]
    trial.facts.promised = max(steps, default=None)
    trial.facts.injected_step = min(STEPS, max(steps, default=0))
    trial.facts.notes.append(f"restarted from the disk as of operation {state.at}")
    trial.finish()


def put(tree: Tree, top: Path) -> None:
    """Make a state of a disk real."""
    top.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (top / path).mkdir()
        else:
            (top / path).write_bytes(content)
