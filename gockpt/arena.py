"""Host memory that a trainer and its agent share: slots, the gradient ring, the scratch area.

A *slot* holds one whole checkpoint, laid out as the file will be. The *ring* holds gradients on
their way to the replay. Each slot also has a *scratch* area for the fingerprint that its content is
proved by.

Memory is a ``memfd`` where the system has it (it can be handed to another process and is not
limited by the size of ``/dev/shm``), anonymous memory elsewhere. It is allocated once, before the
first checkpoint, and reused. Who may write what: a slot belongs to the trainer while it is FILLING
and, block by block, to the agent after the block's copy has finished; see :class:`SlotState`.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum

import torch
from torch import Tensor

from gockpt.state import PAGE, align


class SlotState(Enum):
    """Life of a slot. Only a new FILLING takes a RETAINED slot, never the newest consistent one.

    A DROPPED one is FREE once the agent has let go of it.
    """

    FREE = "free"
    FILLING = "filling"
    CONSISTENT = "consistent"
    RETAINED = "retained"
    DROPPED = "dropped"


class Segment:
    """A piece of shared memory, mapped into this process."""

    def __init__(self, size: int, *, fd: int | None) -> None:
        self.size = size
        self.fd = fd
        flags = mmap.MAP_SHARED if fd is not None else mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        # Populated now: a first touch in the middle of a copy would cost more than the copy.
        flags |= getattr(mmap, "MAP_POPULATE", 0)
        self.memory = mmap.mmap(-1 if fd is None else fd, size, flags=flags)
        self.tensor: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)

    @classmethod
    def create(cls, name: str, size: int) -> Segment:
        """Allocate at least ``size`` bytes.

        Raises:
            OSError: there is not enough memory.
        """
        size = align(max(size, 1), PAGE)
        if not hasattr(os, "memfd_create"):
            return cls(size, fd=None)
        fd = os.memfd_create(f"gockpt-{name}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(size, fd=fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Give up the descriptor; the mapping goes when the last view of it goes."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements at a byte offset, as a 1-D tensor on this memory."""
        return self.tensor[offset : offset + numel * dtype.itemsize].view(dtype)


class Ring:
    """Allocates stretches of the ring in order; a place is free again with all that lies before it.

    Belongs to the trainer; the agent only says which allocations it has used up.
    """

    def __init__(self, size: int, tickets: int = 0) -> None:
        """
        Args:
            tickets: the last one of the ring before, of which some may still be told of.
        """
        self.size = size
        self.tickets = tickets
        """The last one that was given out."""
        self._head = 0
        self._live: deque[tuple[int, int, int]] = deque()  # (ticket, start, stop)
        self._done: set[int] = set()
        """Those of them that are used up, but lie behind others that are not."""

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """Return (ticket, offset) of a contiguous stretch, or None if it is not free yet."""
        nbytes = align(max(nbytes, 1))  # an empty stretch would make an empty ring look full
        if nbytes > self.size:
            return None
        start = self._place(nbytes)
        if start is None:
            return None
        self._head = start + nbytes
        self.tickets += 1
        self._live.append((self.tickets, start, self._head))
        return self.tickets, start

    def _place(self, nbytes: int) -> int | None:
        if not self._live:
            return 0
        tail = self._live[0][1]
        if self._head > tail:
            if self._head + nbytes <= self.size:
                return self._head
            return 0 if nbytes < tail else None
        return self._head if self._head + nbytes < tail else None

    def free(self, tickets: Iterable[int]) -> None:
        """These have been used up, and nothing but these; once more does no harm."""
        self._done.update(tickets)
        while self._live and self._live[0][0] in self._done:
            self._done.remove(self._live.popleft()[0])
        first = self._live[0][0] if self._live else self.tickets + 1
        self._done = {ticket for ticket in self._done if ticket > first}

    def only(self, tickets: Collection[int]) -> bool:
        """Whether nothing is in use but these: then there will be no more room for them."""
        return all(ticket in tickets for ticket, _, _ in self._live)

    @property
    def used(self) -> int:
        """Bytes allocated now."""
        return sum(stop - start for _, start, stop in self._live)
