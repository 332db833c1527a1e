"""Manifests: exact round trip, and nothing that is damaged or means harm gets through."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from storage_kit import forge, large_image, small_image, write_image, write_parts

from gockpt.errors import CorruptError, StorageError
from gockpt.storage import Manifest, decode_manifest, encode_manifest

PLAIN = r"(/[^/\0]+)+/gockpt-[0-9a-f]{16}"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_image(tmp_path_factory.mktemp("image"), small_image())


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Of an image over two volumes, with a tensor in pieces."""
    shares = [tmp_path_factory.mktemp("volume") / "gockpt-0123456789abcdef" for _ in range(2)]
    for share in shares:
        share.mkdir()
    found = write_parts(tmp_path_factory.mktemp("image"), small_image(), shares)
    assert any(tensor.pieces for tensor in found.tensors)
    return found


def test_round_trip(manifest: Manifest) -> None:
    values = {"a": [None, True, -0.5, 1 << 62, "é\n", {"b": []}], "t": (1, 2)}
    rich = msgspec.structs.replace(
        manifest, fallback="a group was added", extras=values, recipe=values, world_size=3, rank=0
    )
    found = decode_manifest(encode_manifest(rich))
    assert found.extras == {**values, "t": [1, 2]}
    assert msgspec.structs.replace(found, checksum="", extras={}, recipe={}) == (
        msgspec.structs.replace(rich, extras={}, recipe={})
    )
    assert encode_manifest(found) == encode_manifest(rich)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), {1: 2}, {"x": {3}}, object(), b"bytes"],
    ids=["nan", "inf", "int key", "set", "object", "bytes"],
)
def test_values_that_json_would_change_are_refused(manifest: Manifest, value: object) -> None:
    with pytest.raises(StorageError, match="JSON"):
        encode_manifest(msgspec.structs.replace(manifest, extras={"x": value}))


def test_unknown_fields_are_left_to_later_versions(manifest: Manifest) -> None:
    assert decode_manifest(forge(manifest, lambda fields: fields.update(new=1))).step == 0


def test_every_flipped_bit_is_noticed(manifest: Manifest) -> None:
    raw = encode_manifest(manifest)
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CorruptError):
            decode_manifest(bytes(damaged))


def test_truncated_zeroed_or_random_bytes_are_damage(manifest: Manifest) -> None:
    raw = encode_manifest(manifest)
    chance = random.Random(0)
    samples = [raw[:cut] for cut in range(0, len(raw), 37)]
    samples += [bytes(len(raw)), raw + b" ", raw + raw, b"[" * 200_000, b"\xff" * 100]
    samples += [chance.randbytes(chance.randrange(200)) for _ in range(200)]
    for sample in samples:
        with pytest.raises(CorruptError):
            decode_manifest(sample)


def test_newer_format_says_what_to_do(manifest: Manifest) -> None:
    with pytest.raises(CorruptError, match=r"format 2.*upgrade"):
        decode_manifest(forge(manifest, lambda fields: fields.update(format=2)))


def _set(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.update(fields)


def _in(part: str, index: int = 0, **fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest[part][index].update(fields)


HOSTILE = {
    "negative step": _set(step=-1),
    "step beyond 64 bits": _set(step=1 << 70),
    "sequence no number": _set(sequence="1"),
    "old format": _set(format=0),
    "rank outside world": _set(rank=1),
    "empty world": _set(world_size=0),
    "launch is a path": _set(launch_id="../../etc"),
    "proof unknown": _set(proof={"outcome": "wrong"}),
    "proof without outcome": _set(proof={}),
    "no files": _set(files=[], tensors=[], extents=[]),
    "absolute file": _in("files", name="/etc/passwd"),
    "file above": _in("files", name="../rank-00000.safetensors"),
    "file of another rank": _in("files", name="rank-00001.safetensors"),
    "file name with null": _in("files", name="rank-00000\0.safetensors"),
    "file is the manifest": _in("files", name="rank-00000.json"),
    "file twice": lambda fields: fields["files"].append(dict(fields["files"][0])),
    "size negative": _in("files", size=-1),
    "size huge": _in("files", size=1 << 63),
    "data beyond the file": _in("files", data_start=1 << 30),
    "data not on a page": _in("files", data_start=100),
    "data at once": _in("files", data_start=0),
    "name empty": _in("tensors", name=""),
    "name endless": _in("tensors", name="x" * 5000),
    "name of a filler": _in("tensors", name="__gockpt_pad__.0"),
    "name of the metadata": _in("tensors", name="__metadata__"),
    "name twice": _in("tensors", 1, name="model.a.weight"),
    "alias is a name": _in("tensors", aliases=["model.a.bias"]),
    "alias twice": _in("tensors", aliases=["x", "x"]),
    "file index": _in("tensors", file=1),
    "file index negative": _in("tensors", file=-1),
    "offset negative": _in("tensors", offset=-64),
    "offset not aligned": _in("tensors", offset=4),
    "offset outside": _in("tensors", offset=1 << 40),
    "offset overflow": _in("tensors", offset=(1 << 64) - 64),
    "overlap": _in("tensors", 1, offset=0),
    "dtype unknown": _in("tensors", dtype="float31"),
    "dtype an attribute": _in("tensors", dtype="__class__"),
    "dtype without form": _in("tensors", dtype="qint8"),
    "shape negative": _in("tensors", shape=[-8, 3, 4, -4]),
    "shape huge": _in("tensors", shape=[1 << 40] * 4, global_shape=[1 << 40] * 4),
    "shape larger than its whole": _in("tensors", shape=[9, 3, 4, 4]),
    "many dimensions": _in(
        "tensors",
        **{key: [1] * 65 for key in ("shape", "global_shape")},
        global_offset=[0] * 65,
        order=list(range(65)),
    ),
    "order no permutation": _in("tensors", order=[0, 1, 2, 2]),
    "order too short": _in("tensors", order=[0]),
    "global too short": _in("tensors", global_shape=[8]),
    "global offset negative": _in("tensors", global_offset=[-1, 0, 0, 0]),
    "pieces too small": _in(
        "tensors",
        pieces=[{"entry": "model.a.weight#0", "file": 0, "offset": 0, "nbytes": 4}],
    ),
    "piece misnamed": _in(
        "tensors", pieces=[{"entry": "other#0", "file": 0, "offset": 0, "nbytes": 1536}]
    ),
    "piece negative": _in(
        "tensors",
        pieces=[
            {"entry": "model.a.weight#0", "file": 0, "offset": 0, "nbytes": 1600},
            {"entry": "model.a.weight#1", "file": 0, "offset": 1600, "nbytes": -64},
        ],
    ),
    "no extents": _set(extents=[]),
    "extent without hash": _in("extents", xxh3=""),
    "extent of nothing": _in("extents", length=0),
    "extent elsewhere": _in("extents", file=3),
    "extent leaves a hole": lambda fields: fields["extents"].pop(0),
    "extent twice": lambda fields: fields["extents"].append(dict(fields["extents"][0])),
    "extent too long": lambda fields: (
        fields["extents"].pop(),
        fields["extents"][0].update(length=fields["files"][0]["size"] + 1),
    ),
    "extents not on pages": lambda fields: (
        fields["extents"].insert(1, {**fields["extents"][1], "length": 100}),
        fields["extents"][2].update(offset=fields["extents"][1]["offset"] + 100),
        fields["extents"][2].update(length=fields["extents"][2]["length"] - 100),
    ),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests_are_refused(
    manifest: Manifest, change: Callable[[dict[str, object]], object]
) -> None:
    assert decode_manifest(forge(manifest, lambda fields: None)).tensors == manifest.tensors
    with pytest.raises(CorruptError):
        decode_manifest(forge(manifest, change))


@pytest.mark.parametrize("which", ["manifest", "divided"])
def test_random_changes_of_any_value_never_escape(
    which: str, request: pytest.FixtureRequest
) -> None:
    """Whatever one value is replaced by, the answer is a valid manifest or CorruptError."""
    manifest: Manifest = request.getfixturevalue(which)
    chance = random.Random(1)
    values = [-1, 0, 1, 1 << 62, 1 << 80, 0.5, "", "..", "\0", None, True, [], {}, [[]], [-1]]
    values += ["/", "/..", "/etc/passwd", "/a/../gockpt-0123456789abcdef"]

    def change(node: Any) -> None:
        while True:
            key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if isinstance(node[key], dict | list) and node[key] and chance.random() < 0.9:
                node = node[key]
            else:
                node[key] = chance.choice(values)
                return

    for _ in range(1500):
        raw = forge(manifest, change)
        try:
            found = decode_manifest(raw)
        except CorruptError:
            continue
        for file in found.files:
            assert "/" not in file.name
            assert not file.volume or re.fullmatch(PLAIN, file.volume)
        for part in (part for tensor in found.tensors for part in tensor.parts):
            inside = found.files[part.file].size - found.files[part.file].data_start
            assert 0 <= part.offset <= part.offset + part.nbytes <= inside


def test_extents_are_of_sixteen_mebibytes_at_most(tmp_path: Path) -> None:
    image = large_image()
    found = write_image(tmp_path, image)
    assert [extent.length for extent in found.extents] == [
        image.reserve,
        16 << 20,
        16 << 20,
        8 << 20,
    ]
    assert decode_manifest(encode_manifest(found)).extents == found.extents
