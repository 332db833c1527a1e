"""The checkpoint that a command line means, and progress while its bytes are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from gockpt.errors import ConfigError, NoCheckpointError

if TYPE_CHECKING:
    from gockpt.storage import Checkpoint

Which = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="A directory of checkpoints, one checkpoint, or its manifest."
    ),
]
Step = Annotated[
    int | None, typer.Option(help="The newest of this step.", show_default="the newest of all")
]
Volumes = Annotated[
    list[str] | None,
    typer.Option(
        "--volume", metavar="DIR", help="Where parts are now, if a volume was moved; repeatable."
    ),
]


def directory_of(path: Path) -> Path:
    """The directory that is meant: that of a manifest, or the path itself.

    Raises:
        NoCheckpointError: there is nothing there.
        ConfigError: a file that is no manifest.
    """
    if path.is_dir():
        return path
    if not path.exists():
        raise NoCheckpointError(f"{path}: no such directory; name one with checkpoints", path=path)
    if path.suffix == ".json" and path.name.startswith("rank-"):
        return path.parent
    raise ConfigError(f"{path} is not a checkpoint; name its directory, or its rank-….json")


def open_one(path: str, step: int | None, volumes: list[str] | None) -> Checkpoint:
    """Open the checkpoint that a path, ``--step`` and ``--volume`` mean.

    Raises:
        ConfigError, NoCheckpointError: nothing there, or not that step (the message lists them).
        CorruptError: the path is one checkpoint, and it is not valid.
    """
    from gockpt.storage import open as open_checkpoint

    return open_checkpoint(directory_of(Path(path)), step, volumes=list(map(Path, volumes or ())))


@contextmanager
def reading(console: Console, what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal while ``nbytes`` are read; the function given counts them."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
               TransferSpeedColumn())  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda count: bar.update(task, advance=count)
