"""What an engine's own copies and writes cost on the modelled host.

Safe from any thread. The work itself is the engine's and is really done; on an emulated device the
time that the modelled link or disk would have needed is waited for where that work is done. On a
real device nothing is added. Shared by all checkpoints of a run, as gockpt's own share the link and
the disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from gockpt.cli.peers.engine import REHEARSAL, size
from gockpt.devices import Device, EmulatedDevice
from gockpt.errors import DeviceError
from gockpt.pace import sleep_until

P = ParamSpec("P")
R = TypeVar("R")

DEADLINE_S = 600.0
"""How long a copy may take to pass the link."""


class Link:
    """From the device to the host.

    Attributes:
        nbytes: what has passed, less the rehearsal.
    """

    def __init__(self, device: Device) -> None:
        self.nbytes = 0
        self._device = device
        self._expected = (0, 0)
        self._lock = threading.Lock()

    @contextmanager
    def carrying(self, nbytes: int, step: int) -> Iterator[None]:
        """The body copies this many bytes; it ends no sooner than they would have passed."""
        if step != REHEARSAL:
            with self._lock:
                self.nbytes += nbytes
        if not isinstance(self._device, EmulatedDevice):
            yield
            return
        passing = self._device.occupy_link(nbytes, lane="state", step=step)
        yield
        if not passing.wait(DEADLINE_S):
            raise DeviceError(f"step {step}: the link was not free within {DEADLINE_S:.0f} s")

    def expect(self, nbytes: int, step: int) -> None:
        """This is what the next copy of a function from :meth:`over` carries."""
        self._expected = nbytes, step

    def over(self, copy: Callable[P, R]) -> Callable[P, R]:
        """An engine's own copying, over the link, on whatever thread it does that."""

        def linked(*args: P.args, **options: P.kwargs) -> R:
            with self.carrying(*self._expected):
                return copy(*args, **options)

        return linked


class Disk:
    """The disk that checkpoints are written to. May be sent to another process."""

    def __init__(self, rate: float | None) -> None:
        """``rate`` in bytes a second; None: as fast as it really is."""
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """The body writes what then lies at ``path``; it ends no sooner than the disk could."""
        began = time.monotonic()
        yield
        self.wrote(path, began)

    def wrote(self, path: Path, began: float) -> None:
        """What lies at ``path`` was written since ``began``; wait as long as the disk would."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, began) + size(path) / self._rate
            until = self._free_at
        sleep_until(until)

    @property
    def rate(self) -> float | None:
        """Bytes a second; None: as fast as it really is."""
        return self._rate

    def __getstate__(self) -> dict[str, Any]:
        return {"rate": self._rate}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rate"])  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Both, and whose they are."""

    link: Link
    disk: Disk

    @classmethod
    def of(cls, device: Device) -> Host:
        """The host of a device: modelled if the device is."""
        rate = device.rates.ssd_write if isinstance(device, EmulatedDevice) else None
        return cls(link=Link(device), disk=Disk(rate))
