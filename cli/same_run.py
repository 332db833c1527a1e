"""What two starts of ``gockpt train`` must have in common for the second to go on with the first.

Runs in the command. The options are saved in every checkpoint as an object of the user's. They are
compared twice: before anything is started, with the newest checkpoint of the directory, so that the
answer comes at once and in the words of the command line; and when they are restored, which may be
from a tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gockpt
from gockpt.cli.task import Task
from gockpt.errors import ConfigError, GockptError
from gockpt.storage.format import digest
from gockpt.workloads.data import read_text

NAME = "options"
"""Of these among the objects in a checkpoint."""


class Options:
    """Of one start; ``state_dict`` and ``load_state_dict`` make them an object to be saved."""

    def __init__(self, task: Task) -> None:
        self._mine = {
            "--model": task.model,
            "--device": "emulated" if task.device.startswith("emulated:") else "real",
            "--precision": task.precision,
            "--tokens": task.tokens,
            "--seed": task.seed,
            "--data": digest(read_text(task.data)),
        }

    def state_dict(self) -> dict[str, object]:
        """By the names that they have on the command line."""
        return dict(self._mine)

    def load_state_dict(self, saved: dict[str, object]) -> None:
        """Nothing is taken on: they must be the same.

        Raises:
            ConfigError: one differs.
        """
        differing = [name for name, mine in self._mine.items() if saved.get(name, mine) != mine]
        if differing:
            raise ConfigError(_complaint(differing[0], saved[differing[0]], self._mine))

    def check(self, root: Path, volumes: Sequence[str]) -> None:
        """Compare them with those of the run in ``root``, if there is one.

        Raises:
            ConfigError: one differs.
        """
        try:
            saved = gockpt.open(root, volumes=volumes).objects().get(NAME, {})
        except GockptError:
            return  # there is none, or it is damaged: restoring says so
        self.load_state_dict(saved)


def _complaint(option: str, then: object, now: Mapping[str, object]) -> str:
    if option == "--data":
        return (
            "the run to go on with was trained on another text; give its --data again, or name "
            "another --dir for a new run"
        )
    if option == "--device":
        what = f"the run to go on with is on a device that is {then}, not {now[option]}"
        return f"{what}; give such a --device, or name another --dir for a new run"
    return (
        f"the run to go on with has {option} {then}, not {now[option]}; give {option} {then}, or "
        "name another --dir for a new run"
    )
