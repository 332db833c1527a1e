"""The harness's models: true sizes, exact repetition, resumable data, master weights."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gockpt import workloads
from gockpt.errors import ConfigError, StateError
from gockpt.workloads import PRESETS, Preset, Workload, build, find_preset, param_count, shrunk
from gockpt.workloads import measure as measure_module
from gockpt.workloads.build import build_model, rate
from gockpt.workloads.data import Loader, read_text
from gockpt.workloads.llama import rotate, rotation
from gockpt.workloads.precision import find_precision

PUBLISHED = {
    "gpt-125m": 125e6,
    "gpt-350m": 356e6,
    "gpt-760m": 760e6,
    "gpt-1.3b": 1.3e9,
    "gpt-2.7b": 2.65e9,
    "gpt-6.7b": 6.66e9,
    "gpt-13b": 12.85e9,
    "opt-350m": 331_196_416,
    "qwen3-0.6b": 596_049_920,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
}

SMALL = {
    "gpt": dataclasses.replace(
        PRESETS["gpt-tiny"], layers=2, d_model=32, embed_dim=16, heads=2, kv_heads=2, head_dim=16,
        d_ff=64, context=16, tokens=32, dropout=0.1,
    ),
    "llama": dataclasses.replace(
        PRESETS["qwen3-0.6b"], layers=2, d_model=32, embed_dim=32, heads=4, kv_heads=2, head_dim=8,
        d_ff=48, vocab=256, context=16, tokens=32, dropout=0.1, learning_rate=1e-3,
    ),
}  # fmt: skip


class Recorder:
    """A device that only notes its phases."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        self.phases.append((name, step))
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(workload: Workload, steps: int) -> list[float]:
    device = Recorder()
    return [workloads.train_step(workload, device, s).item() for s in range(1, steps + 1)]


def fingerprint(family: str, precision: str, seed: int) -> str:
    """Every loss and every weight of a short run."""
    workload = build(SMALL[family], precision=precision, seed=seed)
    digest = hashlib.sha256(repr(train(workload, 4)).encode())
    for param in workload.model.parameters():
        digest.update(param.detach().float().numpy().tobytes())
    return digest.hexdigest()


# --- presets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_true_sizes_are_the_published_ones(name: str) -> None:
    exact = isinstance(PUBLISHED[name], int)
    assert param_count(PRESETS[name]) == pytest.approx(PUBLISHED[name], rel=0 if exact else 0.015)


def test_tiny_is_about_ten_million_bytes_of_vocabulary_256() -> None:
    assert param_count(PRESETS["gpt-tiny"]) == pytest.approx(10e6, rel=0.1)
    assert PRESETS["gpt-tiny"].vocab == 256


@pytest.mark.parametrize("name", PRESETS)
def test_count_is_that_of_the_modules_and_a_shrunk_model_has_the_same_tensors(name: str) -> None:
    true, small = PRESETS[name], shrunk(PRESETS[name])
    meta = torch.device("meta")
    modules = [build_model(p, find_precision("fp32"), meta) for p in (true, small)]
    counts = [sum(p.numel() for p in module.parameters()) for module in modules]
    assert counts == [param_count(true), param_count(small)]
    names = [[n for n, _ in module.named_parameters()] for module in modules]
    assert names[0] == names[1]
    assert counts[1] == pytest.approx(counts[0] / true.shrink**2, rel=0.05)
    assert true.heads * small.kv_heads == small.heads * true.kv_heads


def test_shrinking_by_what_does_not_divide_rounds_the_widths() -> None:
    small = shrunk(PRESETS["gpt-1.3b"], 20)
    assert (small.d_model, small.q_dim, small.d_ff) == (104, 104, 408)  # of 102.4, 102.4, 409.6
    assert param_count(small) == pytest.approx(param_count(PRESETS["gpt-1.3b"]) / 20**2, rel=0.03)


@pytest.mark.parametrize("factor", [0, 97])
def test_shrinking_to_nothing_is_refused(factor: int) -> None:
    with pytest.raises(ConfigError, match=rf"gpt-125m cannot be shrunk by {factor}; use 1 to 96"):
        shrunk(PRESETS["gpt-125m"], factor)


def test_unknown_names_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'gpt-1.3'; did you mean 'gpt-1.3b'"):
        find_preset("gpt-1.3")
    with pytest.raises(ConfigError, match=r"'bf16'; did you mean 'bf16-master'"):
        build(SMALL["gpt"], precision="bf16")
    with pytest.raises(ConfigError, match="choose one of gpt-tiny, gpt-125m"):
        find_preset("☃")


# --- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SMALL)
def test_no_position_sees_a_later_one(family: str) -> None:
    model = build(SMALL[family], precision="fp32").model.eval()
    tokens = torch.arange(10).view(1, 10)
    changed = tokens.clone()
    changed[0, 6] = 99
    first, second = model(tokens), model(changed)
    assert torch.equal(first[:, :6], second[:, :6])
    assert not torch.equal(first[:, 6:], second[:, 6:])


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    cos, sin = rotation(32, 8, 10_000.0, q)
    queries, keys = rotate(q.expand(32, 8), cos, sin), rotate(k.expand(32, 8), cos, sin)
    scores = queries @ keys.T
    assert torch.allclose(scores[3, 1], scores[30, 28], atol=1e-5)
    assert not torch.allclose(scores[3, 1], scores[3, 2], atol=1e-5)


def test_projections_into_the_residual_stream_start_smaller() -> None:
    model = build(PRESETS["gpt-tiny"]).model
    spread = {name: param.std().item() for name, param in model.named_parameters()}
    assert spread["blocks.0.mlp.up.weight"] == pytest.approx(0.02, rel=0.02)
    assert spread["blocks.0.mlp.down.weight"] == pytest.approx(0.02 / math.sqrt(12), rel=0.02)


@pytest.mark.parametrize("family", SMALL)
def test_it_learns(family: str) -> None:
    losses = train(build(SMALL[family], precision="bf16-master"), 120)
    assert losses[0] == pytest.approx(math.log(256), abs=0.6)
    assert sum(losses[-10:]) / 10 < losses[0] - 1.0


# --- repetition and resumption ------------------------------------------------------------------

CASES = [(family, number) for family in SMALL for number in ("fp32", "bf16-master")]


def test_same_seed_same_bits_in_another_process() -> None:
    here = [fingerprint(family, number, 7) for family, number in CASES]
    script = (
        "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, sys.argv[1])\n"
        "from test_workloads import CASES, fingerprint\n"
        "print(*[fingerprint(family, number, 7) for family, number in CASES])"
    )
    child = [sys.executable, "-c", script, str(Path(__file__).parent)]
    there = subprocess.run(child, capture_output=True, text=True, timeout=200, check=True)
    assert there.stdout.split() == here
    assert fingerprint(*CASES[0], 8) != here[0]


@pytest.mark.parametrize(("family", "number"), CASES)
def test_a_resumed_run_goes_on_with_the_same_losses(family: str, number: str) -> None:
    straight = train(build(SMALL[family], precision=number), 7)

    first = build(SMALL[family], precision=number)
    assert train(first, 3) == straight[:3]
    rng, extras = torch.get_rng_state(), {k: v.state_dict() for k, v in first.extras.items()}

    second = build(SMALL[family], precision=number, seed=0)
    second.model.load_state_dict(first.model.state_dict())
    if first.masters is not None and second.masters is not None:
        for name, master in second.masters.masters.items():
            master.data.copy_(first.masters.masters[name])
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    for name, extra in second.extras.items():
        extra.load_state_dict(extras[name])
    torch.set_rng_state(rng)
    assert train(second, 4) == straight[3:]


def test_a_shrunk_large_model_really_trains() -> None:
    workload = build("llama-3.2-1b", shrink=64, tokens=8)
    assert (workload.params, workload.tokens) == (1_235_814_400, 8)
    assert workload.device_params == sum(p.numel() for p in workload.model.parameters())
    assert workload.scale == pytest.approx(64**2, rel=0.1)
    assert workload.precision.name == "bf16-master"
    assert all(math.isfinite(loss) for loss in train(workload, 2))


# --- the step -----------------------------------------------------------------------------------


def test_a_step_runs_three_phases_in_order() -> None:
    device = Recorder()
    loss = workloads.train_step(build(SMALL["gpt"]), device, 41)
    assert device.phases == [("forward", 41), ("backward", 41), ("update", 41)]
    assert not loss.requires_grad


def test_matrices_decay_and_the_rest_does_not_and_groups_carry_names() -> None:
    workload = build(SMALL["gpt"], precision="bf16-master")
    decayed, plain = workload.optimizer.param_groups
    assert decayed["weight_decay"] > 0 == plain["weight_decay"]
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in plain["params"]} == {1}
    names = decayed["param_names"] + plain["param_names"]
    assert sorted(names) == sorted(name for name, _ in workload.model.named_parameters())


def test_the_learning_rate_changes_at_every_step() -> None:
    rates = [rate(step, 50) for step in range(51)]
    assert all(earlier != later for earlier, later in itertools.pairwise(rates))
    assert rates[-1] == pytest.approx(0.1)
    workload = build(SMALL["gpt"])
    before = workload.optimizer.param_groups[0]["lr"]
    train(workload, 1)
    assert workload.optimizer.param_groups[0]["lr"] != before


def test_clipping_bounds_what_the_optimizer_uses() -> None:
    workload = build(SMALL["gpt"], precision="bf16-master", clip=1e-3)
    norms: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(grads).item())

    workload.optimizer.register_step_pre_hook(look)
    train(workload, 2)
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-3)


# --- master weights -----------------------------------------------------------------------------


def small_masters() -> tuple[Workload, dict[str, torch.nn.Parameter]]:
    workload = build(SMALL["gpt"], precision="bf16-master")
    assert workload.masters is not None
    return workload, workload.masters.masters


def test_weights_are_the_cast_of_their_masters_before_and_after_each_update() -> None:
    workload, masters = small_masters()
    for _ in range(3):
        for name, weight in workload.model.named_parameters():
            assert weight.dtype is torch.bfloat16
            assert torch.equal(weight, masters[name].bfloat16())
        train(workload, 1)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values())


def test_the_optimizer_uses_exact_upcasts_of_fresh_gradients() -> None:
    workload, masters = small_masters()
    weights = dict(workload.model.named_parameters())
    held: list[dict[str, tuple[Tensor, Tensor]]] = []

    def hold(*_: object) -> None:
        held.append({n: (weights[n].grad, m.grad) for n, m in masters.items()})  # type: ignore[misc]

    workload.optimizer.register_step_pre_hook(hold)
    train(workload, 1)
    kept = {name: (narrow.clone(), wide.clone()) for name, (narrow, wide) in held[0].items()}
    train(workload, 2)
    for name, (narrow, wide) in held[0].items():
        assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(narrow.float(), wide)
        assert torch.equal(narrow, kept[name][0])  # later steps wrote elsewhere
        assert torch.equal(wide, kept[name][1])


def test_a_weight_without_gradient_keeps_its_master() -> None:
    workload, masters = small_masters()
    name, weight = next(iter(workload.model.named_parameters()))
    train(workload, 1)
    before = masters[name].clone()
    weight.grad = None
    workload.update()
    assert masters[name].grad is None
    assert torch.equal(masters[name], before)


# --- data ---------------------------------------------------------------------------------------


def test_an_epoch_sees_every_chunk_once_and_epochs_differ() -> None:
    text = bytes(range(250))
    loader = Loader(text, rows=2, length=4, seed=3)  # 50 chunks, so 25 batches an epoch
    epochs = [[tuple(row) for _ in range(25) for row in next(loader)[0].tolist()] for _ in "ab"]
    expected = sorted(tuple(text[i : i + 4]) for i in range(0, 250, 5))
    assert sorted(epochs[0]) == sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1]


def test_targets_are_the_inputs_one_byte_on() -> None:
    inputs, targets = next(Loader(b"abcdefgh" * 9, rows=3, length=7))
    assert inputs.shape == targets.shape == (3, 7)
    assert inputs.dtype is targets.dtype is torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_loader_resumes_anywhere_and_leaves_the_global_generators_alone() -> None:
    text = random.Random(0).randbytes(500)
    loader = Loader(text, rows=3, length=6, seed=1)
    state = (random.getstate(), torch.get_rng_state())
    batches = [next(loader)[0] for _ in range(60)]
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    for position in (0, 1, 23, 59):
        other = Loader(text, rows=3, length=6, seed=1)
        other.load_state_dict({**loader.state_dict(), "position": position})
        assert torch.equal(next(other)[0], batches[position])


def test_a_position_in_other_data_is_refused() -> None:
    saved = Loader(b"x" * 100, rows=2, length=4, seed=1).state_dict()
    with pytest.raises(StateError, match=r"saved with seed 1 and this run has 2; resume with"):
        Loader(b"x" * 100, rows=2, length=4, seed=2).load_state_dict(saved)
    with pytest.raises(StateError, match="chunks 20 and this run has 40"):
        Loader(b"x" * 200, rows=2, length=4, seed=1).load_state_dict(saved)


def test_bad_data_is_refused_in_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    short = tmp_path / "short.txt"
    short.write_bytes(b"abc")
    with pytest.raises(ConfigError, match="No such file or directory; give a readable file"):
        read_text(tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match="Is a directory; give a readable file"):
        read_text(tmp_path)
    with pytest.raises(ConfigError, match="is empty; give a file with text"):
        read_text(empty)
    with pytest.raises(ConfigError, match="3 bytes but one sequence needs 17; give a longer text"):
        build(SMALL["gpt"], data=short)


def test_the_default_text_is_library_source() -> None:
    text = read_text()
    assert text == read_text()
    assert len(text) > 1 << 20
    assert b"import" in text


@pytest.mark.parametrize("tokens", [0, -4, 24])
def test_tokens_that_make_no_whole_sequences_are_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"a step of {tokens} tokens cannot be cut"):
        build(SMALL["gpt"], tokens=tokens)


# --- real tokens of an emulated step ------------------------------------------------------------


@pytest.mark.parametrize(("budget", "tokens"), [(0.001, 4), (0.9, 8), (1.6, 16), (99.0, 16)])
def test_the_most_tokens_within_the_budget_are_taken(
    monkeypatch: pytest.MonkeyPatch, budget: float, tokens: int
) -> None:
    def measured(_: Workload, count: int) -> workloads.RealTokens:
        return workloads.RealTokens(tokens=count, forward_s=0.03 * count, backward_s=0.07 * count)

    monkeypatch.setattr(measure_module, "measure", measured)
    workload = build(SMALL["gpt"], tokens=4)  # its context is 16
    assert workloads.measure_real_tokens(workload, budget).tokens == tokens


@pytest.mark.parametrize("preset", SMALL.values(), ids=list(SMALL))
def test_measuring_changes_nothing(preset: Preset) -> None:
    undisturbed = train(build(preset, tokens=4), 3)
    workload = build(preset, tokens=4)
    found = workloads.measure_real_tokens(workload, 60.0)
    assert found.tokens == 16
    assert found.seconds > 0
    assert all(param.grad is None for param in workload.model.parameters())
    assert train(workload, 3) == undisturbed


def test_a_budget_that_is_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a positive time"):
        workloads.measure_real_tokens(build(SMALL["gpt"]), 0.0)
