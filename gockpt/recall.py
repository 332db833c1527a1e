"""What to restore from: the agent's memory where it is as new as the disk, else the disk.

Runs on the training thread. What always holds: every byte is checked against its recorded hash,
wherever it is read; what is not good is reported, and the next best used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gockpt.agent.client import AgentClient
from gockpt.arena import Segment
from gockpt.errors import AgentError, StorageError
from gockpt.storage import (
    Checkpoint,
    Found,
    candidates,
    decode_manifest,
    load_first,
    scan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint whose every byte was good."""

    checkpoint: Checkpoint
    tensors: dict[str, Tensor]
    source: str
    """``memory``, ``ssd`` or ``tier``."""
    problems: tuple[str, ...]
    """What was tried before, and why it was not good."""


def load(
    client: AgentClient,
    root: Path,
    tier: Path | None,
    step: int | None,
    before_disk: Callable[[], None],
) -> Loaded | None:
    """Load the newest checkpoint (of ``step``, if given); None if there are none at all.

    Args:
        before_disk: called if memory will not do; waits until all that is in it was written.

    Raises:
        NoCheckpointError: ``step`` is not there, or nothing that is there is good.
    """
    problems: list[str] = []
    try:
        for found, segment in _newer_than_disk(client, root, step):
            try:
                return _from_slot(found, segment, problems)
            except StorageError as error:
                problems.append(str(error))
    except (AgentError, StorageError) as error:
        problems.append(f"memory cannot be used: {error}")
    before_disk()
    there, troubles = candidates(root, tier)
    if step is None and not there and not troubles:
        return None
    checkpoint, tensors, damaged = load_first(root, there, troubles, step=step)
    return Loaded(
        checkpoint=checkpoint,
        tensors=tensors,
        source="tier" if checkpoint.path.parent == tier else "ssd",
        problems=(*problems, *damaged),
    )


def _newer_than_disk(
    client: AgentClient, root: Path, step: int | None
) -> Iterator[tuple[Found, Segment]]:
    """What can be restored from memory and is as new as the newest valid one on disk.

    The tier has nothing newer: it is filled from the disk, and numbers begin above all its own.
    """
    images = client.recall()
    if not images:
        return
    valid = (one for one in scan(root) if one.problem is None and step in (None, one.step))
    oldest = next((one.sequence for one in valid), -1)
    for image, segment in images:
        manifest = decode_manifest(image.manifest)
        if step in (None, manifest.step) and manifest.sequence >= oldest:
            yield (
                Found(
                    path=root / str(manifest.name),
                    name=manifest.name,
                    manifests=(manifest,),
                    problem=None,
                    committed=False,
                ),
                segment,
            )


def _from_slot(found: Found, segment: Segment, problems: list[str]) -> Loaded:
    checkpoint = Checkpoint(found)
    views = checkpoint.load_from(memoryview(segment.memory))
    # Objects of the user's may keep what they are given, and the slot will be written again.
    # Tensors of model and optimizers are copied into theirs.
    tensors = {
        name: view if name.startswith(("model.", "optim.")) else view.clone()
        for name, view in views.items()
    }
    return Loaded(checkpoint=checkpoint, tensors=tensors, source="memory", problems=tuple(problems))
