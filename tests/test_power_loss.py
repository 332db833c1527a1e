"""Power loss at every call: what was not synced is lost, kept or torn, and it never matters.

Trainings save, prune, fail to save, are started again and save the same step once more, through the
real agent. From what they did to the disk every state is built that a crash may leave. In each of
them the newest checkpoint that had been reported as durable, or a later one, must be found, with
every bit of it right.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from identity_kit import Bag, Truth, assert_same, checkpointer, one_pass, same_bits, truth
from power_loss_kit import Op, Recorder, Shelf, State, Tree, as_it_was, states

from gockpt import faults, storage
from gockpt.errors import NoCheckpointError
from gockpt.faults import Fault

DEADLINE = 200.0
ROOT = Path("data/checkpoints")
SHAPES = ((17, 65), (130,), (3, 5), (7,))
EVERY = 2

Truths = dict[tuple[str, int], Truth]
"""What was true at the end of a step of a launch, which is called by its id's first digits."""


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    # Files are compared here, not made: through the page cache it is done in a tenth of the time.
    faults.arm([Fault(point="fs.direct", action="errno:EINVAL", times=0)])
    yield
    faults.disarm()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What one launch of a training did to the disk."""

    start: Tree
    log: Sequence[Op]
    truths: Truths
    committed: tuple[Path, ...]
    """Durable before the launch."""

    def states(self, forget: Callable[[Op], bool] = lambda op: False) -> Iterator[State]:
        return states(self.log, start=self.start, committed=self.committed, forget=forget)


def launch(
    disk: Path,
    *,
    steps: int,
    keep: int,
    failing: int | None = None,
    restore: int | None = None,
    lr: float = 0.01,
    truths: Truths | None = None,
    committed: tuple[Path, ...] = (),
) -> Launch:
    """Train on ``disk`` up to ``steps``, from the newest checkpoint there or that of ``restore``.

    Args:
        failing: the step whose save meets a full disk at its very end.
        lr: makes what this launch saves differ from what others saved of the same step.
        truths, committed: what is known of the checkpoints that are there.
    """
    start = tree_of(disk)
    training = Bag(shapes=SHAPES)
    moments: dict[int, Truth] = {}
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(disk, patch)
        with checkpointer(
            training, disk / ROOT, every=EVERY, windows=2, keep=keep, on_error="warn"
        ) as ckpt:
            ckpt.restore(restore)
            training.optimizer.param_groups[0]["lr"] = lr
            for step in range(ckpt.current_step + 1, steps + 1):
                if step == failing:
                    match = f"*/step-{step:09d}-*.safetensors"
                    faults.arm([Fault(point="fs.fdatasync", action="errno:ENOSPC", match=match)])
                one_pass(ckpt, training, step)
                moments[step] = truth(training)
                ckpt.step()
                if step % EVERY == 1:
                    ckpt.wait(DEADLINE)  # so that each one is written, and none left out
    (mine,) = {
        name.launch
        for op in recorder.log
        if op.call == "mkdir" and (name := storage.parse_name(op.path.name))
    }
    return Launch(
        start=start,
        log=recorder.log,
        truths={(mine, step): moment for step, moment in moments.items()} | (truths or {}),
        committed=committed,
    )


def tree_of(disk: Path) -> Tree:
    return {
        path.relative_to(disk): path.read_bytes() if path.is_file() else None
        for path in disk.rglob("*")
    }


def problem_of(state: State, truths: Truths, shelf: Shelf) -> str | None:
    """What is wrong with the checkpoints of a state, or None."""
    disk = shelf.put(state.tree)
    try:
        return problem(disk / ROOT, {disk / path for path in state.committed}, truths)
    finally:
        shutil.rmtree(disk)


def problem(root: Path, committed: set[Path], truths: Truths) -> str | None:
    newest = max(map(sequence, committed), default=0)
    try:
        checkpoint, tensors, _ = storage.load_newest(root, threads=1)
    except NoCheckpointError as error:
        return f"{error}" if committed else None
    found = storage.parse_name(checkpoint.path.name)
    assert found is not None
    if found.sequence < newest:
        return f"{found} was restored, though {newest} had been committed"
    try:
        assert_same(tensors, truths[found.launch, found.step], str(found))
    except AssertionError as error:
        return str(error)
    # One that is being deleted goes as a whole: nobody shall find half of it.
    for one in storage.scan(root):
        if one.path in committed and one.problem is not None:
            return f"half of {one.path.name} is still there: {one.problem}"
    return None


def sequence(path: Path) -> int:
    name = storage.parse_name(path.name)
    assert name is not None
    return name.sequence


def explore(launch: Launch, shelf: Shelf, forget: Callable[[Op], bool] | None = None) -> int:
    """Look at every state; their number.

    Raises:
        AssertionError: naming the first that is wrong.
    """
    number = 0
    for state in launch.states() if forget is None else launch.states(forget):
        number += 1
        wrong = problem_of(state, launch.truths, shelf)
        assert wrong is None, f"before operation {state.at}: {wrong}"
    return number


# -- the launches ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Saves steps 2, 4, 8 and 10, fails to save 6, and keeps two."""
    disk = tmp_path_factory.mktemp("disk")
    made = launch(disk, steps=11, keep=2, failing=6)
    assert steps_saved(made) == [2, 4, 8, 10]
    assert sum(op.call == "rmtree" for op in made.log) == 3  # 6, 2 and 4
    return made


def partly_written(first: Launch) -> int:
    """Where the last checkpoint has its files and not yet its name."""
    return max(at for at, op in enumerate(first.log) if op.call == "rename" and op.by == "commit")


def half_deleted(first: Launch) -> int:
    """Where the last of the old ones has been moved to the trash."""
    return max(at for at, op in enumerate(first.log) if op.call == "rmtree")


def finished(first: Launch) -> int:
    return len(first.log)


RESTARTS: dict[str, tuple[Callable[[Launch], int], int | None, list[int]]] = {
    "after a crash while writing": (partly_written, None, [10, 11]),
    "after a crash while deleting": (half_deleted, None, [12, 13]),
    "from an older step": (finished, 8, [10, 11]),
}
"""Where the first launch ends, the step to restore, and what is saved then.

(The last one is the windows of a later one that are closed with the training.)
"""


def restarted(name: str, first: Launch, disk: Path) -> Launch:
    """A second launch, on what a crash of the first has left."""
    where, restore, saved = RESTARTS[name]
    found = as_it_was(first.log[: where(first)])
    Shelf(disk.parent / f"{disk.name}-shelf").put(found.tree, shared=False).rename(disk)
    made = launch(
        disk,
        steps=saved[-1],
        keep=1,
        restore=restore,
        lr=0.3,
        truths=first.truths,
        committed=found.committed,
    )
    assert steps_saved(made) == saved
    return made


def steps_saved(launch: Launch) -> list[int]:
    names = [storage.parse_name(op.path.name) for op in launch.log if op.call == "committed"]
    return [name.step for name in names if name is not None]


# -- every state -----------------------------------------------------------------------------------


def test_every_state_after_a_crash_of_the_first_launch(first: Launch, shelf: Shelf) -> None:
    """Saves, a failed save, deletion."""
    assert explore(first, shelf) > 300


@pytest.mark.parametrize("name", RESTARTS)
def test_every_state_after_a_crash_of_the_next_launch(
    name: str, first: Launch, shelf: Shelf, tmp_path: Path
) -> None:
    """What was left behind is collected, and the same step is saved once more, differently."""
    again = restarted(name, first, tmp_path / "disk")
    assert explore(again, shelf) > 100
    if 10 in steps_saved(again):
        one, two = (truth for (_, step), truth in again.truths.items() if step == 10)
        assert not same_bits(one["model.list.0"], two["model.list.0"])


# -- the exploration itself works ------------------------------------------------------------------

SYNCS: dict[str, Callable[[Op], bool]] = {
    "the data": lambda op: op.call == "fdatasync" and op.path.suffix == ".safetensors",
    "the manifest": lambda op: op.call == "fdatasync" and op.path.suffix == ".tmp",
    "names in the checkpoint's directory": lambda op: (
        op.call == "fsync_dir" and storage.parse_name(op.path.name) is not None
    ),
    "the name of the checkpoint's directory": lambda op: (
        op.call == "fsync_dir" and op.path == ROOT and op.by == "commit"
    ),
    "the name of what is deleted": lambda op: (
        op.call == "fsync_dir" and op.path == ROOT and op.by not in {"commit", "make_directories"}
    ),
    "the names of the directories above": lambda op: (
        op.call == "fsync_dir" and op.by == "make_directories"
    ),
}
"""Everything that is made durable."""


def test_every_sync_of_the_code_is_among_those_that_are_left_out(first: Launch) -> None:
    syncs = [op for op in first.log if op.call in {"fdatasync", "fsync_dir"}]
    assert [op for op in syncs if sum(forgotten(op) for forgotten in SYNCS.values()) != 1] == []


@pytest.mark.parametrize("forgotten", SYNCS)
def test_a_forgotten_sync_is_found(forgotten: str, first: Launch, shelf: Shelf) -> None:
    """The code does the same whether it syncs or not: so the log without the sync is its log."""
    assert any(map(SYNCS[forgotten], first.log))
    with pytest.raises(AssertionError, match="before operation"):
        explore(first, shelf, SYNCS[forgotten])
