"""Files made by somebody who means harm: an error of ours, in little memory, and nothing else.

Whole checkpoints are changed, thousands of times, with and without right checksums, and then opened
as a user opens them. The process may take little more memory than the checkpoint has, and opens
nothing outside of its directory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from identity_kit import Bag, Moment, assert_same, checkpointer, draws, run, truth
from storage_kit import assert_holds, forge, save

import gockpt
from gockpt import faults, storage
from gockpt.errors import CorruptError, GockptError
from gockpt.extras import Extras
from gockpt.faults import Fault
from gockpt.storage.format import digest
from gockpt.tagged import decode

FILE = "rank-00000.safetensors"
MANIFEST = "rank-00000.json"
ROOM = 1 << 30
"""Bytes of address space that reading a small hostile checkpoint may take."""


def examples(number: int) -> settings:
    """So many of them, the same ones each time."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture(autouse=True)
def _through_the_cache() -> Iterator[None]:
    """Direct reads of what was written just now wait for the disk, thousands of times."""
    faults.arm([Fault(point="fs.direct", action="errno:EINVAL", times=0)])
    yield
    faults.disarm()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's own directory."""
    found = save(tmp_path_factory.mktemp("sound"), step=1)
    for use in (judge, load, verify, look):
        use(found)  # whatever is imported late is imported now
    return found


@pytest.fixture
def victim(sound: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(sound, tmp_path / sound.name))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation beyond it fails, which then is an error that no test expects."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


opened: list[str] = []
"""Paths that this process opened while :func:`read` ran."""
watching = [False]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if watching[0] and event in {
        "open",
        "exec",
        "compile",
        "import",
        "os.system",
        "pickle.find_class",
    }:
        opened.append(f"{event} {args[0]}" if event != "open" else str(args[0]))


sys.addaudithook(_hook)


def read(directory: Path) -> None:
    """Do all that a user does with a checkpoint; nothing outside of it is opened or run."""
    for use in (judge, load, verify, look):
        opened.clear()
        watching[0] = True
        try:
            with contextlib.suppress(GockptError):
                use(directory)
        finally:
            watching[0] = False
        outside = [one for one in opened if not one.startswith(str(directory))]
        assert not [one for one in outside if not one.startswith("import ")], outside


def judge(directory: Path) -> None:
    storage.examine(directory)
    storage.scan(directory.parent)


def load(directory: Path) -> None:
    gockpt.open(directory).load(threads=1)


def verify(directory: Path) -> None:
    gockpt.open(directory).verify(threads=1)


def look(directory: Path) -> None:
    found = gockpt.open(directory)
    for name in found.names():
        found.tensor(name)


# -- manifests -------------------------------------------------------------------------------------

numbers = st.sampled_from([-1, 0, 1, 63, 64, 4095, 4096, 65536, 1 << 31, 1 << 62, 1 << 63, 1 << 70])
texts = st.sampled_from(
    [
        *("", ".", "..", "/", "../x", "/etc/passwd", "a/b", "\0", "x" * 5000, "é\n"),
        *("rank-00000.safetensors", "rank-00001.safetensors", "rank-00000-1.safetensors"),
        *("rank-00000.json", "../rank-00000.safetensors", "model.a.bias", "__gockpt_pad__.0"),
        *("float64", "uint8", "complex128", "float8_e4m3fn", "0" * 32, "f" * 32),
    ]
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value can be put: every field and item of a manifest."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@st.composite
def changes(draw: st.DrawFn, manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with some fields replaced, removed, doubled or exchanged."""
    changed: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(manifest))
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(list(places(changed))))
        node: Any = changed
        for key in where[:-1]:
            node = node[key]
        key = where[-1]
        match draw(st.sampled_from(["replace", "replace", "remove", "double", "nudge", "move"])):
            case "replace":
                node[key] = draw(values)
            case "remove":
                del node[key]
            case "double" if isinstance(node, list):
                node.insert(key, node[key])
            case "nudge" if isinstance(node[key], int):
                node[key] += draw(st.sampled_from([-4096, -64, -1, 1, 64, 4096]))
            case "move" if isinstance(node, list) and node:
                node.append(node.pop(key))
            case _:
                node[key] = None
        if not changed:
            break
    return changed


def sealed(fields: dict[str, Any]) -> bytes:
    """The manifest's bytes with a right checksum."""
    blank = msgspec.json.encode({**fields, "checksum": ""})
    return blank[:-2] + digest(blank).encode() + blank[-2:]


@examples(600)
@given(data=st.data())
def test_any_change_of_a_manifest(
    data: st.DataObject, sound: Path, victim: Path, little_memory: None
) -> None:
    fields = json.loads((sound / MANIFEST).read_bytes())
    fields.pop("checksum")
    (victim / MANIFEST).write_bytes(sealed(data.draw(changes(fields))))
    found = storage.examine(victim)
    if found.problem is not None:
        with pytest.raises(GockptError):
            gockpt.open(victim)
        return
    read(victim)


@examples(1000)
@given(at=st.integers(0, 1 << 20), new=st.binary(max_size=9), cut=st.integers(0, 40))
@example(at=0, new=b"[" * 9, cut=0)
def test_any_change_of_a_manifests_bytes(
    at: int, new: bytes, cut: int, sound: Path, little_memory: None
) -> None:
    raw = (sound / MANIFEST).read_bytes()
    at %= len(raw)
    changed = raw[:at] + new + raw[at + cut :]
    for text in (changed, resealed(changed)):
        if text == raw:
            continue
        try:
            found = storage.decode_manifest(text)
        except CorruptError:
            continue
        assert text != changed, "its own checksum must have found it"
        assert all(file.name.startswith("rank-00000") for file in found.files)


def resealed(raw: bytes) -> bytes:
    """The same text with a right checksum at its end, if it has an end."""
    blank = raw[:-34] + b'"}' if raw.endswith(b'"}') and len(raw) > 40 else raw
    return blank[:-2] + digest(blank).encode() + blank[-2:]


BOMBS: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(5000),
    "depth of lists": b'{"format":1,"extras":' + b"[" * 500_000,
    "depth of objects": b'{"format":1,"extras":' + b'{"a":' * 500_000,
    "depth, closed": b'{"format":1,"extras":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a huge string": b'{"format":1,"run_id":"' + b"x" * (4 << 20) + b'"}',
    "many fields": b'{"format":1' + b"".join(b',"f%d":0' % n for n in range(200_000)) + b"}",
    "a huge number": b'{"format":' + b"9" * 100_000 + b"}",
    "an exponent": b'{"format":1e400}',
    "nan": b'{"format":NaN}',
    "infinity": b'{"format":1,"step":Infinity}',
    "no text": b'{"format":1,"run_id":"\xff\xfe"}',
    "half a surrogate": b'{"format":1,"run_id":"\\ud800"}',
    "a byte order mark": b'\xef\xbb\xbf{"format":1}',
    "not an object": b"[1]",
    "a format of text": b'{"format":"1"}',
}


@pytest.mark.parametrize("name", BOMBS)
def test_manifests_that_are_none(name: str, victim: Path, little_memory: None) -> None:
    for raw in (BOMBS[name], resealed(BOMBS[name])):
        (victim / MANIFEST).write_bytes(raw)
        with pytest.raises(CorruptError, match=r"damaged|format"):
            gockpt.open(victim)
        read(victim)


@pytest.mark.parametrize("field", ["format", "step", "files", "tensors", "extents", "extras"])
def test_a_field_that_stands_there_twice(field: str, sound: Path, victim: Path) -> None:
    """Readers of JSON differ on which one counts: here the checked one is the one that is used."""
    fields = json.loads((sound / MANIFEST).read_bytes())
    fields.pop("checksum")
    evil = {"files": [{"name": "../x", "size": 1, "data_start": 0}]}.get(field, -1)
    inner = msgspec.json.encode({field: evil})[1:-1]
    for blank in (
        b"{" + inner + b"," + msgspec.json.encode({**fields, "checksum": ""})[1:],
        msgspec.json.encode(fields)[:-1] + b"," + inner + b',"checksum":""}',
    ):
        raw = blank[:-2] + digest(blank).encode() + blank[-2:]
        (victim / MANIFEST).write_bytes(raw)
        read(victim)
        with contextlib.suppress(CorruptError):
            assert storage.decode_manifest(raw).files[0].name == FILE


def test_sizes_that_nobody_has_memory_for(sound: Path, victim: Path, little_memory: None) -> None:
    """A file of holes costs its maker nothing; its reader must find out before it allocates."""
    fields = json.loads((sound / MANIFEST).read_bytes())
    fields.pop("checksum")
    size = fields["files"][0]["size"]
    start = fields["files"][0]["data_start"]
    huge = 8 << 30
    os.truncate(victim / FILE, huge)
    fields["files"][0]["size"] = huge
    last = fields["extents"].pop()
    ends = [*range(last["offset"], huge, 16 << 20), huge]
    fields["extents"] += [
        {**last, "offset": begin, "length": end - begin} for begin, end in itertools.pairwise(ends)
    ]
    (victim / MANIFEST).write_bytes(sealed(fields))
    assert start < size < huge
    assert storage.examine(victim).problem is None
    with pytest.raises(GockptError):
        gockpt.open(victim).load()
    refused = 0
    for name in gockpt.open(victim).names():
        try:
            found = gockpt.open(victim).tensor(name)
        except GockptError:
            refused += 1
        else:  # its own extents are as they were
            assert torch.equal(found, gockpt.open(sound.parent).tensor(name))
    assert refused


# -- headers ---------------------------------------------------------------------------------------


def with_header(sound: Path, victim: Path, region: bytes) -> None:
    """Put a header region in front of the data, with right hashes for it in the manifest."""
    manifest = storage.examine(sound).manifests[0]
    start = manifest.files[0].data_start
    region = region[:start].ljust(start)
    raw = (sound / FILE).read_bytes()
    (victim / FILE).write_bytes(region + raw[start:])

    def change(fields: dict[str, Any]) -> None:
        for extent in fields["extents"]:
            if extent["offset"] < start:
                part = region[extent["offset"] : extent["offset"] + extent["length"]]
                extent["xxh3"] = digest(part)

    (victim / MANIFEST).write_bytes(forge(manifest, change))


def framed(text: bytes, room: int) -> bytes:
    return struct.pack("<Q", room - 8) + text.ljust(room - 8)


def header_of(sound: Path) -> tuple[dict[str, Any], int]:
    raw = (sound / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), 8 + length


@pytest.mark.parametrize("length", [0, 1, 7, 100, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63])
def test_headers_of_other_lengths(
    length: int, sound: Path, victim: Path, little_memory: None
) -> None:
    header, room = header_of(sound)
    text = json.dumps(header).encode().ljust(room - 8)
    with_header(sound, victim, struct.pack("<Q", length) + text)
    expect_refused(victim)


@pytest.mark.parametrize("name", [name for name in BOMBS if len(BOMBS[name]) < 60_000])
def test_headers_that_are_none(name: str, sound: Path, victim: Path, little_memory: None) -> None:
    _, room = header_of(sound)
    with_header(sound, victim, framed(BOMBS[name], room))
    expect_refused(victim)


def expect_refused(victim: Path) -> None:
    read(victim)
    found = gockpt.open(victim)
    assert found.verify()
    with pytest.raises(CorruptError):
        found.load()
    with pytest.raises(CorruptError):
        found.tensor("model.a.weight")


@examples(250)
@given(data=st.data())
def test_any_change_of_a_header(data: st.DataObject, sound: Path, victim: Path) -> None:
    """What header and manifest say of a tensor must be the same, or nothing is read by either."""
    header, room = header_of(sound)
    changed = data.draw(changes(header))
    with_header(sound, victim, framed(json.dumps(changed).encode(), room))
    if tensors(changed) == tensors(header):
        read(victim)  # a filler's, or the metadata: no tensor is described by it
        return
    found = gockpt.open(victim)
    with pytest.raises(CorruptError):
        found.load(threads=1)
    with pytest.raises(CorruptError):
        found.tensor("model.a.weight")


def tensors(header: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in header.items()
        if not name.startswith("__gockpt_pad__.") and name != "__metadata__"
    }


# -- other things in the place of files ------------------------------------------------------------


@pytest.mark.parametrize("name", [FILE, MANIFEST])
@pytest.mark.parametrize(
    "kind", ["link elsewhere", "link to itself", "link to nothing", "pipe", "directory", "device"]
)
def test_what_is_no_file(kind: str, name: str, victim: Path, tmp_path: Path) -> None:
    """Neither waited for, nor followed for ever, nor read without an end."""
    path = victim / name
    content = path.read_bytes()
    path.unlink()
    if kind == "link elsewhere":
        secret = tmp_path / "secret"
        secret.write_bytes(bytes(len(content)))
        path.symlink_to(secret)
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "link to nothing":
        path.symlink_to(tmp_path / "nothing")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(GockptError) as caught:
        gockpt.open(victim).load()
    assert "\0" not in str(caught.value)
    assert storage.scan(victim.parent)[0].path == victim
    if kind != "link elsewhere" or name == MANIFEST:
        assert storage.scan(victim.parent)[0].problem is not None


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_what_is_no_directory(kind: str, sound: Path, tmp_path: Path) -> None:
    save(tmp_path, step=1)
    path = tmp_path / "step-000000009-s000009-0123abcd"
    if kind == "file":
        path.write_bytes(b"x")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(sound)
    assert_holds(tmp_path, 1)
    with pytest.raises(GockptError):
        gockpt.open(tmp_path, step=9)


# -- what the user's objects get -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real training's checkpoint, with extras."""
    root = tmp_path_factory.mktemp("trained")
    run(Bag(), root, steps=2, every=2, windows=1)
    return next(root.glob("step-*"))


@examples(200)
@given(data=st.data())
def test_any_change_of_the_extras(data: st.DataObject, trained: Path, little_memory: None) -> None:
    """Decoded, or refused before anything is put back."""
    tree = gockpt.open(trained).extras["tree"]
    changed = data.draw(changes({"tree": tree}))
    before = draws()
    try:
        put_back = Extras(None, device_type="cpu").prepare(changed.get("tree"), {})
    except GockptError:
        pass
    else:
        assert draws() == before
        put_back()


@examples(60)
@given(data=st.data())
def test_a_restore_is_whole_or_changes_nothing(
    data: st.DataObject, trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the manifest says of groups, plain state and objects."""
    manifest = storage.examine(trained).manifests[0]
    parts = data.draw(changes({"groups": manifest.groups, "extras": manifest.extras}))
    root = tmp_path_factory.mktemp("hostile")
    victim = Path(shutil.copytree(trained, root / trained.name))
    (victim / MANIFEST).write_bytes(forge(manifest, lambda fields: fields.update(parts)))
    training = Bag(3)
    before = Moment.of(training)
    with checkpointer(training, root) as ckpt:
        try:
            ckpt.restore()
        except GockptError:
            after = Moment.of(training)
            assert_same(after.tensors, before.tensors, "untouched")
            assert (after.options, after.rng) == (before.options, before.rng)
        else:
            assert ckpt.current_step == 2


TAGS = (
    *("tuple", "set", "frozenset", "dict", "int", "float", "complex", "bytes", "bytearray"),
    *("tensor", "array", "numpy", "deque", "counter", "ordered", "defaultdict", "range", "slice"),
    *("size", "device", "dtype", "datetime", "timedelta", "generator", "decimal", "enum"),
)
tagged = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.sampled_from(["9" * 5000, "<U999999999"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(TAGS), st.lists(inner, max_size=4), min_size=1, max_size=1
        )
        | st.dictionaries(st.sampled_from(TAGS), inner, min_size=1, max_size=2)
    ),
    max_leaves=12,
)


@examples(1000)
@given(encoded=tagged)
@example(encoded={"int": ["9" * 100_000]})
@example(encoded={"numpy": ["<U999999999", {"bytes": [""]}]})
@example(encoded={"array": [{"bytes": [""]}, "<U999999999", 0, 1 << 40]})
@example(encoded={"array": [{"bytes": [""]}, "9" * 5000, 0]})
@example(encoded={"array": [{"bytes": [""]}, "(1,)f4", 0]})
@example(encoded={"range": [0, 1 << 62, 1]})
@example(encoded={"deque": [[], 1 << 62]})
@example(encoded={"defaultdict": ["os.system", {"dict": []}]})
def test_any_tagged_value(encoded: object, little_memory: None) -> None:
    with contextlib.suppress(CorruptError):
        decode(encoded, {})


def test_a_hostile_checkpoint_changes_nothing_in_a_training(trained: Path, tmp_path: Path) -> None:
    """It is refused as a whole: no tensor is put back before all has been checked."""
    root = tmp_path / "root"
    victim = Path(shutil.copytree(trained, root / trained.name))
    manifest = storage.examine(trained).manifests[0]

    def change(fields: dict[str, Any]) -> None:
        fields["extras"]["tree"] = {"dict": [["rng", {"unknown": [1]}]]}

    (victim / MANIFEST).write_bytes(forge(manifest, change))
    training = Bag(3)
    before = truth(training)
    with (
        gockpt.Checkpointer(training.model, training.optimizer, root, agent="thread") as ckpt,
        pytest.raises(GockptError),
    ):
        ckpt.restore()
    assert_same(truth(training), before, "untouched")
