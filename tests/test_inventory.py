"""The inventory: what is found, under which names, where it lies, and when it has become untrue."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from identity_kit import Bag, fused_adamw, truth
from torch import Tensor, nn

import gockpt
from gockpt import inventory
from gockpt.inventory import FROZEN, Inventory, take
from gockpt.state import PAGE


class Net(nn.Module):
    """Tied weights, a buffer, a buffer that is not saved, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def adamw(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {"": fused_adamw(model.parameters())}


def trained(model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    for optimizer in optimizers.values():
        optimizer.step()


def names(found: Inventory) -> list[str]:
    return [entry.name for entry in found.layout.entries]


def present(found: Inventory) -> dict[str, Tensor]:
    return {found.layout.entries[index].name: tensor for index, tensor in found.present()}


def test_names_of_model_and_optimizer() -> None:
    model = Net()
    optimizers = adamw(model)
    found = take(model, optimizers)
    assert set(names(found)) == {
        *(f"model.{fqn}" for fqn in model.state_dict() if fqn != "head.weight"),
        *(
            f"optim.{fqn}.{key}"
            for fqn in ("embed.weight", "norm.weight", "norm.bias")
            for key in ("exp_avg", "exp_avg_sq", "step")
        ),
    }
    entry = next(e for e in found.layout.entries if e.name == "model.embed.weight")
    assert entry.aliases == ("model.head.weight",)
    assert {live.name for live in found.replayable} == {"embed.weight", "norm.weight", "norm.bias"}
    assert {live.name: live.obstacle for live in found.others} == {
        "frozen.weight": FROZEN,
        "frozen.bias": FROZEN,
    }


def test_state_is_reserved_before_it_exists_and_present_when_it_does() -> None:
    model = Net()
    optimizers = adamw(model)
    found = take(model, optimizers)
    assert not [name for name in present(found) if name.startswith("optim.")]
    trained(model, optimizers)
    assert found.stale() is None
    now = present(found)
    assert set(now) == set(names(found))
    assert now["optim.norm.bias.exp_avg"] is optimizers[""].state[model.norm.bias]["exp_avg"]
    assert set(names(take(model, optimizers))) == set(names(found))


def test_the_layout_has_no_overlaps_and_keeps_its_promises() -> None:
    training = Bag()
    found = take(training.model, training.optimizers, spare=1000)
    entries = sorted(found.layout.entries, key=lambda entry: entry.offset)
    assert all(entry.offset % 64 == 0 for entry in entries)
    for one, two in itertools.pairwise(entries):
        assert one.offset + one.nbytes <= two.offset
    end = max(entry.offset + entry.nbytes for entry in entries)
    assert found.layout.size >= end + 1000
    assert found.layout.size % PAGE == 0
    assert set(names(found)) >= set(truth(training))


def test_several_optimizers_have_their_key_in_the_names() -> None:
    model = nn.Linear(3, 2)
    optimizers = {
        "w": torch.optim.AdamW([model.weight], fused=True),
        "b": torch.optim.SGD([model.bias], lr=0.1, momentum=0.9),
    }
    found = take(model, optimizers)
    assert "optim.w.weight.exp_avg" in names(found)
    assert "optim.b.bias.momentum_buffer" in names(found)
    assert [live.optimizer_index for live in found.replayable] == [0, 1]


def masters(model: nn.Module, *, named: bool = True) -> torch.optim.Optimizer:
    pairs = [(n, p.detach().float().requires_grad_()) for n, p in model.named_parameters()]
    return torch.optim.AdamW(pairs if named else [p for _, p in pairs], fused=True)


def test_master_copies_are_named_and_their_cast_is_derived() -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = masters(model)
    found = take(model, {"": optimizer})
    assert {"model.weight", "optim.weight.master", "model.bias"} <= set(names(found))
    weight = found.layout.params[0]
    assert weight.derived is not None
    assert found.layout.entries[weight.derived].name == "model.weight"
    assert found.layout.entries[weight.param].name == "optim.weight.master"
    assert found.replayable[0].model_tensor is model.weight
    with torch.no_grad():
        model.bias.add_(1)  # no longer the cast: it must be sent
    again = take(model, {"": optimizer})
    assert [param.derived is None for param in again.layout.params] == [False, True]


def test_parameters_without_name_are_refused_and_told_how() -> None:
    model = nn.Linear(3, 2).bfloat16()
    with pytest.raises(gockpt.StateError, match=r"named parameters.*name, tensor"):
        take(model, {"": masters(model, named=False)})


def test_equal_names_are_refused() -> None:
    model = nn.Linear(3, 2)
    stray = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([("weight", model.weight), ("weight", stray)], lr=0.1)
    with pytest.raises(gockpt.StateError, match=r"two parameters .* named 'weight'"):
        take(model, {"": optimizer})


def test_a_parameter_in_two_optimizers_is_not_replayed() -> None:
    model = nn.Linear(3, 2)
    optimizers = {"one": fused_adamw(model.parameters()), "two": fused_adamw([model.weight])}
    found = take(model, optimizers)
    assert [live.name for live in found.replayable] == ["bias"]
    assert {live.obstacle for live in found.others} == {"it is in two optimizers"}


def test_slow_and_refused_kinds_are_taken_whole() -> None:
    model = nn.Linear(3, 2)
    slow = {"": torch.optim.RMSprop(model.parameters())}
    assert not take(model, slow).replayable
    assert len(take(model, slow, allow_slow=True).replayable) == 2
    refused = take(model, adamw(model), refused={(0, 0): "it does not repeat"})
    assert {live.obstacle for live in refused.others} == {"it does not repeat"}


# -- staleness -------------------------------------------------------------------------------------


def freeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.embed.weight.requires_grad_(False)


def unfreeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.frozen.weight.requires_grad_(True)


def replace_parameter(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.norm.bias = nn.Parameter(torch.zeros(3))


def replace_buffer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.norm.running_mean = torch.zeros(3)


def add_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def swap_in_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(7, 3))


CHANGES = [unfreeze, replace_parameter, replace_buffer, add_group, swap_in_group]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_structure_makes_it_stale(change: Any) -> None:
    model = Net()
    optimizers = adamw(model)
    found = take(model, optimizers)
    assert found.stale() is None
    trained(model, optimizers)
    assert found.stale() is None
    change(model, optimizers[""])
    assert found.stale() is not None


def test_values_may_change() -> None:
    model = Net()
    optimizers = adamw(model)
    trained(model, optimizers)
    found = take(model, optimizers)
    trained(model, optimizers)
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    freeze(model, optimizers[""])  # a frozen parameter simply gets no gradient
    assert found.stale() is None


def test_an_added_group_is_seen_at_a_glance() -> None:
    model = Net()
    optimizers = adamw(model)
    found = take(model, optimizers)
    assert not found.suspect()
    add_group(model, optimizers[""])
    assert found.suspect()


# -- what is not a tensor --------------------------------------------------------------------------


def test_options_are_copies_by_name() -> None:
    model = nn.Linear(3, 2)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(
        [{"params": [model.bias], "weight_decay": 0.0}, {"params": [model.weight]}], lr=rate
    )
    options = take(model, {"": optimizer}).group_options()
    rate.fill_(5)
    optimizer.param_groups[0]["weight_decay"] = 9.0
    assert [group["params"] for group in options] == [["bias"], ["weight"]]
    assert [group["options"]["weight_decay"] for group in options] == [0.0, 0.01]
    assert float(options[0]["options"]["lr"]) == pytest.approx(0.1)
    assert "params" not in options[0]["options"]


def test_buffers_are_what_no_optimizer_trains() -> None:
    model = Net()
    found = take(model, adamw(model))
    buffers = {found.layout.entries[index].name for index in found.buffers()}
    assert buffers == {
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
    }


def test_a_tensor_that_appears_from_nowhere_is_an_error_and_not_left_out() -> None:
    model = nn.Linear(3, 2)
    optimizers = adamw(model)
    found = take(model, optimizers)
    trained(model, optimizers)
    optimizers[""].state[model.weight]["surprise"] = torch.zeros(3)
    with pytest.raises(gockpt.StateError, match="'surprise' of 'weight' appeared"):
        list(found.present())


def test_element_bytes_count_parameter_and_state() -> None:
    model = nn.Linear(3, 2)
    found = take(model, adamw(model))
    assert {inventory.element_bytes(found.layout, param) for param in found.layout.params} == {12}
