"""``gockpt inspect`` and ``verify``: what is there, where each byte lies, what is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from storage_kit import make_image, save
from torch import nn

import gockpt
from gockpt.cli.main import call


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four alike layers, tied weights, a schedule; steps 2 and 4."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)) for _ in range(4)]
    model = nn.ModuleDict({"tokens": nn.Embedding(8, 8), "layers": nn.Sequential(*layers)})
    model["head"] = nn.Linear(8, 8, bias=False)
    model["head"].weight = model["tokens"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    path = tmp_path_factory.mktemp("inspect") / "ckpt"
    with gockpt.Checkpointer(
        model, optimizer, path, every=2, extras={"scheduler": scheduler}, agent="thread"
    ) as ckpt:
        for _ in range(4):
            model["head"](model["layers"](model["tokens"](torch.arange(8)))).sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ckpt.step()
    return path


def run(line: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> str:
    capsys.readouterr()
    assert call(line) == code
    return capsys.readouterr().out


def document(
    line: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0
) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run([*line, "--json", "-"], capsys, code=code))
    return found


# -- inspect ---------------------------------------------------------------------------------------


def test_every_byte_of_the_files_is_counted_once(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(["inspect", str(root)], capsys)
    assert (found["kind"], found["step"], found["strategy"]) == ("inspect", 4, "gockpt")
    (file,) = found["files"]
    size = (Path(found["path"]) / file["name"]).stat().st_size
    counted = dict(found["bytes"])
    assert counted.pop("total") == sum(counted.values()) == size == file["bytes"]
    assert counted["header"] == file["data_start"]
    parameters = 64 + 4 * (64 + 8 + 64)
    assert counted["model"] == 4 * parameters
    assert counted["optimizer"] == 8 * parameters + 4 * 13
    assert (
        sum(one["bytes"] for one in found["tensors"])
        == size - counted["header"] - (counted["padding"])
    )


def test_the_bytes_are_where_it_says(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(["inspect", str(root), "--step", "2"], capsys)
    checkpoint = gockpt.open(root, 2)
    for one in found["tensors"]:
        (place,) = one["places"]
        raw = (Path(found["path"]) / place["file"]).read_bytes()[place["start"] : place["stop"]]
        wanted = checkpoint.tensor(one["name"])
        assert np.array_equal(np.frombuffer(raw, np.uint8), wanted.reshape(-1).view(torch.uint8))
        assert place["extents"][0]["start"] <= place["start"]
        assert place["stop"] <= place["extents"][-1]["stop"]


def test_people_see_a_short_tree(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(["inspect", str(root)], capsys)
    assert "tokens.weight = head.weight" in out
    assert "0 … 3   4 alike, each:" in out
    assert out.count("8 × 8") == 3
    assert "exp_avg, exp_avg_sq (float32)" in out
    assert "optimizer state of 13 parameters" in out
    assert "last_epoch 4" in out
    assert "proof     exact" in " ".join(out.split("  ")) or "exact: " in out
    assert len(out.splitlines()) < 60


def test_one_tensor_with_its_values(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["inspect", str(root), "--tensor", "model.head.*"]
    (one,) = document(line, capsys)["tensors"]
    tensor = gockpt.open(root).tensor("model.head.weight")
    assert (one["name"], one["aliases"]) == ("model.tokens.weight", ["model.head.weight"])
    assert one["values"]["min"] == float(tensor.min())
    assert one["values"]["mean"] == pytest.approx(float(tensor.double().mean()))
    assert one["values"]["first"] == tensor.reshape(-1)[:8].tolist()
    out = run(line, capsys)
    assert one["places"][0]["extents"][0]["xxh3"] in out
    assert f"{one['places'][0]['start']:,}" in out


def test_values_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {
        "model.nan": torch.tensor([1.0, float("nan"), -3.0]),
        "model.inf": torch.tensor([float("inf"), 1.0]),
        "model.wave": torch.complex(torch.tensor([3.0]), torch.tensor([4.0])),
        "model.flag": torch.tensor([True, False]),
        "model.half": torch.tensor([0.5]).bfloat16(),
        "model.none": torch.zeros(0, 4),
        "model.eight": torch.tensor([2.0]).to(torch.float8_e5m2),
        "model.scalar": torch.tensor(7),
    }
    save(tmp_path, step=1, image=make_image(tensors))

    def of(name: str) -> dict[str, Any]:
        (one,) = document(["inspect", str(tmp_path), "--tensor", f"model.{name}"], capsys)[
            "tensors"
        ]
        found: dict[str, Any] = one["values"]
        return found

    assert of("nan") == {"min": -3, "max": 1, "mean": -1, "nan": 1, "first": [1, "nan", -3]}
    assert (of("inf")["max"], of("inf")["min"]) == ("inf", 1)
    assert (of("wave")["max"], of("wave")["first"]) == (5, ["(3+4j)"])
    assert (of("flag")["mean"], of("flag")["first"]) == (0.5, [True, False])
    assert of("half")["mean"] == 0.5
    assert of("none") == {"min": None, "max": None, "mean": None, "nan": 0, "first": []}
    assert of("eight")["first"] == [2]
    assert of("scalar")["first"] == [7]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{root} --tensor model.token.weight", "did you mean 'model.tokens.weight'"),
        ("{root} --step 3", "no checkpoint of step 3, only of 2, 4"),
        ("nowhere", "no such directory"),
        ("{file}", "is not a checkpoint"),
    ],
)
def test_wrong_use(line: str, says: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next(root.glob("*/*.safetensors"))
    assert call(["inspect", *line.format(root=root, file=file).split()]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_manifest_names_its_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = next(root.glob("step-000000002-*/rank-00000.json"))
    assert document(["inspect", str(manifest)], capsys)["step"] == 2
    assert document(["verify", str(manifest)], capsys)["checkpoints"][0]["step"] == 2


# -- verify ----------------------------------------------------------------------------------------


def test_verify_names_file_bytes_and_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save(tmp_path, step=1)
    save(tmp_path, step=2)
    path = directory / "rank-00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    newer, older = document(["verify", str(tmp_path)], capsys, code=1)["checkpoints"]
    assert newer["damages"] == newer["problems"] == []
    (damage,) = older["damages"]
    assert damage["file"] == str(path)
    assert damage["start"] < len(raw) == damage["stop"]
    assert "model.b.weight" in damage["tensors"]
    document(["verify", str(tmp_path), "--newest"], capsys)
    path.write_bytes(raw[:-5])
    said = run(["verify", str(directory)], capsys, code=1)
    assert f"has {len(raw) - 5} bytes instead of {len(raw)}" in said
    assert "model.b.weight" in said
