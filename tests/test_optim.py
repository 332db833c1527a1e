"""The tables of optim.py are what torch does; recipes hold its numbers; samples tell apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from replay_kit import CASES, FLAGS, Training, maker, same_bits
from torch import Tensor

from gockpt import optim, recipe
from gockpt import sample as sample_module
from gockpt.agent import proof
from gockpt.agent.protocol import Update
from gockpt.errors import StateError
from gockpt.recipe import TensorValue, fill, revive, take_recipe
from gockpt.sample import Sample


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "options", "runs"), CASES)
def test_state_keys_are_those_that_torch_creates(
    name: str, options: dict[str, Any], runs: str
) -> None:
    training = Training(maker(name, **options, **FLAGS[runs]), [(5,)], steps=1)
    kind = optim.KINDS[name]
    elementwise, scalar = optim.state_keys(kind, training.optimizer.param_groups[0])
    state = training.optimizer.state[training.params[0]]
    assert set(state) == {*elementwise, *scalar}
    assert {key for key, value in state.items() if value.dim() == 0} == set(scalar)


# --- which updates write gradients ----------------------------------------------------------------


def written(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    """Whether a real update changes the gradient's bits."""
    param.grad = torch.linspace(0.1, 1, param.numel())
    before = param.grad.clone()
    optimizer.step()
    return not same_bits(param.grad, before)


@pytest.mark.parametrize(
    ("name", "options", "runs", "scaled"),
    [
        pytest.param(*case.values, scaled, id=f"{case.id}{'-scaled' if scaled else ''}")
        for case in CASES
        for scaled in ([False, True] if case.values[2] == "fused" else [False])
    ],
)
def test_the_table_of_updates_that_write_gradients(
    name: str, options: dict[str, Any], runs: str, scaled: bool
) -> None:
    param = torch.linspace(-1, 1, 100)
    optimizer: Any = maker(name, **options, **FLAGS[runs])([param])
    for _ in range(3):  # the first update creates state, and may differ
        if runs == "fused":
            optimizer.grad_scale = torch.tensor(4.0) if scaled else None
            optimizer.found_inf = torch.tensor(0.0)
        predicted = optim.writes_gradients(optimizer, optimizer.param_groups[0])
        assert predicted == written(optimizer, param)


def test_decay_held_in_a_tensor_counts_in_that_table() -> None:
    for decay, expected in ((0.0, True), (0.1, False)):
        param = torch.linspace(-1, 1, 100)
        options: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "foreach": True}
        optimizer = torch.optim.SGD([param], weight_decay=torch.tensor(decay), **options)
        assert optim.writes_gradients(optimizer, optimizer.param_groups[0]) == expected
        assert written(optimizer, param) == expected


def test_an_unknown_optimizer_is_taken_to_write_gradients() -> None:
    optimizer = torch.optim.LBFGS([torch.zeros(3)])
    assert optim.writes_gradients(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("flags", "device", "expected"),
    [
        ({}, "cpu", "forloop"),
        ({}, "cuda", "foreach"),
        ({"foreach": False}, "cuda", "forloop"),
        ({"foreach": True}, "cpu", "foreach"),
        ({"fused": True}, "cpu", "fused"),
        ({"fused": True}, "cuda", "fused"),
        ({"fused": False}, "cuda", "forloop"),
    ],
)
def test_the_implementation_that_torch_picks(
    flags: dict[str, bool], device: str, expected: str
) -> None:
    group = torch.optim.AdamW([torch.zeros(3)], **flags).param_groups[0]  # type: ignore[arg-type]
    assert optim.implementation(group, device) == expected


def test_training_on_an_accelerator_is_replayed_fused_where_that_exists() -> None:
    group = torch.optim.AdamW([torch.zeros(3)]).param_groups[0]
    assert optim.replay_implementation(optim.KINDS["AdamW"], group, "cuda") == "fused"
    assert optim.replay_implementation(optim.KINDS["NAdam"], group, "cuda") == "forloop"


# --- what cannot be replayed ----------------------------------------------------------------------


class MyAdam(torch.optim.Adam):
    """Anybody's subclass."""


class MyTensor(Tensor):
    """Anybody's tensor."""


def reason(make: Callable[[], torch.optim.Optimizer], **allow: bool) -> str | None:
    optimizer = make()
    group = optimizer.param_groups[0]
    return optim.obstacle(optimizer, group, group["params"][0], **allow)


def after_one_update(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def with_state(**state: Any) -> torch.optim.Optimizer:
    """An Adam over a (4, 6) parameter with some of its state replaced."""
    param = torch.zeros(4, 6)
    optimizer = after_one_update(torch.optim.Adam([param]))
    optimizer.state[param].update(state)
    return optimizer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.optim.LBFGS([torch.zeros(3)]), "LBFGS is not one of torch's elementwise"),
        (lambda: torch.optim.Muon([torch.zeros(3, 3)]), "Muon is not one of torch's elementwise"),
        (lambda: MyAdam([torch.zeros(3)]), "MyAdam is not one of torch's elementwise"),
        (lambda: torch.optim.Adam([torch.zeros(3)], capturable=True), "Adam is capturable"),
        (lambda: torch.optim.SGD([torch.zeros(3)], differentiable=True), "SGD is differentiable"),
        (lambda: torch.optim.NAdam([torch.zeros(3)]), "no fused CPU kernel"),
        (
            lambda: torch.optim.Adam([torch.zeros(3)], lr=torch.tensor(0.1, requires_grad=True)),
            "Adam's lr is a Tensor",
        ),
        (
            lambda: torch.optim.Adam([torch.zeros(3)], eps=np.float32(0.1)),
            "Adam's eps is a float32",
        ),
        (lambda: torch.optim.Adam([MyTensor(torch.zeros(3))]), "it is a MyTensor"),
        (lambda: torch.optim.Adam([torch.zeros(3, dtype=torch.complex64)]), "complex64"),
        (lambda: torch.optim.Adam([torch.zeros(4, 6)[:, ::2]]), "not dense"),
        (lambda: torch.optim.Adam([torch.zeros(1, 3).expand(4, 3).detach()]), "not dense"),
        (lambda: with_state(mine=torch.zeros(4, 6)), "a key that Adam does not use: 'mine'"),
        (lambda: with_state(exp_avg=[1.0]), "'exp_avg' is not a tensor"),
        (lambda: with_state(step=torch.zeros(2)), "'step' is not one floating-point number"),
        (lambda: with_state(step=torch.tensor(3)), "'step' is not one floating-point number"),
        (lambda: with_state(exp_avg=torch.zeros(4, 6).bfloat16()), "another dtype"),
        (lambda: with_state(exp_avg=torch.zeros(4, 5)), "unlike the parameter"),
        (lambda: with_state(exp_avg=torch.zeros(6, 4).T), "unlike the parameter"),
        (
            lambda: torch.optim.SGD([torch.zeros(3).bfloat16()], momentum=0.9, fused=True),
            "fused SGD with momentum does not repeat in 16 bits",
        ),
    ],
)
def test_what_cannot_be_replayed_is_said(
    make: Callable[[], torch.optim.Optimizer], expected: str
) -> None:
    assert expected in (reason(make) or "")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))]),
        lambda: torch.optim.Adam([torch.zeros(3, 1, 2)], lr=torch.tensor([0.1])),
        lambda: torch.optim.Adam([torch.zeros(())], betas=(np.float64(0.9), 0.99)),
        lambda: torch.optim.Adam([torch.zeros(0, 5)]),
        lambda: torch.optim.Adam([torch.zeros(2, 3, 4, 5).permute(3, 1, 0, 2)]),
        lambda: with_state(exp_avg=None, max_exp_avg_sq=torch.zeros(4, 6)),
        lambda: torch.optim.SGD([torch.zeros(3).bfloat16()], momentum=0.9),
        lambda: torch.optim.SGD([torch.zeros(3).half()], fused=True),
    ],
)
def test_what_can_be_replayed(make: Callable[[], torch.optim.Optimizer]) -> None:
    assert reason(make) is None


def test_slow_kinds_may_be_allowed() -> None:
    assert reason(lambda: torch.optim.NAdam([torch.zeros(3)]), allow_slow=True) is None


def test_schedulers_wrap_step_without_being_taken_for_a_compiler() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
    torch.optim.lr_scheduler.LinearLR(optimizer)
    assert not optim.is_compiled(optimizer)


def test_a_compiled_step_is_seen_below_a_schedulers_wrapper() -> None:
    optimizer: Any = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])

    def compiled(self: Any) -> None:
        return None

    compiled._torchdynamo_orig_callable = optimizer.step  # type: ignore[attr-defined]
    optimizer.step = compiled.__get__(optimizer)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    assert optim.is_compiled(optimizer)
    assert "compiled" in (optim.group_obstacle(optimizer, optimizer.param_groups[0]) or "")


@pytest.mark.parametrize(
    ("size", "threads", "repeats"),
    [
        (32_768, 2, True),  # one run for one thread
        (2 * 50_000, 1, True),
        (2 * 50_000, 2, False),  # runs of 50,000 = 781 × 64 + 16
        (2 * 64_000, 2, True),  # runs of 64,000 = 1,000 × 64
        (4 * 64_000, 4, True),
        (4 * 64_000 + 1, 4, False),
    ],
)
def test_16_bit_loops_repeat_where_threads_get_whole_cuts(
    size: int, threads: int, repeats: bool
) -> None:
    torch.set_num_threads(threads)
    found = reason(lambda: torch.optim.Adam([torch.zeros(size, dtype=torch.bfloat16)]))
    assert found == (
        None if repeats else ("torch's 16-bit loops depend on how the threads share the tensor")
    )
    assert reason(lambda: torch.optim.Adam([torch.zeros(size)])) is None


def on_an_accelerator(
    name: str, runs: str, dtype: torch.dtype, **options: Any
) -> torch.optim.Optimizer:
    """An optimizer over tensors of the meta device, which is no CPU either."""
    optimizer = optim.KINDS[name].cls([torch.zeros(300, dtype=dtype, device="meta")], **options)
    optimizer.param_groups[0].update(FLAGS.get(runs, {}))
    return optimizer


SMALL_LR = 1e-3
ROUNDS_OFTEN = "on meta rounds to 16 bits after every operation, its replay once"
UNLIKE = "the CPU does not repeat what {} computes in 16 bits on meta"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "options", "runs", "expected"),
    [
        ("AdamW", {}, "as torch likes", f"AdamW {ROUNDS_OFTEN}"),
        ("AdamW", {}, "foreach", f"AdamW {ROUNDS_OFTEN}"),
        ("Adam", {"amsgrad": True}, "forloop", f"Adam {ROUNDS_OFTEN}"),
        ("AdamW", {}, "fused", None),
        ("Adam", {"amsgrad": True}, "fused", None),
        ("SGD", {}, "fused", UNLIKE.format("SGD")),
        ("SGD", {}, "foreach", UNLIKE.format("SGD")),
        ("SGD", {"momentum": 0.9}, "fused", UNLIKE.format("SGD")),
        ("Adagrad", {}, "foreach", UNLIKE.format("Adagrad")),
        ("NAdam", {}, "foreach", UNLIKE.format("NAdam")),
    ],
)
def test_which_16_bit_updates_of_an_accelerator_the_cpu_repeats(
    name: str, options: dict[str, Any], runs: str, expected: str | None, dtype: torch.dtype
) -> None:
    found = reason(lambda: on_an_accelerator(name, runs, dtype, **options), allow_slow=True)
    assert found is expected is None or (expected or "nothing") in (found or "")
    wide = reason(lambda: on_an_accelerator(name, runs, torch.float32, **options), allow_slow=True)
    assert wide is None


@pytest.mark.parametrize("runs", ["as torch likes", *FLAGS])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_16_bits_in_host_memory_repeat_whatever_runs(name: str, runs: str) -> None:
    """There, and on an emulated accelerator, the replay runs what the training ran."""
    params = [torch.zeros(300, dtype=torch.bfloat16)]
    flags: dict[str, Any] = FLAGS.get(runs, {})
    assert reason(lambda: maker(name, **flags)(params)) is None


def small_update(name: str, runs: str, *, wide: bool = False) -> dict[str, Tensor]:
    """Some updates of small weights in 16 bits, then one that ``runs``; ``wide``: in 32 bits."""
    rng = torch.Generator().manual_seed(0)
    param = torch.zeros(4096, dtype=torch.bfloat16)
    optimizer = maker(name, lr=SMALL_LR)([param])
    for _ in range(5):
        param.grad = torch.randn(4096, generator=rng).bfloat16()
        optimizer.step()
    last = param.float() if wide else param
    other = maker(name, lr=SMALL_LR, **FLAGS[runs])([last])
    other.state[last] = {
        key: value.to(last.dtype if value.dim() else value.dtype)
        for key, value in optimizer.state[param].items()
    }
    last.grad = torch.randn(4096, generator=rng).bfloat16().to(last.dtype)
    other.step()
    elementwise = {key: value for key, value in other.state[last].items() if value.dim()}
    return {key: value.bfloat16() for key, value in {"param": last, **elementwise}.items()}


def refused(replayed: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> int:
    """How many elements the proof of a checkpoint would not let pass."""
    eps = torch.finfo(torch.bfloat16).eps
    allowed = {key: value.double().abs() * eps for key, value in truth.items()}
    differences = {key: (replayed[key].double() - truth[key].double()).abs() for key in truth}
    return sum(
        int((differences[key] > allowed[key] + SMALL_LR * proof.OF_LR).sum()) for key in truth
    )


@pytest.mark.parametrize("name", [kind.name for kind in optim.KINDS.values() if kind.rounds_once])
def test_fused_updates_in_16_bits_round_once_and_others_more_often(name: str) -> None:
    once = small_update(name, "forloop", wide=True)
    assert refused(small_update(name, "fused"), once) == 0
    assert refused(small_update(name, "fused"), small_update(name, "foreach")) > 0


@pytest.mark.parametrize(
    ("grad", "expected"),
    [
        (torch.zeros(4, 6), None),
        (torch.zeros(4, 6).to_sparse(), "sparse"),
        (MyTensor(torch.zeros(4, 6)), "MyTensor"),
        (torch.zeros(4, 6).double(), "another dtype"),
        (torch.zeros(6, 4).T, "unlike the parameter"),
    ],
)
def test_gradients_that_cannot_be_sent(grad: Tensor, expected: str | None) -> None:
    found = optim.gradient_obstacle(torch.zeros(4, 6), grad)
    assert found is expected is None or expected in (found or "")


def test_dimensions_of_size_one_do_not_matter_for_the_layout() -> None:
    param = torch.zeros(4, 1, 3)
    assert (
        optim.gradient_obstacle(param, torch.zeros(4, 3).as_strided((4, 1, 3), (3, 7, 1))) is None
    )


# --- recipes --------------------------------------------------------------------------------------


def test_a_recipe_survives_the_socket_and_later_changes() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    optimizer: Any = torch.optim.AdamW(
        [{"params": [torch.zeros(3)], "name": "a"}, {"params": [torch.zeros(3)], "lr": 2}],
        lr=lr,
        betas=(0.9, math.nextafter(1, 0)),
        weight_decay=np.float64(0.3),
        eps=5e-324,
        fused=True,
    )
    optimizer.grad_scale = torch.tensor(2.0**16)
    update, copies = take_recipe(optimizer)
    lr.fill_(7)
    optimizer.param_groups[1]["lr"] = 3
    optimizer.grad_scale.fill_(0)
    assert copies == []
    message = Update(sequence=1, version=4, updates=[update, None], gradients=[])
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Update)
    assert arrived == message
    got = arrived.updates[0]
    assert got is not None
    assert got.groups[0] is not None
    assert got.groups[1] is not None
    hyper = {key: revive(value) for key, value in got.groups[0].hyper.items()}
    assert same_bits(hyper.pop("lr"), torch.tensor(0.1, dtype=torch.float64))
    assert hyper == {
        "betas": (0.9, math.nextafter(1, 0)),
        "weight_decay": 0.3,
        "eps": 5e-324,
        "amsgrad": False,
        "maximize": False,
        "decoupled_weight_decay": True,
    }
    assert got.groups[1].hyper["lr"] == 2
    assert type(got.groups[1].hyper["lr"]) is int
    assert got.grad_scale is not None
    assert same_bits(got.grad_scale.tensor(), torch.tensor(2.0**16))


def test_only_the_groups_that_are_asked_for_are_recorded() -> None:
    optimizer = torch.optim.SGD([{"params": [torch.zeros(3)]}, {"params": [torch.zeros(3)]}])
    optimizer.param_groups[0]["lr"] = object()
    update, _ = take_recipe(optimizer, groups=[1])
    assert update.groups[0] is None
    assert update.groups[1] is not None
    with pytest.raises(StateError, match=r"groups\.0\.lr is a object"):
        take_recipe(optimizer)


def test_device_values_are_cloned_named_and_filled_in() -> None:
    """On the meta device nothing can be read back, as on an accelerator nothing must be."""
    lr = torch.tensor(0.1, device="meta")
    optimizer: Any = torch.optim.AdamW([torch.zeros(3)])
    optimizer.param_groups[0]["betas"] = (lr, 0.99)
    optimizer.found_inf = torch.zeros((1,), device="meta")
    update, copies = take_recipe(optimizer, prefix="main.")
    assert [name for name, _ in copies] == ["main.groups.0.betas.0", "main.found_inf"]
    assert all(tensor.shape == () and tensor is not lr for _, tensor in copies)
    with pytest.raises(StateError, match=r"main\.found_inf never arrived"):
        fill(update, {"main.groups.0.betas.0": 0.5}).found_inf.tensor()  # type: ignore[union-attr]
    filled = fill(update, {"main.groups.0.betas.0": 0.5, "main.found_inf": 1.0})
    assert filled.skipped
    assert not update.skipped
    assert filled.groups[0] is not None
    beta = TensorValue(name="main.groups.0.betas.0", dtype="float32", value=0.5)
    assert filled.groups[0].hyper["betas"] == (beta, 0.99)


def test_recipes_of_unknown_optimizers_are_refused() -> None:
    with pytest.raises(StateError, match="MyAdam cannot be replayed"):
        take_recipe(MyAdam([torch.zeros(3)]))


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options", "runs"), CASES)
def test_a_real_update_repeats_on_a_sample(name: str, options: dict[str, Any], runs: str) -> None:
    def make(params: Sequence[Tensor]) -> torch.optim.Optimizer:
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        return optim.KINDS[name].cls(groups, **options, **FLAGS[runs])  # type: ignore[call-arg]

    training = Training(make, [(300, 21), (), (2, 3), (100,)], steps=1)
    for before in (0, 1):  # with and without state
        for param in training.params[before:]:
            param.grad = torch.randn(param.shape)
        sample = Sample(training.optimizer)
        training.optimizer.step()
        assert sample.groups == {0, 1}
        assert sample.repeats() == {}


def test_a_first_update_repeats_on_a_sample() -> None:
    optimizer = torch.optim.AdamW([torch.ones(5000)], fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(5000)
    sample = Sample(optimizer)
    optimizer.step()
    assert sample.repeats() == {}


def test_a_patched_optimizer_is_found_by_its_sample() -> None:
    params = [torch.ones(100), torch.ones(200)]
    optimizer = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    sample = Sample(optimizer)
    optimizer.step()
    params[1][-1] = torch.nextafter(params[1][-1], torch.tensor(9.0))
    assert sample.repeats() == {1: "a replayed sample of AdamW's update differs in 'param'"}


@pytest.mark.parametrize(("trained", "same"), [("foreach", False), ("fused", True)])
def test_a_sample_lets_nothing_pass_that_the_proof_refuses(
    trained: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator: replayed by the fused kernel, and compared within a tolerance.

    Only ``foreach`` rounds after every operation, so that updates differ by some percent of lr.
    """
    monkeypatch.setattr(recipe, "replay_implementation", lambda *_: "fused")
    monkeypatch.setattr(sample_module, "_exact", lambda live: False)
    rng = torch.Generator().manual_seed(0)
    params = [torch.zeros(4096, dtype=torch.bfloat16)]
    optimizer = torch.optim.AdamW(params, lr=1e-3, **FLAGS[trained])  # type: ignore[arg-type]
    for _ in range(5):
        params[0].grad = torch.randn(4096, generator=rng).bfloat16()
        sample = Sample(optimizer)
        optimizer.step()
    expected = {} if same else {0: "a replayed sample of AdamW's update differs in 'param'"}
    assert sample.repeats() == expected


def test_samples_and_proofs_are_measured_alike() -> None:
    assert (sample_module.RELATIVE, sample_module.OF_LR) == (proof.RELATIVE, proof.OF_LR)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        allowed = max(proof.RELATIVE, eps)
        truth = torch.ones(1, dtype=dtype)
        for units in (1, 2, 4, 8):
            if sample_module._close(truth + units * eps, truth, 0.0):
                assert units * eps <= allowed


def test_what_has_no_gradient_or_cannot_be_replayed_is_not_sampled() -> None:
    params = [torch.ones(4), torch.ones(4), torch.ones(4, dtype=torch.complex64)]
    optimizer = torch.optim.SGD([{"params": [param]} for param in params])
    params[1].grad, params[2].grad = torch.ones(4), torch.ones(4, dtype=torch.complex64)
    sample = Sample(optimizer)
    optimizer.step()
    assert sample.groups == {1}
    assert sample.repeats() == {}
    assert Sample(optimizer, groups=[0]).repeats() == {}
