"""A second reader of checkpoints, written from docs/format.md alone: json, struct and numpy.

It shares no code with gockpt. If it needs a change, the format has changed.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from storage_kit import forge, make_image, small_image, write_image
from torch import nn

import gockpt
from gockpt import storage

# -- the reader ------------------------------------------------------------------------------------

NUMPY = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "<i1",
    "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "<u1",
    "bool": "?", "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
"""numpy has no bfloat16: its bits are given out."""


def newest(root: Path) -> Path:
    """The checkpoint's directory with the highest sequence of those that exist."""
    found = []
    for directory in root.glob("step-*"):
        manifests = [json.loads(path.read_text()) for path in directory.glob("rank-*.json")]
        ranks = sorted(one["rank"] for one in manifests)
        if not manifests or ranks != list(range(manifests[0]["world_size"])):
            continue
        identity = {
            (one["step"], one["sequence"], one["run_id"], one["launch_id"]) for one in manifests
        }
        sizes = [
            (directory / file["name"]).stat().st_size == file["size"]
            for one in manifests
            for file in one["files"]
        ]
        if len(identity) == 1 and all(sizes):
            found.append((manifests[0]["sequence"], directory))
    return max(found)[1]


def manifest_of(directory: Path) -> dict[str, Any]:
    raw = (directory / "rank-00000.json").read_bytes()
    manifest: dict[str, Any] = json.loads(raw)
    assert manifest["format"] == 1
    # The checksum's 32 digits stand last, before the closing quote and brace.
    digits, end = raw[-34:-2], raw[-2:]
    assert xxhash.xxh3_128_hexdigest(raw[:-34] + end) == digits.decode() == manifest["checksum"]
    return manifest


def check_extents(directory: Path, manifest: dict[str, Any]) -> None:
    """Every byte of every file is covered once, and is as it was."""
    for index, file in enumerate(manifest["files"]):
        data = (directory / file["name"]).read_bytes()
        end = 0
        extents = [one for one in manifest["extents"] if one["file"] == index]
        for extent in sorted(extents, key=lambda one: int(one["offset"])):
            assert extent["offset"] == end
            end += extent["length"]
            assert xxhash.xxh3_128_hexdigest(data[extent["offset"] : end]) == extent["xxh3"]
        assert end == len(data) == file["size"]


def header_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    assert header.pop("__metadata__") == {"format": "gockpt", "version": "1"}
    return header


def tensor_of(directory: Path, manifest: dict[str, Any], name: str) -> np.ndarray[Any, Any]:
    record = next(
        one for one in manifest["tensors"] if name in (one["name"], *one.get("aliases", ()))
    )
    dtype = np.dtype(NUMPY[record["dtype"]])
    nbytes = math.prod(record["shape"]) * dtype.itemsize
    whole = {"file": record["file"], "offset": record["offset"], "nbytes": nbytes}
    raw = b""
    for piece in record.get("pieces") or [whole]:
        file = manifest["files"][piece["file"]]
        with (directory / file["name"]).open("rb") as opened:
            opened.seek(file["data_start"] + piece["offset"])
            raw += opened.read(piece["nbytes"])
    order = record["order"]
    dense = np.frombuffer(raw, dtype).reshape([record["shape"][dim] for dim in order])
    return dense.transpose(np.argsort(order) if order else ())


class Decoder:
    """Tagged JSON, as the section of that name says."""

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.tensor = lambda name: tensor_of(directory, manifest, name)

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(one) for one in node]
        if not isinstance(node, dict):
            return node
        ((tag, body),) = node.items()
        return getattr(self, f"of_{tag}")(body)

    def of_dict(self, body: list[Any]) -> dict[Any, Any]:
        return {self.value(key): self.value(value) for key, value in body}

    def of_tuple(self, body: list[Any]) -> tuple[Any, ...]:
        return tuple(self.value(body))

    def of_counter(self, body: list[Any]) -> dict[Any, Any]:
        counted: dict[Any, Any] = self.value(body[0])
        return counted

    def of_float(self, body: list[Any]) -> float:
        return float(body[0])

    def of_int(self, body: list[Any]) -> int:
        return int(body[0], 16)

    def of_tensor(self, body: list[Any]) -> np.ndarray[Any, Any]:
        source, dtype, *shape = body
        return self.raw(source).view(NUMPY[dtype]).reshape(shape)

    def of_array(self, body: list[Any]) -> np.ndarray[Any, Any]:
        source, dtype, *shape = body
        return self.raw(source).view(dtype).reshape(shape)

    def raw(self, source: Any) -> np.ndarray[Any, Any]:
        if isinstance(source, str):
            return np.ascontiguousarray(self.tensor(source)).reshape(-1).view(np.uint8)
        return np.frombuffer(base64.b64decode(source["bytes"][0]), np.uint8)


# -- what it reads ---------------------------------------------------------------------------------


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a training with what needs rules: tied weights, channels last, tuples, integer keys."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), nn.Flatten(),
        nn.Linear(36, 36), nn.Linear(36, 36), nn.BatchNorm1d(36),
    )  # fmt: skip
    model[3].weight = model[2].weight
    model.register_buffer("wave", torch.complex(torch.randn(5), torch.randn(5)))
    model.register_buffer("short", torch.randn(7).bfloat16())
    model.register_buffer("nothing", torch.zeros(0, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 50])
    path = tmp_path_factory.mktemp("second") / "ckpt"
    with gockpt.Checkpointer(
        model, optimizer, path, every=2, extras={"scheduler": scheduler}, agent="thread"
    ) as ckpt:
        for _ in range(4):
            model(torch.randn(4, 3, 4, 4)).square().sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ckpt.step()
    return path


def test_the_newest_is_found_and_every_byte_is_accounted_for(root: Path) -> None:
    directory = newest(root)
    assert directory == gockpt.open(root).path
    manifest = manifest_of(directory)
    assert (manifest["step"], manifest["sequence"]) == (4, 2)
    check_extents(directory, manifest)


def test_every_tensor_is_read_as_gockpt_reads_it(root: Path) -> None:
    directory = newest(root)
    manifest, checkpoint = manifest_of(directory), gockpt.open(root)
    names = [name for one in manifest["tensors"] for name in (one["name"], *one.get("aliases", ()))]
    assert sorted(names) == sorted(checkpoint.names())
    assert {"model.3.weight", "model.nothing", "optim.0.weight.step"} <= set(names)
    for name in names:
        found, wanted = tensor_of(directory, manifest, name), bits_of(checkpoint.tensor(name))
        assert found.dtype == wanted.dtype, name
        assert np.array_equal(found, wanted), name


def test_header_and_manifest_say_the_same(root: Path) -> None:
    directory = newest(root)
    manifest = manifest_of(directory)
    header = header_of(directory / manifest["files"][0]["name"])
    padding = {name: one for name, one in header.items() if name.startswith("__gockpt_pad__.")}
    held = {name: one["data_offsets"][0] for name, one in header.items() if name not in padding}
    assert held == {one["name"]: one["offset"] for one in manifest["tensors"]}
    ends = sorted(one["data_offsets"] for one in header.values() if one["data_offsets"][0])
    starts = [start for start, stop in ends if stop > start]
    assert len(set(starts)) == len(starts)
    assert all(one["dtype"] == "U8" for one in padding.values())


def test_groups_and_extras_are_decoded(root: Path) -> None:
    directory = newest(root)
    manifest = manifest_of(directory)
    decoder = Decoder(directory, manifest)
    (group,) = manifest["groups"]["groups"]
    options = decoder.value(group["options"])
    assert options["betas"] == (0.9, 0.999)
    assert options["lr"] == np.float32(0.01) * np.float32(0.1)
    assert group["params"][:2] == ["0.weight", "0.bias"]
    extras = decoder.value(manifest["extras"]["tree"])
    assert extras["scheduler"]["milestones"] == {2: 1, 50: 1}
    assert extras["scheduler"]["last_epoch"] == 4
    wanted = gockpt.open(root).objects()["rng"]
    assert np.array_equal(extras["rng"]["torch"], wanted["torch"].numpy())
    assert np.array_equal(extras["rng"]["python"][1], wanted["python"][1])


def test_a_tensor_in_pieces_is_joined(tmp_path: Path) -> None:
    whole = torch.arange(3000, dtype=torch.float32).view(50, 60)
    flat = whole.t().contiguous().view(-1)
    image = make_image({"w#1": flat[2048:], "w#0": flat[:2048]})
    directory = storage.create_checkpoint(tmp_path, step=1, sequence=1, launch="0123abcd")
    manifest = write_image(directory, image)
    first, second = ({e.name: e.offset for e in image.entries}[f"w#{i}"] for i in (0, 1))

    def cut(fields: dict[str, Any]) -> None:
        box = {"shape": [50, 60], "order": [1, 0], "global_shape": [50, 60]}
        pieces = [
            {"entry": "w#0", "file": 0, "offset": first, "nbytes": 2048 * 4},
            {"entry": "w#1", "file": 0, "offset": second, "nbytes": 952 * 4},
        ]
        where = {"name": "w", "file": 0, "offset": 0, "dtype": "float32", "global_offset": [0, 0]}
        fields["tensors"] = [{**where, **box, "pieces": pieces}]

    (directory / "rank-00000.json").write_bytes(forge(manifest, cut))
    assert torch.equal(gockpt.open(tmp_path).tensor("w"), whole)
    assert np.array_equal(tensor_of(directory, manifest_of(directory), "w"), whole.numpy())


def test_one_changed_byte_is_found_by_it_too(tmp_path: Path) -> None:
    directory = storage.create_checkpoint(tmp_path, step=1, sequence=1, launch="0123abcd")
    storage.commit(directory, write_image(directory, small_image()), still_ours=lambda: True)
    manifest = manifest_of(newest(tmp_path))
    path = directory / manifest["files"][0]["name"]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(AssertionError):
        check_extents(directory, manifest)
    text = (directory / "rank-00000.json").read_bytes()
    (directory / "rank-00000.json").write_bytes(text.replace(b'"step":1', b'"step":3'))
    with pytest.raises(AssertionError):
        manifest_of(directory)
