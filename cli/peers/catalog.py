"""The engines of other people that the bench knows, and whether they can run here.

Runs in the parent, before anything is started, and in workers. What always holds: an engine that
cannot run is named with the reason; none is left out silently.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import cast

from gockpt.cli import output
from gockpt.cli.peers.engine import Engine
from gockpt.cli.peers.host import Host
from gockpt.cli.task import Task
from gockpt.errors import ConfigError, GockptError, suggestion
from gockpt.strategies import POLICIES
from gockpt.workloads import param_count

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """What "saved" means where this engine says so."""

    fsync: bool
    """The data is forced to the disk before."""
    atomic: bool
    """It appears as a whole, by a rename at the end."""
    verified: bool
    """Data that was altered on the disk is noticed when it is read."""
    note: str
    """The details, and where they are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One engine, as it is used here."""

    name: str
    summary: str
    distribution: str
    """The package that it comes in."""
    adapter: str
    """``module:class`` in this package; empty if there is none."""
    durability: Durability | None = None
    obstacle: str | None = None
    """Why it cannot run anywhere with this version of torch."""
    shares_state: bool = False
    """It hands the whole state over in ``/dev/shm``."""

    @property
    def version(self) -> str | None:
        """Of its package; None if that is not installed."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def why_not(self, task: Task) -> str | None:
        """Why it cannot run this task here, or None. Imports its package."""
        if self.obstacle is not None:
            return self.obstacle
        if self.version is None:
            return f"{self.distribution} is not installed; pip install 'gockpt[peers]'"
        return self._import_error() or (_too_small(task) if self.shares_state else None)

    def _import_error(self) -> str | None:
        try:
            self.engine()
        except Exception as error:  # noqa: BLE001 - other people's import: it may raise anything
            reason = " ".join(str(error).split())
            version = f"{self.distribution} {self.version}"
            return f"{version} cannot be imported: {type(error).__name__}: {reason}"
        return None

    def engine(self) -> Callable[[Path, Host], Engine]:
        """Its adapter's class."""
        module, _, name = self.adapter.partition(":")
        found = getattr(importlib.import_module(f"gockpt.cli.peers.{module}"), name)
        return cast(Callable[[Path, Host], Engine], found)


_DCP = (
    "each file is fsynced, though before the last bytes of Python's buffer are flushed to it; "
    ".metadata comes last, under another name first; no checksums (torch, "
    "distributed/checkpoint/filesystem.py: _write_files_from_queue, finish)"
)

OURS = Durability(
    fsync=True,
    atomic=True,
    verified=True,
    note="fdatasync of data and fsync of manifest and directory, then a rename; xxh3-128 of every "
    "byte is checked while reading (docs/format.md)",
)

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="torch-save",
            summary="torch.save of everything to a new file; training waits",
            distribution="torch",
            adapter="torch_save:TorchSave",
            durability=Durability(
                fsync=False,
                atomic=False,
                verified=False,
                note="written in place, neither synced nor renamed; the archive's checksums are "
                "not compared when it is loaded (torch, serialization.py: save, load; an altered "
                "byte in it was loaded without an error)",
            ),
        ),
        Peer(
            name="dcp",
            summary="torch.distributed.checkpoint.save; training waits",
            distribution="torch",
            adapter="dcp:Dcp",
            durability=Durability(fsync=True, atomic=True, verified=False, note=_DCP),
        ),
        Peer(
            name="dcp-async",
            summary="torch.distributed.checkpoint.async_save as it is by default: copied while "
            "training waits, written by a thread",
            distribution="torch",
            adapter="dcp:DcpAsync",
            durability=Durability(fsync=True, atomic=True, verified=False, note=_DCP),
        ),
        Peer(
            name="dcp-async-process",
            summary="async_save as torchtitan's best mode has it: copied behind forward and "
            "backward into shared memory, written by another process",
            distribution="torch",
            adapter="dcp:DcpAsyncProcess",
            durability=Durability(fsync=True, atomic=True, verified=False, note=_DCP),
            shares_state=True,
        ),
        Peer(
            name="torch-checkpointing",
            summary="its CheckpointManager: copied behind forward and backward into shared memory, "
            "written by another process",
            distribution="torch-checkpointing",
            adapter="torch_checkpointing:TorchCheckpointing",
            durability=Durability(
                fsync=False,
                atomic=True,
                verified=False,
                note="written to a temporary directory that is renamed, nothing is synced; no "
                "checksums (checkpoint_writer.py: write; storage/filesystem.py: WriteStream). "
                "Without its default of direct writes, with which it could not write here",
            ),
            shares_state=True,
        ),
        Peer(
            name="torchsnapshot",
            summary="Snapshot.async_take: copied while training waits, written by a thread",
            distribution="torchsnapshot",
            adapter="torchsnapshot:TorchSnapshot",
            durability=Durability(
                fsync=False,
                atomic=False,
                verified=False,
                note="the metadata is written last, but in place; nothing is synced; no checksums "
                "(storage_plugins/fs.py: write; snapshot.py: PendingSnapshot)",
            ),
        ),
        Peer(
            name="nvidia-resiliency-ext",
            summary="TorchAsyncCheckpoint: copied while training waits, written by another process",
            distribution="nvidia-resiliency-ext",
            adapter="resiliency:Resiliency",
            durability=Durability(
                fsync=False,
                atomic=False,
                verified=False,
                note="torch.save in place in its process, so as torch-save "
                "(checkpointing/async_ckpt/torch_ckpt.py, core.py: async_loop)",
            ),
            shares_state=True,
        ),
        Peer(
            name="dlrover-flash",
            summary="flash checkpoint's DdpCheckpointer: copied into shared memory while training "
            "waits, written by another process",
            distribution="dlrover",
            adapter="dlrover:Dlrover",
            durability=Durability(
                fsync=False,
                atomic=False,
                verified=False,
                note="torch.save in place, not synced; then the file that names the newest step is "
                "written over, synced but not renamed; no checksums "
                "(python/elastic_agent/torch/ckpt_saver.py: persist_to_storage, "
                "update_tracker_file; python/common/storage.py: write)",
            ),
            shares_state=True,
        ),
        Peer(
            name="bytecheckpoint",
            summary="ByteCheckpoint",
            distribution="bytecheckpoint",
            adapter="",
            obstacle="its newest package that can be had (0.0.2, 2025-07) does not install beside "
            "this torch: it wants 2.5.0 at most",
        ),
    )
}


def find(name: str) -> Peer | None:
    """The engine of that name, if it is somebody else's."""
    return PEERS.get(name)


def check_name(name: str) -> None:
    """
    Raises:
        ConfigError: neither a strategy nor an engine; the message names the nearest.
    """
    known = [*POLICIES, *PEERS]
    if name in known:
        return
    hint = suggestion(name, known)
    raise ConfigError(f"unknown strategy {name!r}; {hint}")


def check_runs(name: str, task: Task) -> None:
    """
    Raises:
        ConfigError: an engine that was asked for by name and cannot run here.
    """
    peer = find(name)
    reason = None if peer is None else peer.why_not(task)
    if reason is not None:
        raise ConfigError(f"{name} cannot run here: {reason}")


def sort_out(task: Task) -> tuple[list[str], list[tuple[str, str]]]:
    """All engines: those that can run this task here, and (name, reason) of those that cannot."""
    reasons = {name: peer.why_not(task) for name, peer in PEERS.items()}
    return (
        [name for name, reason in reasons.items() if reason is None],
        [(name, reason) for name, reason in reasons.items() if reason is not None],
    )


def start(name: str, directory: Path, host: Host) -> Engine:
    """The engine, over this directory.

    Raises:
        GockptError: it did not start.
    """
    try:
        return PEERS[name].engine()(directory, host)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise GockptError(f"it did not start: {type(error).__name__}: {reason}") from error


def stated(strategies: tuple[str, ...]) -> Mapping[str, tuple[str, Durability]]:
    """Strategy → (version, what "saved" means), of all that save."""
    found: dict[str, tuple[str, Durability]] = {}
    for name in strategies:
        peer = find(name)
        if peer is None and POLICIES[name].saves:
            found[name] = ("", OURS)
        elif peer is not None and peer.durability is not None:
            found[name] = (f"{peer.distribution} {peer.version}", peer.durability)
    return found


def _too_small(task: Task) -> str | None:
    """Whether the state does not fit into shared memory, which containers often have little of."""
    need = param_count(task.real_preset) * task.number_format.state_bytes
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return f"there is no {SHARED_MEMORY}, through which it hands the state over"
    if free >= need:
        return None
    return (
        f"it hands the state over in {SHARED_MEMORY}, which has {output.size(free)} free of the "
        f"{output.size(need)} needed"
    )
