"""What a capture needs and can be made before its first window: plan, views, blocks.

Made on the outbox thread beside the training, or on the training thread where there was no time.
What always holds: nothing made beside the training is used unless it is still true.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gockpt.agent.client import AgentClient
from gockpt.errors import StateError
from gockpt.inventory import Inventory
from gockpt.situation import Gradients
from gockpt.strategies.blocks import Blocks
from gockpt.strategies.planner import Planner
from gockpt.strategies.staging import Staging
from gockpt.strategies.views import Views

log = logging.getLogger("gockpt")


class Preparation:
    """Views for the structure as it is, and blocks for each slot."""

    def __init__(self, client: AgentClient, staging: Staging, piece_bytes: int | None) -> None:
        self._client = client
        self._staging = staging
        self._piece_bytes = piece_bytes
        self._views: Views | None = None
        self._blocks: dict[int, Blocks] = {}

    @property
    def begun(self) -> bool:
        """Whether there are any views."""
        return self._views is not None

    def views(self, inventory: Inventory) -> Views:
        """Views that fit the optimizer state as it is now."""
        found = self._views
        if found is None or found.inventory is not inventory or found.stale():
            found = self._views = Views(inventory)
        return found

    def blocks(self, slot: int, views: Views, budgets: Sequence[int]) -> Blocks:
        """The blocks of a checkpoint in this slot."""
        segment = self._client.slot(slot)
        found = self._blocks.get(slot)
        if (
            found is None
            or found.views is not views
            or found.segment is not segment
            or found.budgets != tuple(budgets)
        ):
            found = self._blocks[slot] = Blocks(
                views,
                slot=slot,
                segment=segment,
                budgets=budgets,
                piece_bytes=self._piece_bytes,
                staging=self._staging,
            )
        return found

    def ahead(
        self,
        inventory: Inventory,
        planner: Planner,
        *,
        slots: int,
        narrow: bool,
        one: bool,
        gradients: Gradients,
    ) -> None:
        """Plan the next checkpoint and make its blocks.

        Args:
            narrow: gradients are sent in 16 bits where that is exact.
            one: it will be taken in one window whatever the plan.
        """
        planner.prepare(inventory, narrow=narrow, gradients=gradients)
        windows = 1 if one else planner.windows(inventory)
        try:
            views = self.views(inventory)
        except StateError as error:
            log.debug("the training changes just now, its blocks are made later: %s", error)
            return
        for slot in range(slots):
            self.blocks(slot, views, planner.budgets(inventory, windows))
