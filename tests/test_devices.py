"""Devices: one conformance suite over all of them, and how they are opened."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gockpt.devices import (
    CpuDevice,
    Device,
    EmulatedDevice,
    ModelledWork,
    device_names,
    load_profile,
    open_device,
)
from gockpt.devices.base import Copied
from gockpt.devices.stream import HostCopied
from gockpt.devices.transfer import copy_pairs
from gockpt.errors import DeviceError

SOON = 30.0
QUICK = ModelledWork(forward_s=1e-4, backward_s=1e-4, update_s=1e-4)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def open_for_test(kind: str, deadline_s: float = 600.0) -> Device:
    if kind == "cpu":
        return CpuDevice(deadline_s=deadline_s)
    if kind == "emulated":
        return EmulatedDevice(load_profile("a100-pcie4"), QUICK, deadline_s=deadline_s)
    from gockpt.devices.cuda import CudaDevice

    return CudaDevice(deadline_s=deadline_s)


HOST = ["cpu", "emulated"]
ALL = [*HOST, pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]


@pytest.fixture(params=ALL)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_for_test(request.param)
    yield opened
    opened.close()


@pytest.fixture(params=HOST)
def host(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_for_test(request.param)
    yield opened
    opened.close()


def place(device: Device) -> str:
    """Where the tensors of this device live."""
    return device.name if device.name.startswith("cuda") else "cpu"


def finished(copied: Copied) -> Copied:
    assert copied.wait(SOON)
    return copied


# ---- every device -------------------------------------------------------------------------------


def test_it_is_a_device(device: Device) -> None:
    assert isinstance(device, Device)
    assert isinstance(device.copy([], lane="state", step=0), Copied)
    assert device.emulated == device.name.startswith("emulated:")


def sources(on: str) -> dict[str, Tensor]:
    grid = torch.randn(48, 33, device=on)
    return {
        "float": torch.randn(1000, device=on),
        "bfloat16": torch.randn(1001, device=on).bfloat16(),
        "bool": torch.randn(77, device=on) > 0,
        "int64": torch.arange(-5, 90, device=on),
        "complex": torch.randn(64, dtype=torch.complex64, device=on),
        "conjugated": torch.randn(64, dtype=torch.complex64, device=on).conj(),
        "strided": torch.randn(2000, device=on)[::2],
        "transposed": grid.t(),
        "columns": grid[:, ::3],
        "number": torch.tensor(3.5, device=on),
        "empty": torch.empty(0, device=on),
        "empty rows": torch.empty(0, 5, device=on),
        "block": torch.randn(4096, device=on)[640:1280],
        "parameter": torch.nn.Parameter(torch.randn(50, device=on)),
        "strided parameter": torch.nn.Parameter(torch.randn(50, device=on))[::5],
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], device=on),
    }


@pytest.mark.parametrize("name", list(sources("cpu")))
def test_copies_are_the_same_bits(device: Device, name: str) -> None:
    source = sources(place(device))[name]
    target = torch.zeros(source.shape, dtype=source.dtype)
    finished(device.copy([(target, source)], lane="state", step=1))
    expected = source.detach().cpu().resolve_conj().contiguous()
    assert torch.equal(target.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    assert not target.requires_grad


def test_a_flat_destination_takes_a_source_of_any_shape(device: Device) -> None:
    source = torch.randn(6, 10, device=place(device))[:, ::2]
    target = torch.zeros(30)
    finished(device.copy([(target, source)], lane="state", step=1))
    assert torch.equal(target, source.cpu().reshape(-1))


def test_the_copy_stream_is_first_in_first_out(device: Device) -> None:
    source = torch.zeros(8, device=place(device))
    seen: list[str] = []
    first, second = torch.zeros(8), torch.zeros(8)
    device.copy([(first, source)], lane="state", step=1)
    device.run(lambda: seen.append("a"), device_bytes=32, lane="proof", step=1)
    device.run(lambda: seen.append("b"), device_bytes=32, lane="proof", step=1)
    last = device.copy([(second, source + 1)], lane="state", step=1)
    finished(last)
    assert seen == ["a", "b"]
    assert first.sum() == 0
    assert second.sum() == 8


def test_queued_work_runs_without_autograd(device: Device) -> None:
    modes: list[bool] = []
    work = device.run(
        lambda: modes.append(torch.is_grad_enabled()), device_bytes=0, lane="proof", step=1
    )
    finished(work)
    assert modes == [False]


def test_a_gate_lets_the_source_change(device: Device) -> None:
    source = torch.ones(200_000, device=place(device))
    target = torch.zeros(200_000)
    copied = device.copy([(target, source)], lane="state", step=1)
    device.gate(copied, name="update waits for state", step=1)
    source.fill_(2)
    finished(copied)
    assert target.eq(1).all()


def test_sources_are_held_until_done_and_no_longer(device: Device) -> None:
    source = torch.ones(1000, device=place(device))
    alive = weakref.ref(source)
    copied = device.copy([(torch.zeros(1000), source)], lane="state", step=1)
    del source
    finished(copied)
    device.synchronize()
    assert alive() is None


def test_sources_of_a_failed_copy_are_let_go(device: Device) -> None:
    source = torch.ones(10, device=place(device))
    alive = weakref.ref(source)
    copied = device.copy([(torch.zeros(11), source)], lane="state", step=1)
    del source
    with pytest.raises(DeviceError):
        copied.wait(SOON)
    device.synchronize()
    assert alive() is None


@pytest.mark.parametrize(
    "target",
    [torch.zeros(9), torch.zeros(10, dtype=torch.int32), torch.zeros(20)[::2]],
    ids=["size", "dtype", "gaps"],
)
def test_what_cannot_arrive_bit_for_bit_is_refused(device: Device, target: Tensor) -> None:
    source = torch.ones(10, device=place(device))
    copied = device.copy([(target, source)], lane="state", step=7)
    with pytest.raises(DeviceError, match="step 7"):
        copied.wait(SOON)
    assert copied.done()
    with pytest.raises(DeviceError, match="step 7"):
        device.gate(copied, name="update", step=7)
    good = torch.zeros(10)
    finished(device.copy([(good, source)], lane="state", step=8))  # The stream goes on.
    assert good.eq(1).all()


def test_failed_work_raises_at_the_gate(device: Device) -> None:
    def work() -> None:
        raise ValueError("no such sum")

    copied = device.run(work, device_bytes=0, lane="proof", step=3)
    with pytest.raises(DeviceError, match="no such sum"):
        device.gate(copied, name="update", step=3)


def test_withdrawing_afterwards_takes_nothing_back(device: Device) -> None:
    on = place(device)
    pairs = [(torch.zeros(10), torch.ones(10, device=on)) for _ in range(5)]
    copied = finished(device.copy(pairs, lane="state", step=1, piece_bytes=40))
    assert copied.withdraw() == 5
    assert all(target.eq(1).all() for target, _ in pairs)


def test_spans_are_recorded_under_their_lane_and_step(device: Device) -> None:
    source = torch.ones(10, device=place(device))
    with device.phase("forward", 4):
        copied = device.copy([(torch.zeros(10), source)], lane="gradients", step=4)
    finished(copied)
    device.synchronize()
    spans = {(span.lane, span.name, span.step) for span in device.recorder.drain()}
    assert {("compute", "forward", 4), ("gradients", "gradients", 4)} <= spans
    assert copied.seconds is not None
    assert copied.seconds >= 0


def test_closing_finishes_what_is_queued_and_may_be_repeated(device: Device) -> None:
    source = torch.ones(1000, device=place(device))
    target = torch.zeros(1000)
    copied = device.copy([(target, source)], lane="state", step=1)
    device.close()
    device.close()
    assert copied.done()
    assert target.eq(1).all()
    with pytest.raises(DeviceError, match="closed"):
        device.copy([(target, source)], lane="state", step=2)


def test_link_rate_is_known(device: Device) -> None:
    assert device.link_rate(computing=False) >= device.link_rate() > 0


def test_registering_memory_leaves_it_as_it_is(device: Device) -> None:
    memory = torch.arange(4096)
    device.register(memory)
    device.unregister(memory)
    assert torch.equal(memory, torch.arange(4096))


# ---- the devices that are the host --------------------------------------------------------------


class Plug:
    """Work that stops the copy stream until it is pulled."""

    def __init__(self, device: Device) -> None:
        self._pulled = threading.Event()
        self.work = device.run(lambda: self._hold(), device_bytes=0, lane="plug", step=0)

    def _hold(self) -> None:
        if not self._pulled.wait(SOON):
            raise TimeoutError("nobody pulled the plug")

    def pull(self) -> None:
        self._pulled.set()


def test_without_a_gate_the_copy_is_overtaken(host: Device) -> None:
    source, target = torch.ones(1000), torch.zeros(1000)
    plug = Plug(host)
    copied = host.copy([(target, source)], lane="state", step=1)
    source.fill_(2)
    plug.pull()
    finished(copied)
    assert target.eq(2).all()


def test_copying_only_queues(host: Device) -> None:
    plug = Plug(host)
    copied = host.copy([(torch.zeros(10), torch.ones(10))], lane="state", step=1)
    assert not copied.done()
    assert copied.seconds is None
    assert not copied.wait(0.001)
    plug.pull()
    finished(copied)


def test_done_means_that_nothing_is_held_any_more(host: Device) -> None:
    source = torch.ones(1000)
    alive = weakref.ref(source)
    copied = host.copy([(torch.zeros(1000), source)], lane="state", step=1)
    del source
    finished(copied)
    assert alive() is None


def test_withdrawn_pairs_are_never_written(host: Device) -> None:
    pairs = [(torch.zeros(10), torch.ones(10)) for _ in range(5)]
    plug = Plug(host)
    copied = host.copy(pairs, lane="state", step=1)
    assert copied.withdraw() == 0
    plug.pull()
    finished(copied)
    assert copied.withdraw() == 0
    assert all(target.eq(0).all() for target, _ in pairs)


class Turns:
    """A clock that calls back whenever the link gets to something."""

    slice_bytes = 400

    def __init__(self, turn: Callable[[int], object]) -> None:
        self._turn = turn
        self.sizes: list[int] = []

    def begin(self, queued: float) -> None: ...

    def turn(self, nbytes: int, efficiency: float) -> None:
        self.sizes.append(nbytes)
        self._turn(len(self.sizes))

    def device(self, nbytes: int) -> None: ...

    def finish(self) -> None: ...


@pytest.fixture
def ticket(host: Device) -> HostCopied:
    copied = host.copy([(torch.zeros(1), torch.zeros(1))] * 5, lane="state", step=1)
    assert isinstance(copied, HostCopied)
    return HostCopied(copied._stream, "state", 1, 5)


@pytest.mark.parametrize("stride", [1, 3])
def test_memory_is_read_when_the_link_gets_to_it(ticket: HostCopied, stride: int) -> None:
    source, target = torch.zeros(1000 * stride)[::stride], torch.zeros(1000)
    clock = Turns(lambda turn: source.fill_(turn))
    copy_pairs([(target, source)], 1.0, ticket, clock)
    assert clock.sizes == [400] * 10
    assert torch.equal(target, torch.arange(1.0, 11).repeat_interleave(100))


def test_a_pair_that_has_begun_is_finished(ticket: HostCopied) -> None:
    pairs = [(torch.zeros(100), torch.ones(100)) for _ in range(5)]
    counts: list[int] = []
    clock = Turns(lambda turn: counts.append(ticket.withdraw()) if turn == 3 else None)
    copy_pairs(pairs, 1.0, ticket, clock)
    assert counts == [3]
    assert [bool(target.eq(1).all()) for target, _ in pairs] == [True] * 3 + [False] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_told_and_not_waited_for(host: Device) -> None:
    def die() -> None:
        raise SystemExit

    copied = host.run(die, device_bytes=0, lane="proof", step=1)
    behind = host.copy([(torch.zeros(1), torch.zeros(1))], lane="state", step=1)
    for lost in (copied, behind):
        with pytest.raises(DeviceError, match="gone"):
            lost.wait(SOON)
    with pytest.raises(DeviceError, match="gone"):
        host.gate(behind, name="update", step=1)
    with pytest.raises(DeviceError):
        host.close()


@pytest.mark.parametrize("kind", HOST)
def test_gates_have_a_deadline(kind: str) -> None:
    device = open_for_test(kind, deadline_s=0.01)
    plug = Plug(device)
    with pytest.raises(DeviceError, match="stuck"):
        device.gate(plug.work, name="update", step=1)
    with pytest.raises(DeviceError, match="stuck"):
        device.synchronize()
    plug.pull()


@pytest.mark.parametrize("kind", HOST)
def test_closing_reports_what_did_not_end(kind: str) -> None:
    device = open_for_test(kind, deadline_s=0.01)
    plug = Plug(device)
    behind = device.copy([(torch.zeros(1), torch.zeros(1))], lane="state", step=1)
    with pytest.raises(DeviceError, match="2 copies"):
        device.close()
    for lost in (plug.work, behind):
        with pytest.raises(DeviceError, match="closed"):
            lost.wait(SOON)
    plug.pull()
    device.close()


def test_a_gate_on_something_done_costs_nothing(host: Device) -> None:
    copied = finished(host.copy([], lane="state", step=1))
    host.gate(copied, name="update", step=1)
    assert host.blocked_seconds() == 0
    assert not [span for span in host.recorder.drain() if span.lane == "stall"]


# ---- opening by name ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cup", "did you mean 'cpu'"),
        ("emulated:a100-pcie", "did you mean 'a100-pcie4'"),
        ("emulated:", "no device is called 'emulated:'"),
        ("cuda:x", "did you mean 'cuda'"),
        ("tpu", "no device is called 'tpu'"),
        ("", "no device is called ''"),
    ],
)
def test_unknown_devices_are_refused_with_the_nearest_name(spec: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        open_device(spec, work=QUICK)


def test_an_emulated_device_needs_its_work() -> None:
    with pytest.raises(DeviceError, match="needs the work"):
        open_device("emulated:a100-pcie4")


def test_every_name_is_listed() -> None:
    assert device_names()[:2] == ["cpu", "cuda"]
    assert "emulated:v100s-pcie3" in device_names()
