"""What only a real CUDA device can show: order between streams. Skipped where there is none.

``torch.cuda._sleep`` keeps a stream busy for long enough that anything which does not wait for it
is seen to have overtaken it.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from gockpt.devices.cuda import CudaDevice, _pieces
from gockpt.errors import DeviceError
from gockpt.fingerprint import Fingerprinter
from gockpt.state import Entry, Layout

BUSY_CYCLES = 500_000_000
SIZE = 1 << 20
SOON = 30.0

cuda = pytest.mark.cuda
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    opened = CudaDevice()
    yield opened
    opened.close()


@pytest.fixture
def target(device: CudaDevice) -> Iterator[torch.Tensor]:
    memory = torch.zeros(SIZE)
    device.register(memory)
    yield memory
    device.synchronize()
    device.unregister(memory)


def busy(device: CudaDevice) -> None:
    """Keep the copy stream busy for a while."""
    device.run(lambda: torch.cuda._sleep(BUSY_CYCLES), device_bytes=0, lane="busy", step=0)


def plug(device: CudaDevice, pulled: threading.Event) -> None:
    """Keep the launcher from launching anything more until ``pulled`` is set."""

    def work() -> None:
        pulled.wait(SOON)

    device.run(work, device_bytes=0, lane="plug", step=0)


@cuda
@needs_cuda
def test_a_gate_holds_the_device_and_not_the_host(device: CudaDevice, target: torch.Tensor) -> None:
    source = torch.ones(SIZE, device=device.name)
    busy(device)
    copied = device.copy([(target, source)], lane="state", step=1)
    device.gate(copied, name="update", step=1)
    assert not copied.done()
    source.fill_(2)
    assert copied.wait(SOON)
    assert target.eq(1).all()
    device.synchronize()
    assert device.blocked_seconds() > 0
    stalls = [span for span in device.recorder.drain() if span.lane == "stall"]
    assert any(span.end > span.start for span in stalls)


@cuda
@needs_cuda
def test_without_a_gate_the_copy_is_overtaken(device: CudaDevice, target: torch.Tensor) -> None:
    source = torch.ones(SIZE, device=device.name)
    busy(device)
    copied = device.copy([(target, source)], lane="state", step=1)
    source.fill_(2)
    assert copied.wait(SOON)
    assert target.eq(2).all()


@cuda
@needs_cuda
def test_a_fingerprint_of_host_tensors_does_not_wait_for_the_copy_stream(
    device: CudaDevice,
) -> None:
    """Adam's ``step`` is in host memory; the launcher goes on while the last window is copied."""
    tensors = [torch.ones(SIZE, device=device.name), torch.ones(()), torch.ones(3, 5)]
    entries = [
        Entry(name=str(n), dtype="float32", shape=tuple(t.shape), order=tuple(range(t.dim())),
              offset=SIZE * 8 * n, aliases=())
        for n, t in enumerate(tensors)
    ]  # fmt: skip
    layout = Layout(entries=entries, params=[], size=SIZE * 32)

    def work() -> None:
        prints = Fingerprinter(layout, list(enumerate(tensors)), torch.device(device.name))
        sums = torch.zeros(prints.runs, dtype=torch.int64, device=device.name)
        prints.run(5, sums, torch.zeros_like(sums))

    for number in range(2):  # the first one may wait for new pinned memory
        busy(device)
        computed = device.run(work, device_bytes=0, lane="proof", step=number)
        assert computed.wait_launched(SOON)
        assert number == 0 or not computed.passed()
        assert computed.wait(SOON)


@cuda
@needs_cuda
def test_a_copy_waits_for_compute_queued_before_it(
    device: CudaDevice, target: torch.Tensor
) -> None:
    source = torch.ones(SIZE, device=device.name)
    torch.cuda._sleep(BUSY_CYCLES)
    source.fill_(3)
    copied = device.copy([(target, source)], lane="state", step=1)
    assert copied.wait(SOON)
    assert target.eq(3).all()


@cuda
@needs_cuda
def test_memory_under_a_copy_is_not_given_out_again(
    device: CudaDevice, target: torch.Tensor
) -> None:
    source = torch.ones(SIZE, device=device.name)
    busy(device)
    copied = device.copy([(target, source)], lane="state", step=1)
    del source
    others = [torch.full((SIZE,), 9.0, device=device.name) for _ in range(8)]
    assert copied.wait(SOON)
    assert target.eq(1).all()
    del others


@cuda
@needs_cuda
def test_a_gate_waits_until_its_job_is_launched(device: CudaDevice, target: torch.Tensor) -> None:
    source = torch.ones(SIZE, device=device.name)
    pulled = threading.Event()
    plug(device, pulled)
    copied = device.copy([(target, source)], lane="state", step=1)
    timer = threading.Timer(0.05, pulled.set)
    timer.start()
    device.gate(copied, name="update", step=1)
    assert pulled.is_set()
    source.fill_(2)
    assert copied.wait(SOON)
    assert target.eq(1).all()
    timer.join()


@cuda
@needs_cuda
def test_withdrawn_pairs_are_never_written(device: CudaDevice, target: torch.Tensor) -> None:
    sources = torch.ones(SIZE, device=device.name).chunk(8)
    pulled = threading.Event()
    plug(device, pulled)
    pairs = list(zip(target.chunk(8), sources, strict=True))
    copied = device.copy(pairs, lane="state", step=1, piece_bytes=sources[0].nbytes)
    assert copied.withdraw() == 0
    pulled.set()
    assert copied.wait(SOON)
    assert target.eq(0).all()


@cuda
@needs_cuda
def test_sources_in_host_memory_are_copied_at_once(
    device: CudaDevice, target: torch.Tensor
) -> None:
    step, kept = torch.tensor(5.0), torch.tensor(0.0)
    busy(device)
    copied = device.copy(
        [(kept, step), (target, torch.ones(SIZE, device=device.name))], lane="state", step=1
    )
    step += 1
    assert copied.wait(SOON)
    assert kept == 5
    assert target.eq(1).all()
    assert copied.withdraw() == 2


@cuda
@needs_cuda
def test_a_refused_pin_is_said_and_forgotten(device: CudaDevice, target: torch.Tensor) -> None:
    assert target.is_pinned()
    other = CudaDevice()
    with pytest.raises(DeviceError, match="cannot pin"):
        other.register(target)
    assert torch.ones(10, device=device.name).sum().item() == 10
    other.close()


@cuda
@needs_cuda
def test_headroom_falls_by_what_is_taken(device: CudaDevice) -> None:
    before = device.headroom()
    taken = torch.zeros(64 << 20, dtype=torch.uint8, device=device.name)
    after = device.headroom()
    assert before is not None
    assert after is not None
    assert before - after >= taken.nbytes // 2


@cuda
@needs_cuda
def test_another_devices_copy_is_refused(device: CudaDevice) -> None:
    from gockpt.devices import CpuDevice

    other = CpuDevice()
    with pytest.raises(DeviceError, match="another device"):
        device.gate(other.copy([], lane="state", step=1), name="update", step=1)
    other.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="no CUDA device is available"):
        CudaDevice()


@pytest.mark.parametrize(
    ("piece_bytes", "expected"),
    [
        (None, [(0, 6)]),
        (40, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]),
        (100, [(0, 3), (3, 6)]),
        (160, [(0, 4), (4, 6)]),
        (10_000, [(0, 6)]),
    ],
)
def test_pieces_cover_every_pair_once(
    piece_bytes: int | None, expected: list[tuple[int, int]]
) -> None:
    pairs = [(torch.zeros(10), torch.zeros(10))] * 6
    assert list(_pieces(pairs, piece_bytes)) == expected
    assert list(_pieces([], piece_bytes)) == []
