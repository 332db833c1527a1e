"""The image's header: exactly as long as reserved, and read by safetensors itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from storage_kit import Image, assert_same_bits, make_image, small_image

from gockpt.errors import CorruptError, StateError
from gockpt.state import Entry
from gockpt.storage.header import PAD, build_header, header_reserve, parse_header, stored_as

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]


def write_file(image: Image, path: Path, present: list[Entry]) -> None:
    header = build_header(present, image.size, image.reserve)
    assert len(header) == image.reserve
    assert image.reserve % 65536 == 0
    path.write_bytes(header + image.view[: image.size])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_reads_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    image = make_image({"x": tensor}, gap=3)
    write_file(image, tmp_path / "x.safetensors", image.entries)
    assert_same_bits(load_file(tmp_path / "x.safetensors")["x"], tensor)


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_rare_one_byte_types_are_stored_as_bytes(name: str) -> None:
    assert stored_as(name, (3,)) == ("U8", (3,))


def test_types_without_exact_form_are_refused() -> None:
    with pytest.raises(StateError, match="qint8"):
        stored_as("qint8", (3,))


def test_complex_is_stored_as_pairs_and_strided_in_memory_order(tmp_path: Path) -> None:
    image = small_image()
    write_file(image, tmp_path / "x.safetensors", image.entries)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "gockpt"
        pairs = file.get_tensor("model.fourier")
        assert torch.equal(torch.view_as_complex(pairs), image.tensors["model.fourier"])
        nhwc = file.get_tensor("model.a.weight")
        assert torch.equal(nhwc.permute(0, 3, 1, 2), image.tensors["model.a.weight"])
        assert file.get_tensor("model.nothing").shape == (0, 5)
        assert file.get_tensor("optim.a.weight.step").shape == ()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=0, max_size=8),
    gap=st.integers(0, 200),
    tail=st.integers(0, 5000),
    drawn=st.data(),
)
def test_any_subset_of_entries_fits_the_reserve_and_leaves_no_hole(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    gap: int,
    tail: int,
    drawn: st.DataObject,
) -> None:
    names = [f'n{i}."\\é\n' for i in range(len(sizes))]
    tensors = {
        name: torch.arange(size, dtype=torch.uint8) for name, size in zip(names, sizes, strict=True)
    }
    image = make_image(tensors, gap=gap, tail=tail)
    present = [entry for entry in image.entries if drawn.draw(st.booleans())]
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    write_file(image, path, drawn.draw(st.permutations(present)))
    found = load_file(path)  # refuses files with holes
    kept = {name: tensor for name, tensor in found.items() if not name.startswith(PAD)}
    assert kept.keys() == {entry.name for entry in present}
    for name, tensor in kept.items():
        assert_same_bits(tensor, tensors[name])


def test_reserve_holds_the_largest_numbers() -> None:
    entry = Entry(name="x", dtype="uint8", shape=(1 << 61,), order=(0,), offset=1 << 61)
    reserve = header_reserve([entry])
    assert len(build_header([entry], 1 << 62, reserve)) == reserve == 65536


def test_a_header_that_no_reader_takes_is_refused() -> None:
    entries = [
        Entry(name="x" * 4000 + str(i), dtype="uint8", shape=(), order=(), offset=64 * i)
        for i in range(25_000)
    ]
    with pytest.raises(StateError, match="100000000"):
        header_reserve(entries)


@pytest.mark.parametrize(
    ("entries", "size"),
    [
        ([("x", 0, 10), ("y", 0, 10)], 100),
        ([("x", 0, 10), ("x", 64, 10)], 100),
        ([("x", 64, 40)], 100),
        ([("__gockpt_pad__.0", 0, 10)], 100),
        ([("__metadata__", 0, 10)], 100),
    ],
    ids=["overlap", "double", "outside", "filler", "metadata"],
)
def test_entries_that_cannot_be_are_refused(entries: list[tuple[str, int, int]], size: int) -> None:
    made = [
        Entry(name=name, dtype="uint8", shape=(length,), order=(0,), offset=offset)
        for name, offset, length in entries
    ]
    with pytest.raises(StateError):
        build_header(made, size, 4096)


def test_a_header_larger_than_its_reserve_is_refused() -> None:
    image = make_image({f"tensor{i}": torch.zeros(1) for i in range(100)})
    with pytest.raises(StateError, match="does not fit"):
        build_header(image.entries, image.size, 4096)


def _framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 4096,
        struct.pack("<Q", 1 << 63) + b"{}",
        _framed(b"{}")[:-1],
        _framed(b"[]"),
        _framed(b"\xff\xfe"),
        _framed(b'{"x":' + b"[" * 100_000),
        _framed(b'{"x":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}}'),
        _framed(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0]}}'),
        _framed(json.dumps({"x": {"dtype": "U8", "shape": [1]}}).encode()),
    ],
)
def test_damaged_headers_are_refused(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        parse_header(raw)
