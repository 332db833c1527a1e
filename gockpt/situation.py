"""What is known of the training, the link and the host when a checkpoint is planned.

Pure records; used on the training thread and by ``gockpt plan``. Sizes are bytes, times seconds,
rates per second, all for one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

Gradients = Literal["fresh", "reused", "zeroed", "written"]
"""What happens to gradient buffers after the update, and so until when they must have been copied:

- ``fresh``: each pass allocates new ones; no deadline (but holding the old ones costs memory);
- ``reused``: the next backward overwrites them (DDP's bucket views): by the end of the forward;
- ``zeroed``: ``zero_grad(set_to_none=False)``: by the end of the update;
- ``written``: the update itself overwrites them: before the update, so every byte is stall.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the plan depends on. Bytes, seconds, bytes a second, for one rank."""

    params: int
    """Elements that can be captured early and replayed (N)."""
    state_bytes: float
    """Bytes to send for each of them, with optimizer state (s); an average may be fractional."""
    grad_bytes: float
    """Bytes of its gradient (g)."""
    window_s: float
    """From the end of one pass to the next update: forward and backward (T)."""
    update_s: float
    """The optimizer's update (U)."""
    forward_s: float = 0.0
    """The part of the window before gradients are written again (F)."""
    link_rate: float
    """Device to host, measured inside windows (B)."""
    link_rate_alone: float | None = None
    """The same while the device waits; None: as inside windows."""
    whole_bytes: int = 0
    """What always goes in the last window: buffers, parameters that can't be replayed."""
    share: float = 0.9
    """The share of the link that may be planned with (φ)."""
    slack: float = 0.15
    """The share of the last window that is left empty."""
    replay_rate: float | None = None
    """Parameter updates a second (R); None: never the limit."""
    write_rate: float | None = None
    """Bytes a second to durable storage; None: never the limit."""
    gradients: Gradients = "fresh"
    every: int | None = None
    """Steps between checkpoints: K is at most this."""
    image_bytes: int | None = None
    """Size of a slot; None: what is sent."""
    slots: int = 2
    ring: int | None = None
    """Bytes of the gradient ring; None: as large as it has to be."""
    memory_limit: int | None = None
    """Host bytes for slots and ring together."""
    headroom: int | None = None
    """Device bytes that held gradients may take in the next forward; None: no limit."""

    def __post_init__(self) -> None:
        positive = ("state_bytes", "grad_bytes", "link_rate", "share")
        if bad := [name for name in positive if not getattr(self, name) > 0]:
            raise ValueError(f"{bad[0]} must be positive")
        nonnegative = ("params", "whole_bytes", "window_s", "update_s", "forward_s", "slack")
        if bad := [name for name in nonnegative if not getattr(self, name) >= 0]:
            raise ValueError(f"{bad[0]} must not be negative")
        if self.share > 1 or self.slack >= 1:
            raise ValueError("share must be at most 1, and slack below 1")
        if self.ring is not None and self.ring < 0:
            raise ValueError("ring must not be negative")
        if self.every is not None and self.every < 1:
            raise ValueError("every must be at least 1")

    @property
    def alone(self) -> float:
        """Bytes a second while training waits."""
        return self.link_rate if self.link_rate_alone is None else self.link_rate_alone

    @property
    def sent_bytes(self) -> float:
        """The state, sent once."""
        return self.state_bytes * self.params + self.whole_bytes

    @property
    def grace_s(self) -> float:
        """Seconds from the start of an update until its gradients must have been copied."""
        return {
            "fresh": math.inf,
            "reused": self.update_s + self.forward_s,
            "zeroed": self.update_s,
            "written": 0.0,
        }[self.gradients]

    @property
    def image(self) -> int:
        """Bytes of a slot, and of the file."""
        return math.ceil(self.sent_bytes) if self.image_bytes is None else self.image_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Moving averages of what a plan depends on; None: not measured yet. Units as in Situation."""

    window_s: float | None = None
    update_s: float | None = None
    forward_s: float | None = None
    link_rate: float | None = None
    link_rate_alone: float | None = None
    replay_rate: float | None = None
    weight: float = 0.3
    """How much a new measurement counts."""

    def update(self, **measured: float | None) -> Estimates:
        """With one more measurement of some of them (None: not measured this time).

        Raises:
            TypeError: a name that is no estimate.
        """
        means: dict[str, Any] = {name: self._mean(name, new) for name, new in measured.items()}
        return replace(self, **means)

    def _mean(self, name: str, new: float | None) -> float | None:
        old: float | None = getattr(self, name)
        if new is None or old is None:
            return old if new is None else new
        return old + self.weight * (new - old)

    def apply(self, s: Situation) -> Situation:
        """The situation with every figure that has been measured."""
        known = {
            field.name: value
            for field in fields(self)
            if field.name != "weight" and (value := getattr(self, field.name)) is not None
        }
        return replace(s, **known)
