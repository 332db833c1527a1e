"""The strategies, as what they differ in. All run over the same device, agent, proof and storage.

A strategy is a value, not a subclass: so a comparison of two compares exactly the differences that
stand in this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from gockpt.errors import ConfigError, suggestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One strategy."""

    name: str
    summary: str
    saves: bool = True
    """False: no checkpoints at all."""
    wait_copied: bool = False
    """``step()`` returns only when the state has left the device."""
    wait_durable: bool = False
    """``step()`` returns only when the checkpoint is durable."""
    max_windows: int = 1
    planned: bool = False
    """Windows and their budgets come from the plan; else each is filled as it comes."""
    wait_gradients: bool = False
    """The update waits until its gradients have left the device."""
    piece_bytes: int | None = None
    """State moves in pieces of this size…"""
    piece_efficiency: float = 1.0
    """…which reach this share of the link's rate (modelled devices only)."""


_PAPER = "as GoCkpt's paper has it: at most 7 windows, filled as they come, 4 MB pieces; "

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(name="none", summary="no checkpoints: the ideal", saves=False),
        Policy(
            name="sync",
            summary="copy and write while training waits",
            wait_copied=True,
            wait_durable=True,
        ),
        Policy(
            name="async",
            summary="copy while training waits, write behind",
            wait_copied=True,
        ),
        Policy(
            name="async-o",
            summary="copy behind one forward and backward, the update waits for the rest",
        ),
        Policy(
            name="gockpt-paper",
            summary=_PAPER + "the update waits for gradients",
            max_windows=7,
            wait_gradients=True,
            piece_bytes=4 << 20,
            piece_efficiency=0.8,
        ),
        Policy(
            name="gockpt-o-paper",
            summary=_PAPER + "gradients overlap the update",
            max_windows=7,
            piece_bytes=4 << 20,
            piece_efficiency=0.8,
        ),
        Policy(
            name="gockpt",
            summary="this engine: planned windows, gradients overlap, nothing waits",
            max_windows=64,
            planned=True,
        ),
    )
}


def policy(name: str) -> Policy:
    """The strategy of that name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    found = POLICIES.get(name)
    if found is None:
        hint = suggestion(name, POLICIES)
        raise ConfigError(f"unknown strategy {name!r}; {hint}")
    return found
