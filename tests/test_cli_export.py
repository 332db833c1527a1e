"""Checkpoints for other tools: loaded back by those tools themselves, and compared bit for bit."""

from __future__ import annotations

import copy
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from storage_kit import assert_same_bits, make_image, save
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gockpt
from gockpt import faults
from gockpt.cli.main import call
from gockpt.faults import Fault
from gockpt.workloads.precision import MasterWeights

STEPS = 3


class Net(nn.Module):
    """Tied weights, a channels-last convolution, buffers of rare kinds, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(16)  # has a 0-dim buffer
        self.register_buffer("wave", torch.complex(torch.randn(5), torch.randn(5)))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.conv(x.view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        return self.head(torch.relu(self.norm(self.inner(images.flatten(1)))))


@dataclass
class Trained:
    """A training that ended with a checkpoint, and what was in it then."""

    root: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    masters: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("plain") / "ckpt", masters=False)


@pytest.fixture(scope="module")
def mastered(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("mastered") / "ckpt", masters=True)


@pytest.fixture(params=["plain", "mastered"])
def trained(request: pytest.FixtureRequest) -> Trained:
    """With fp32 weights, and with bf16 ones behind fp32 masters."""
    found: Trained = request.getfixturevalue(request.param)
    return found


def train(root: Path, *, masters: bool) -> Trained:
    torch.manual_seed(3)
    model = Net().bfloat16() if masters else Net()
    copies = MasterWeights(model) if masters else None
    named = list(copies.masters.items() if copies else model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            # The frozen one stands between others: positions must still be the optimizer's own.
            {"params": [pair for pair in named if "weight" not in pair[0]], "weight_decay": 0.0},
            {"params": [pair for pair in named if "weight" in pair[0]]},
        ],
        lr=0.01,
        fused=True,
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 50])
    with gockpt.Checkpointer(
        model, optimizer, root, every=STEPS, extras={"scheduler": scheduler}, agent="thread"
    ) as ckpt:
        for _ in range(STEPS):
            x = torch.randn(4, 48, dtype=next(model.parameters()).dtype)
            model(x).float().square().mean().backward()
            if copies:
                copies.take_gradients()
            optimizer.step()
            if copies:
                copies.store_weights()
            scheduler.step()
            optimizer.zero_grad()
            model.zero_grad()
            ckpt.step()
    return Trained(root, model, optimizer, scheduler, dict(copies.masters) if copies else {})


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    faults.disarm()


def export(root: Path, line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert call(["export", str(root), *line.split(), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert f"step {STEPS}" in err
    found: dict[str, Any] = json.loads(out)
    return found


def wiped(trained: Trained) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model and optimizer with other values, to load into."""
    model, optimizer = copy.deepcopy((trained.model, trained.optimizer))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 99.0
    return model, optimizer


def assert_same_model(found: nn.Module, wanted: nn.Module) -> None:
    for (name, one), two in zip(
        found.state_dict().items(), wanted.state_dict().values(), strict=True
    ):
        assert one.dtype == two.dtype, name
        assert torch.equal(one, two), name


def assert_same_optimizer(found: torch.optim.Optimizer, wanted: torch.optim.Optimizer) -> None:
    one, two = found.state_dict(), wanted.state_dict()
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    for index, state in two["state"].items():
        assert one["state"][index].keys() == state.keys()
        for key, tensor in state.items():
            assert one["state"][index][key].dtype == tensor.dtype
            assert torch.equal(one["state"][index][key], tensor), (index, key)


# -- each format, loaded by its own library --------------------------------------------------------


def test_safetensors_holds_the_models_own_names(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    said = export(trained.root, "out.safetensors", capsys)
    found = safetensors.torch.load_file("out.safetensors")
    wanted = trained.model.state_dict()
    assert found.keys() == wanted.keys() - {"head.weight"}
    for name, tensor in found.items():
        assert_same_bits(tensor, wanted[name].contiguous())
    with safetensors.safe_open("out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "inner.weight"}
    assert (said["files"], said["tensors"]) == ([str(Path("out.safetensors").absolute())], 12)
    model, _ = wiped(trained)
    assert safetensors.torch.load_model(model, "out.safetensors") == (set(), [])
    assert_same_model(model, trained.model)


def test_safetensors_of_everything(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    export(trained.root, "out.safetensors --only all", capsys)
    checkpoint = gockpt.open(trained.root)
    found = safetensors.torch.load_file("out.safetensors")
    assert found.keys() == set(checkpoint.names()) - {"model.head.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, checkpoint.tensor(name)), name


def test_safetensors_in_shards(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    said = export(trained.root, "out --max-shard-size 0.5KB", capsys)
    files = sorted(path.name for path in Path("out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        part = safetensors.torch.load_file(Path("out", file))
        found[name] = part[name]
        assert len(part) == 1 or sum(one.nbytes for one in part.values()) <= 500
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())
    assert len(said["files"]) == len(files) + 1
    export(trained.root, "whole", capsys)
    whole = safetensors.torch.load_file("whole/model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_torch_file_loads_into_model_and_optimizer(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    export(trained.root, "out.pt --to torch", capsys)
    saved = torch.load("out.pt", weights_only=True)
    model, optimizer = wiped(trained)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert_same_model(model, trained.model)
    assert_same_optimizer(optimizer, trained.optimizer)
    assert saved["step"] == STEPS
    masters = saved.get("master", {})
    assert masters.keys() == trained.masters.keys()
    for name, tensor in masters.items():
        assert_same_bits(tensor, trained.masters[name].detach())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9])
    scheduler.load_state_dict(saved["extras"]["scheduler"])
    assert scheduler.state_dict() == trained.scheduler.state_dict()
    assert type(scheduler.milestones) is Counter


def test_torch_file_of_the_model_alone(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    export(trained.root, "out.pt --to torch --only model", capsys)
    model, _ = wiped(trained)
    model.load_state_dict(torch.load("out.pt", weights_only=True))
    assert_same_model(model, trained.model)
    assert Path("out.pt").stat().st_size < 60_000


def test_generators_come_back_from_a_torch_file(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arrays are tensors there; docs/format.md says how to put them back."""
    export(trained.root, "out.pt --to torch", capsys)
    rng = torch.load("out.pt", weights_only=True)["extras"]["rng"]
    original = gockpt.open(trained.root).objects()["rng"]
    assert torch.equal(rng["torch"], original["torch"])
    assert np.array_equal(rng["numpy"]["state"]["key"].numpy(), original["numpy"]["state"]["key"])
    version, words, gauss = rng["python"]
    random.Random().setstate((version, tuple(words.tolist()), gauss))


@pytest.mark.parametrize("one_file", [True, False])
def test_dcp_directory_loads_into_model_and_optimizer(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    one_file: bool,
) -> None:  # fmt: skip
    if not one_file:
        monkeypatch.setattr("gockpt.hostmemory.available", lambda: 1)
    export(trained.root, "out --to dcp", capsys)
    assert (len(list(Path("out").glob("*.distcp"))) == 1) is one_file
    model, optimizer = wiped(trained)
    if trained.masters:
        state: dict[str, Any] = {"model": model.state_dict(), "master": dict(trained.masters)}
        state["master"] = {name: torch.zeros_like(one) for name, one in state["master"].items()}
        load_dcp(state, "out")
        for name, tensor in state["master"].items():
            assert_same_bits(tensor.detach(), trained.masters[name].detach())
    else:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        load_dcp(state := {"model": of_model, "optimizer": of_optimizer}, "out")
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert_same_optimizer(optimizer, trained.optimizer)
    assert_same_model(model, trained.model)


def load_dcp(state: dict[str, Any], directory: str) -> None:
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.load(state, checkpoint_id=directory, no_dist=True)


def test_dcp_directory_has_the_rest_as_single_entries(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    export(trained.root, "out --to dcp", capsys)
    state: dict[str, Any] = {"extras": {"scheduler": None}, "step": None}
    load_dcp(state, "out")
    assert state["step"] == STEPS
    assert state["extras"]["scheduler"] == trained.scheduler.state_dict()


def test_several_optimizers_have_their_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = {
        "first": torch.optim.AdamW(model[0].parameters(), lr=0.1, fused=True),
        "second": torch.optim.SGD(model[1].parameters(), lr=0.2, momentum=0.9),
    }
    with gockpt.Checkpointer(model, optimizers, tmp_path / "c", every=3, agent="thread") as ckpt:
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            for optimizer in optimizers.values():
                optimizer.step()
            ckpt.step()
    export(tmp_path / "c", "out.pt --to torch", capsys)
    saved = torch.load("out.pt", weights_only=True)["optimizer"]
    for key, optimizer in optimizers.items():
        other = type(optimizer)(optimizer.param_groups[0]["params"], lr=9.0)
        other.load_state_dict(saved[key])
        assert_same_optimizer(other, optimizer)


# -- what cannot be --------------------------------------------------------------------------------


WRONG = [
    ("{root} out --to safetensor", "did you mean 'safetensors'"),
    ("{root} out --to pickle", "choose one of"),
    ("{root} out --only weights", "choose one of"),
    ("{root} out --max-shard-size huge", "5GB"),
    ("{root} out --max-shard-size 0", "5GB"),
    ("{root} out --step 7", f"no checkpoint of step 7, only of {STEPS}"),
    ("{root} nowhere/out", "make it first"),
    ("{root} there", "--force"),
    ("{root} full --force", "'kept.txt'"),
    ("{root} empty --to torch --force", "makes a file"),
    ("missing out", "no such directory"),
    ("there out", "is not a checkpoint"),
    ("empty out", "has no checkpoints"),
]


@pytest.mark.parametrize(("line", "says"), WRONG, ids=[line for line, _ in WRONG])
def test_wrong_use_is_told_in_one_line_and_leaves_nothing(
    line: str, says: str, plain: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert call(["export", *line.format(root=plain.root).split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gockpt: ")
    assert said.count("\n") == 1
    assert says in said
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there").read_text() == "mine"


def test_too_little_room_is_told_with_numbers(
    plain: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("gockpt.storage.fs.free_bytes", lambda path: 1000)
        assert call(["export", str(plain.root), "out"]) == 2
    assert "1 kB are free" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("gockpt.hostmemory.available", lambda: 1000)
        assert call(["export", str(plain.root), "out", "--to", "torch"]) == 2
    assert "of memory" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_a_dtype_that_safetensors_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = make_image({"model.wave": torch.zeros(3, dtype=torch.complex128)})
    save(made(tmp_path / "c"), step=STEPS, image=image)
    assert call(["export", str(tmp_path / "c"), "out"]) == 2
    assert "'model.wave' is complex128" in capsys.readouterr().err
    export(tmp_path / "c", "out.pt --to torch --only model", capsys)
    assert torch.load("out.pt", weights_only=True)["wave"].dtype == torch.complex128


def made(path: Path) -> Path:
    path.mkdir()
    return path


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 16
    path.write_bytes(raw)


FORMATS = ["out.safetensors", "out", "out --to torch", "out --to dcp"]


@pytest.mark.parametrize("line", FORMATS)
def test_a_damaged_tensor_is_not_exported(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save(made(tmp_path / "c"), step=1)
    flip(directory / "rank-00000.safetensors", 65536 + 200)
    assert call(["export", str(tmp_path / "c"), *line.split()]) == 1
    said = capsys.readouterr().err
    assert "rank-00000.safetensors: bytes" in said
    assert "model.a.weight" in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("line", FORMATS)
@pytest.mark.parametrize("point", ["fs.create", "fs.pwrite", "fs.fdatasync", "fs.rename"])
def test_a_full_disk_leaves_the_old_export_and_nothing_else(
    line: str, point: str, plain: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(plain.root, line, capsys)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    faults.arm([Fault(point=point, action="errno:ENOSPC", after=0)])
    assert call(["export", str(plain.root), *line.split(), "--force"]) == 1
    said = capsys.readouterr().err
    assert "No space left" in said
    assert said.count("\n") == 1
    faults.disarm()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    export(plain.root, f"{line} --force", capsys)
    assert {path.name for path in tmp_path.rglob("*")} >= {path.name for path in before}
    assert not list(tmp_path.glob(".gockpt*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_export_leaves_no_output(
    number: signal.Signals, plain: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What SIGKILL leaves has another name, and the next export to that place removes it."""
    code = (
        "import sys; from gockpt import faults; from gockpt.cli import main; "
        "faults.arm([faults.Fault(point='fs.fdatasync', action='delay:30')]); "
        "sys.argv = ['gockpt', *sys.argv[1:]]; main.run()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "export", str(plain.root), "out.safetensors"]
    )
    deadline = time.monotonic() + 60
    while not (left := list(tmp_path.glob(".gockpt-export-*"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
    assert list(tmp_path.iterdir()) == (left if number == signal.SIGKILL else [])
    export(plain.root, "out.safetensors", capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_one_tensor_at_a_time_is_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read once each, in the order of the file, and written before the next one is read."""
    image = make_image({f"model.{i}": torch.full((1000,), float(i)) for i in (3, 1, 2)})
    save(made(tmp_path / "c"), step=STEPS, image=image)
    seen: list[str] = []
    tensor, write = gockpt.Checkpoint.tensor, gockpt.storage.fs.pwrite_all
    monkeypatch.setattr(
        gockpt.Checkpoint, "tensor", lambda self, name: (seen.append(name), tensor(self, name))[1]
    )
    monkeypatch.setattr(
        gockpt.storage.fs,
        "pwrite_all",
        lambda fd, data, offset, path: (seen.append("write"), write(fd, data, offset, path=path)),
    )
    export(tmp_path / "c", "out.safetensors", capsys)
    assert seen == ["write", "model.3", "write", "model.1", "write", "model.2", "write"]
