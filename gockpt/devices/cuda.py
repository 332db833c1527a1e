"""NVIDIA GPUs: streams, events, pinned memory.

Used by the training thread; :mod:`.launcher` does the launching on a thread of its own. What
always holds:

* A stream that waits for an event that is not recorded yet does not wait at all. A gate therefore
  first waits, on the host, until its job is launched, and only then lets the compute stream wait,
  on the device, for the job's end.
* Sources in host memory (Adam's ``step`` is there) are copied at once, by the caller: no stream
  orders them before the host's next write.
* Whatever is not plain dense memory is made so on the device first. torch would finish such a copy
  on the host, before its bytes have arrived.
"""

# mypy: disable-error-code="no-untyped-call"
# torch.cuda's streams and events are not annotated.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from gockpt.devices.accounting import Blocked
from gockpt.devices.base import Copied, Pair, Pairs
from gockpt.devices.launcher import CudaCopied, Launcher, Stretch
from gockpt.devices.transfer import check_pair
from gockpt.errors import DeviceError
from gockpt.events import Recorder

DEADLINE_S = 600.0
"""How long a gate, synchronize or close waits before it gives up on the copy stream."""

PIECES_AHEAD = 2
"""Pieces submitted beyond the one that the link is at, so that it never runs dry."""

PROBE_BYTES = 64 << 20

PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device."""


class CudaDevice:
    """One NVIDIA GPU. Not for use while a CUDA graph is captured."""

    emulated = False

    def __init__(
        self, index: int = 0, *, recorder: Recorder | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        if not torch.cuda.is_available():
            raise DeviceError("no CUDA device is available; use cpu, or emulated:a100-pcie4")
        if not 0 <= index < torch.cuda.device_count():
            raise DeviceError(f"no cuda:{index}; there are {torch.cuda.device_count()} devices")
        self.name = f"cuda:{index}"
        self.recorder = Recorder() if recorder is None else recorder
        self._index = index
        self._deadline_s = deadline_s
        self._blocked = Blocked(self.recorder)
        self._rate: float | None = None
        self._registered: dict[int, Tensor] = {}
        self._launcher = Launcher(self.name, index, self.recorder)

    def copy(
        self,
        pairs: Pairs,
        *,
        lane: str,
        step: int,
        piece_bytes: int | None = None,
        piece_efficiency: float = 1.0,
    ) -> CudaCopied:
        """Queue copies. With ``piece_bytes`` only a few pieces are submitted ahead of the link.

        Raises:
            DeviceError: the device is closed, or a source in host memory cannot be copied.
        """
        if callable(pairs):
            find = pairs
            return self._launcher.queue(
                lambda copied: self._submit_found(find()), lane=lane, step=step, pairs=None
            )
        _copy_from_host(pairs)
        submit = partial(self._submit_pieces, tuple(pairs), piece_bytes)
        return self._launcher.queue(submit, lane=lane, step=step, pairs=len(pairs))

    def run(
        self, work: Callable[[], None], *, device_bytes: int, lane: str, step: int
    ) -> CudaCopied:
        """Queue work that the launcher thread calls with the copy stream current."""
        return self._launcher.queue(lambda copied: work(), lane=lane, step=step)

    def gate(self, after: Copied, *, name: str, step: int) -> None:
        """Let the compute stream wait for ``after``; the host waits only until it is launched."""
        if not isinstance(after, CudaCopied):
            raise DeviceError(f"{self.name} cannot wait for what another device copies")
        if not after.launched.is_set():
            with self._blocked.during(name, step):
                if not after.wait_launched(self._deadline_s):
                    raise self._stuck(f"{name} of step {step}")
        after.raise_failure()
        if after.done():
            after.raise_failure()  # It may have failed on the device since.
            return
        first = self._mark()
        torch.cuda.current_stream(self._index).wait_event(after.end)
        self._watch("stall", name, step, first)

    def hold(self, name: str, step: int) -> AbstractContextManager[None]:
        """Count the body's host time as blocked."""
        return self._blocked.during(name, step)

    def blocked_seconds(self) -> float:
        """Host time in holds, and device time at the gates that the device has passed so far."""
        self._launcher.reap()
        return self._blocked.seconds + self._launcher.gated_s

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Record what the body queues on the compute stream as a span of device time."""
        first = self._mark()
        try:
            yield
        finally:
            self._watch("compute", name, step, first)

    def register(self, memory: Tensor) -> None:
        """Pin host memory in place (``cudaHostRegister``); slow, so done once per memory."""
        address = memory.data_ptr()
        if memory.nbytes == 0 or address in self._registered:
            return
        failed = self._runtime_error(
            lambda runtime: runtime.cudaHostRegister(address, memory.nbytes, PORTABLE)
        )
        if failed is not None:
            raise DeviceError(
                f"cannot pin {memory.nbytes} bytes of host memory: {failed}; "
                "raise the limit of locked memory (ulimit -l) or of the container"
            ) from failed
        self._registered[address] = memory

    def unregister(self, memory: Tensor) -> None:
        """Unpin what :meth:`register` pinned; anything else is left alone."""
        address = memory.data_ptr()
        if self._registered.pop(address, None) is None:
            return
        failed = self._runtime_error(lambda runtime: runtime.cudaHostUnregister(address))
        if failed is not None:
            raise DeviceError(f"cannot unpin host memory: {failed}") from failed

    def link_rate(self, *, computing: bool = True) -> float:
        """The rate of a copy to pinned memory, measured once; what computing costs shows later."""
        if self._rate is None:
            source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self.name)
            target = torch.zeros(PROBE_BYTES, dtype=torch.uint8).pin_memory()
            self._rate = max(self._measure(target, source) for _ in range(3))
        return self._rate

    def headroom(self) -> int | None:
        """What the device has free, and what torch's allocator keeps unused."""
        free, _ = torch.cuda.mem_get_info(self._index)
        kept = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        return int(free + kept)

    def synchronize(self) -> None:
        """Wait until both streams are empty: every job waits for the compute stream too."""
        last = self._launcher.queue(lambda copied: None, lane="synchronize", step=0)
        if not last.wait(self._deadline_s):
            raise self._stuck("synchronize")
        self._launcher.reap()

    def close(self) -> None:
        """Finish what is queued, end the thread, unpin what is still pinned."""
        self._launcher.close(self._deadline_s)
        for memory in list(self._registered.values()):
            self.unregister(memory)

    def _submit_found(self, pairs: Sequence[Pair]) -> None:
        """Submit pairs that were only now found out. Runs on the launcher thread."""
        _copy_from_host(pairs)
        _submit(pairs)

    def _submit_pieces(
        self, pairs: Sequence[Pair], piece_bytes: int | None, copied: CudaCopied
    ) -> None:
        """Submit all that is not withdrawn. Runs on the launcher thread."""
        ahead: deque[torch.cuda.Event] = deque()
        for first, last in _pieces(pairs, piece_bytes):
            if not copied.progress.begin(last):
                return
            _submit(pairs[first:last])
            if piece_bytes is not None:
                ahead.append(torch.cuda.Event(blocking=True))
                ahead[-1].record(self._launcher.stream)
                if len(ahead) > PIECES_AHEAD:
                    ahead.popleft().synchronize()  # The deadline is with those who wait for us.

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._index))
        return event

    def _watch(self, lane: str, name: str, step: int, first: torch.cuda.Event) -> None:
        last = self._mark()
        self._launcher.watch(Stretch(lane=lane, name=name, step=step, first=first, last=last))

    def _measure(self, target: Tensor, source: Tensor) -> float:
        copied = self.copy([(target, source)], lane="probe", step=0)
        if not copied.wait(self._deadline_s) or not copied.seconds:
            raise self._stuck("measuring the link")
        return PROBE_BYTES / copied.seconds

    def _runtime_error(self, call: Callable[..., int]) -> RuntimeError | None:
        """Call the CUDA runtime on this device; return what it refused."""
        with torch.cuda.device(self._index):
            try:
                torch.cuda.check_error(call(torch.cuda.cudart()))
            except RuntimeError as error:
                self._forget_error()
                return error
        return None

    def _forget_error(self) -> None:
        """The runtime keeps an error for the next launch to report: let this one report it."""
        try:
            torch.ones(1, device=self.name)
        except RuntimeError:
            return

    def _stuck(self, what: str) -> DeviceError:
        return DeviceError(
            f"{self.name}: {what} still waits for a copy after {self._deadline_s:.0f} s; "
            "the copy stream is stuck"
        )


def _pieces(pairs: Sequence[Pair], piece_bytes: int | None) -> Iterator[tuple[int, int]]:
    """Cut the list into runs (first, last) of about ``piece_bytes``; into one if that is None."""
    first, size = 0, 0
    for index, (_, source) in enumerate(pairs, 1):
        size += source.nbytes
        if index == len(pairs) or (piece_bytes is not None and size >= piece_bytes):
            yield first, index
            first, size = index, 0


def _copy_from_host(pairs: Sequence[Pair]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            if not source.is_cuda:
                check_pair(target, source)
                target.view(source.shape).copy_(source)


def _submit(pairs: Sequence[Pair]) -> None:
    """Submit copies on the current stream."""
    targets, sources = [], []
    for target, source in pairs:
        if source.is_cuda:
            check_pair(target, source)
            targets.append(target.view(source.shape))
            sources.append(source.resolve_conj().resolve_neg().contiguous())
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
