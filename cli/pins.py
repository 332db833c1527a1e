"""``gockpt pin``, ``gockpt unpin``: checkpoints that no retention deletes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gockpt.cli import checkpoints, output
from gockpt.errors import NoCheckpointError

Directory = Annotated[str, typer.Argument(metavar="DIR", help="A directory of checkpoints.")]
Step = Annotated[int, typer.Argument(metavar="STEP", help="Of which step.")]


def pin(path: Directory, step: Step, volume: checkpoints.Volumes = None) -> None:
    """Keep the newest valid checkpoint of a step until it is unpinned.

    Works while a training runs. In its second tier the pin holds from the next copy on.
    """
    from gockpt.storage import pin as pin_checkpoint

    pinned = pin_checkpoint(_existing(path), step, volumes=list(map(Path, volume or ())))
    output.people().print(f"{pinned.name} is pinned")


def unpin(path: Directory, step: Step) -> None:
    """Leave the checkpoints of a step to retention, even if keep_every would keep them.

    A second tier has its own pins: name its directory to take those back.
    """
    from gockpt.storage import unpin as unpin_checkpoints

    unpinned = unpin_checkpoints(_existing(path), step)
    console = output.people()
    for one in unpinned:
        console.print(f"{one.name} is no longer pinned")
    if not unpinned:
        console.print(f"no checkpoint of step {step} was pinned")


def _existing(path: str) -> Path:
    """The directory.

    Raises:
        NoCheckpointError: it is not there.
    """
    found = Path(path)
    if not found.is_dir():
        raise NoCheckpointError(
            f"{found}: no such directory; name one with checkpoints", path=found
        )
    return found
