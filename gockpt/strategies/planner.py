"""When to open the first window, and how much goes into each: the plan from what was measured.

A plan is made anew after each checkpoint, on the outbox thread; the training thread uses the
newest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gockpt import fingerprint
from gockpt.devices.base import Device
from gockpt.inventory import Inventory, LiveParam, element_bytes
from gockpt.plan import Plan, plan
from gockpt.situation import Gradients, Situation
from gockpt.strategies.meter import FORWARD_SHARE, Meter
from gockpt.strategies.policy import Policy

log = logging.getLogger("gockpt")

ALIKE = 0.02
"""Plans that differ by less than this share of the parameters, in any window, count as the same."""

FINGERPRINT_BYTES = 16
"""Of one run: its sum and its sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user, and the memory that was allocated, allow."""

    every: int | None
    windows: int | None
    share: float
    slots: int
    slot_bytes: int
    ring_bytes: int
    write_rate: float | None
    proof: bool


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What an inventory has to send."""

    inventory: Inventory
    narrow: bool
    elements: int
    state: int
    gradients: int
    whole: int


class Planner:
    """Plans the next checkpoint of one strategy."""

    def __init__(self, policy: Policy, meter: Meter, device: Device, limits: Limits) -> None:
        self._policy = policy
        self._meter = meter
        self._device = device
        self._limits = limits
        self.current: Plan | None = None
        """The newest plan, once there is one."""
        self.reused = 0
        """Bytes of what is copied whole that lay in the last checkpoint's slot already."""
        self._told = 0
        """Windows of the plan that was last logged."""
        self._sizes: _Sizes | None = None
        self._situation: Situation | None = None

    def forget(self) -> None:
        """What was known of the training no longer holds."""
        self.current = None

    def prepare(self, inventory: Inventory, *, narrow: bool, gradients: Gradients) -> None:
        """Plan the next checkpoint with what has been measured so far (a few milliseconds)."""
        if self._plans and self._meter.known and inventory.replayable:
            made = self._plan(inventory, narrow, gradients)
            if self.current is None or not _alike(made, self.current):
                if self._told != made.windows:
                    log.info("planned: %s", made.note)
                self.current, self._told = made, made.windows

    @property
    def _plans(self) -> bool:
        return self._policy.max_windows > 1 and self._limits.windows is None

    @property
    def wanting(self) -> bool:
        """Whether there is no plan yet, and enough is known to make one."""
        return self._plans and self.current is None and self._meter.known

    def windows(self, inventory: Inventory) -> int:
        """K for the next checkpoint."""
        limits = self._limits
        if self._policy.max_windows == 1 or not inventory.replayable:
            return 1
        if limits.windows is not None:
            return min(limits.windows, limits.every or limits.windows)
        return 1 if self.current is None else min(self.current.windows, self._policy.max_windows)

    def budgets(self, inventory: Inventory, windows: int) -> Sequence[int]:
        """Elements for each window; the last one takes the rest, whatever that is."""
        known = self.current
        several = windows > 1 and self._policy.planned
        if several and known is not None and known.windows == windows:
            return known.budgets
        elements = sum(live.param.numel() for live in inventory.replayable)
        if not several:
            return [elements]
        if known is None or self._limits.windows is not None:
            share = -(-elements // windows)
            return [share] * (windows - 1) + [max(0, elements - share * (windows - 1))]
        # It opens late, or early for another one: as much as the link will carry.
        return plan(self._situation, windows=windows).budgets if self._situation else [elements]

    def _plan(self, inventory: Inventory, narrow: bool, gradients: Gradients) -> Plan:
        found = self.situation(inventory, narrow=narrow, gradients=gradients)
        self._situation = replace(found, share=1.0)
        if not self._policy.planned:
            # As in the paper: no slack, nothing kept free, and the rate that its pieces reach.
            rate = found.link_rate * self._policy.piece_efficiency
            found = replace(found, share=1.0, slack=0.0, link_rate=rate)
            if self._policy.wait_gradients:
                # They take nothing from the windows: all of them is stall, so fewer windows do.
                found = replace(found, gradients="written")
        return plan(found)

    def situation(self, inventory: Inventory, *, narrow: bool, gradients: Gradients) -> Situation:
        """What is known now."""
        limits, meter = self._limits, self._meter
        sizes = self._sizes_of(inventory, narrow)
        elements = max(1, sizes.elements)
        window = meter.window.value or 0.0
        link = meter.link.value or 1.0
        whole = max(0, sizes.whole - self.reused)
        # In the last window the link also waits for the device to read the state for the proof.
        proof = int(whole + (meter.proof.value or 0.0) * link) if limits.proof else 0
        return Situation(
            params=sizes.elements,
            state_bytes=max(1.0, sizes.state / elements),
            grad_bytes=max(1.0, sizes.gradients / elements),
            window_s=window,
            update_s=meter.update.value or 0.0,
            forward_s=window * FORWARD_SHARE,
            link_rate=link,
            link_rate_alone=self._device.link_rate(computing=False),
            whole_bytes=proof or whole,
            share=limits.share,
            replay_rate=meter.replay.value,
            write_rate=limits.write_rate,
            gradients=gradients,
            every=limits.every,
            image_bytes=limits.slot_bytes,
            slots=limits.slots,
            ring=limits.ring_bytes,
            headroom=self._device.headroom(),
        )

    def _sizes_of(self, inventory: Inventory, narrow: bool) -> _Sizes:
        found = self._sizes
        if found is None or found.inventory is not inventory or found.narrow != narrow:
            found = self._sizes = _measure(inventory, narrow, proof=self._limits.proof)
        return found


def _alike(one: Plan, two: Plan) -> bool:
    """Whether the difference is not worth cutting all blocks anew."""
    if one.windows != two.windows or sum(one.budgets) != sum(two.budgets):
        return False
    near = ALIKE * sum(one.budgets)
    both = zip(accumulate(one.budgets), accumulate(two.budgets), strict=True)
    return all(abs(a - b) <= near for a, b in both)


def _measure(inventory: Inventory, narrow: bool, *, proof: bool) -> _Sizes:
    layout = inventory.layout
    numels = [live.param.numel() for live in inventory.replayable]
    state = [n * element_bytes(layout, p) for n, p in zip(numels, layout.params, strict=True)]
    gradients = [
        n * grad_itemsize(live, narrow=narrow)
        for n, live in zip(numels, inventory.replayable, strict=True)
    ]
    prints = fingerprint.offsets(layout)[-1] * FINGERPRINT_BYTES if proof else 0
    return _Sizes(
        inventory=inventory,
        narrow=narrow,
        elements=sum(numels),
        state=sum(state),
        gradients=sum(gradients),
        whole=whole_bytes(inventory) + prints,
    )


def grad_itemsize(live: LiveParam, *, narrow: bool = True) -> int:
    """Bytes of one element of the gradient as it will be sent."""
    model = live.model_tensor
    if narrow and model is not None and model.dtype.itemsize == 2:
        return 2
    return live.param.element_size()


def whole_bytes(inventory: Inventory) -> int:
    """Bytes that go in the last window whatever the plan."""
    layout = inventory.layout
    sent = layout.of_blocks()
    return sum(entry.nbytes for index, entry in enumerate(layout.entries) if index not in sent)
