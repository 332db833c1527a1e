"""What a Checkpointer asks of accelerators that are not here: one of them, and pinned memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import Bag, checkpointer, one_pass
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gockpt
from gockpt.checkpointer import _device, _home
from gockpt.devices import CpuDevice

# -- memory that is replaced -----------------------------------------------------------------------


class Pinning(CpuDevice):
    """Knows what is pinned, and refuses what CUDA would refuse or suffer from."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[int, Tensor] = {}
        self.unpinned = 0
        self._quiet = False

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        self._quiet = False
        return super().copy(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._quiet = False
        return super().run(*args, **kwargs)

    def synchronize(self) -> None:
        super().synchronize()
        self._quiet = True

    def register(self, memory: Tensor) -> None:
        self.pinned[memory.data_ptr()] = memory

    def unregister(self, memory: Tensor) -> None:
        assert self._quiet, "something may still be copied into it"
        if self.pinned.pop(memory.data_ptr(), None) is not None:
            self.unpinned += 1


def slots_of(ckpt: gockpt.Checkpointer) -> set[int]:
    assert ckpt.client is not None
    return {segment.tensor.data_ptr() for segment in ckpt.client.segments}


def rmsprop(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Cannot be replayed, so its state is not laid out before its first update makes it."""
    return torch.optim.RMSprop(params, lr=0.01, momentum=0.9)


def test_memory_that_is_replaced_is_unpinned(tmp_path: Path) -> None:
    device = Pinning()
    training = Bag(make=rmsprop)
    with checkpointer(training, tmp_path, every=1, device=device) as ckpt:
        first = slots_of(ckpt)
        staging = device.pinned.keys() - first
        assert first <= device.pinned.keys()
        for step in range(1, 4):
            one_pass(ckpt, training, step)
            ckpt.step()
        second = slots_of(ckpt)
        assert not first & second, "the state has grown, and its memory with it"
        assert device.pinned.keys() == staging | second
        assert device.unpinned == len(first)
    assert not device.pinned
    assert gockpt.open(tmp_path).step == 3


def test_memory_that_still_fits_stays_pinned(tmp_path: Path) -> None:
    device = Pinning()
    with checkpointer(Bag(), tmp_path, every=1, device=device) as ckpt:
        before = dict(device.pinned)
        assert ckpt.engine is not None
        assert ckpt.client is not None
        ckpt.engine.memory.allocate(ckpt.client, device)
        assert device.pinned == before
        assert device.unpinned == 0


# -- where the state is ----------------------------------------------------------------------------


class Spread(nn.Module):
    """Parameters on these devices, and buffers on those; nothing of it can be read.

    They are said to be on ``hpu``: where there is a CUDA device, torch begins to use it for fake
    tensors too, and there may be no second one.
    """

    def __init__(self, params: Iterable[str], buffers: Iterable[str] = ()) -> None:
        super().__init__()
        with FakeTensorMode():
            for number, place in enumerate(params):
                param = nn.Parameter(torch.empty(3, device=place))
                self.register_parameter(f"param{number}", param)
            for number, place in enumerate(buffers):
                self.register_buffer(f"buffer{number}", torch.empty(3, device=place))


def sgd(model: nn.Module, **state: str) -> torch.optim.Optimizer:
    """An optimizer whose first parameter has such state on such devices."""
    optimizer = torch.optim.SGD(model.parameters())
    with FakeTensorMode():
        for key, place in state.items():
            optimizer.state[optimizer.param_groups[0]["params"][0]][key] = torch.empty(3).to(place)
    return optimizer


@pytest.mark.parametrize(
    ("model", "state"),
    [
        (Spread(["hpu:0", "hpu:1"]), {}),
        (Spread(["hpu:0", "cpu", "hpu:1"]), {}),
        (Spread(["cpu", "hpu:0"], ["hpu:1"]), {}),
        (Spread(["hpu:0"]), {"momentum_buffer": "hpu:1"}),
        (Spread(["cpu"], ["hpu:0"]), {"momentum_buffer": "hpu:1"}),
    ],
)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_state_on_two_accelerators_is_refused(
    model: nn.Module, state: dict[str, str], device: str | None, tmp_path: Path
) -> None:
    expected = "on hpu:0 and on hpu:1, .* one process per device"
    with pytest.raises(gockpt.ConfigError, match=expected):
        gockpt.Checkpointer(model, sgd(model, **state), tmp_path, agent="thread", device=device)


def test_an_optimizer_of_parameters_elsewhere_is_refused(tmp_path: Path) -> None:
    model, other = Spread(["hpu:0"]), Spread(["hpu:1"])
    with pytest.raises(gockpt.ConfigError, match="on hpu:0 and on hpu:1"):
        gockpt.Checkpointer(model, {"a": sgd(model), "b": sgd(other)}, tmp_path, agent="thread")


@pytest.mark.parametrize(
    ("model", "state", "home"),
    [
        (Spread(["cpu", "cpu"], ["cpu"]), {}, "cpu"),
        (Spread(["hpu:1", "hpu:1"]), {"step": "cpu"}, "hpu:1"),
        (Spread(["hpu:1"], ["cpu"]), {}, "hpu:1"),
        (Spread(["cpu", "hpu:1"]), {}, "hpu:1"),
        (Spread(["cpu"], ["hpu:1"]), {"step": "cpu"}, "hpu:1"),
        (Spread([]), {}, "cpu"),
    ],
)
def test_an_accelerator_beside_host_memory_is_where_the_state_is(
    model: nn.Module, state: dict[str, str], home: str
) -> None:
    optimizers = {"": sgd(model, **state)} if list(model.parameters()) else {}
    assert str(_home(model, optimizers)) == home


def test_a_device_that_is_given_is_used_wherever_the_state_is() -> None:
    given = CpuDevice()
    assert _device(given, torch.device("hpu:0")) == (given, False)
    opened, owned = _device(None, torch.device("cpu"))
    assert (opened.name, owned) == ("cpu", True)
    given.close()
    opened.close()
