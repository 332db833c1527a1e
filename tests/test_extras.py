"""Extras come back exactly as they were, or are refused by path."""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lrs

from gockpt.errors import ConfigError, CorruptError, ExtrasError
from gockpt.extras import Extras, check, decode, encode
from gockpt.rng import capture_rng, restore_rng, rng_tree

torch.set_num_threads(1)


def round_trip(tree: object, **options: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = msgspec.json.encode(encode(tree, tensors, **options), order="deterministic")
    return decode(msgspec.json.decode(text), tensors)


# ── Values ────────────────────────────────────────────────────────────────────────────────────────

EXACT = {
    "none": None,
    "bools": [True, False, 1, 0],
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**64), 10**5000],
    "floats": [0.0, -0.0, 1.0, 1e16, 5e-324, 0.1, math.inf, -math.inf, math.nan],
    "text": ["", "é\n\0", "\ud800 lone", "{}"],
    "bytes": b"\x00\xff",
    "tuple": (1, (2, [3, ()])),
    "int keys": {1: 2, -3: 4, 2**70: 5},
    "odd keys": {None: 1, True: 2, 1.5: 3, ("a", (1, 2)): 4, b"x": 5, math.inf: 6, "é": 7},
    "order": {"z": 1, "a": 2, "m": 3},
    "tags": {"tuple": [1], "dict": [], "!": {"int": ["0x1"]}},
    "ordered": OrderedDict([("b", 1), ("a", {"x": ()})]),
    "defaultdicts": [defaultdict(f, {1: f()}) for f in (list, int, dict, set, float, str)],
    "defaultdict of nothing": defaultdict(None, a=1),
    "counter": Counter({30: 1, 80: 2, "x": -1}),
    "sets": [set(), {1, "a", (2, 3)}, frozenset({1.0, None}), {1}, {True}, {1.0}],
    "deques": [deque([1, 2], maxlen=3), deque(), deque([(1,)])],
    "complex": [1 + 2j, complex(-0.0, math.nan), complex(math.inf, -0.0)],
    "ranges": [range(5), range(10, -3, -2), range(0)],
    "slices": [slice(None), slice(1, 2**80, None)],
    "dates": [date(2024, 2, 29), timedelta(days=-3, microseconds=7), timedelta.max],
    "times": [
        datetime(2024, 5, 6, 7, 8, 9, 10),
        datetime(2024, 5, 6, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=-3, seconds=1))),
        datetime(2024, 10, 27, 2, 30, fold=1),
    ],
    "torch": [torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.Size([])],
    "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda")],
    "numpy scalars": [
        *(np.float64(0.1), np.float32(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True)),
        *(np.float16(math.nan), np.complex64(1 - 2j), np.datetime64("2024-01-01T00:00", "ns")),
        *(np.str_(""), np.str_("é"), np.bytes_(b"ab"), np.timedelta64(5, "D")),
    ],
}


@pytest.mark.parametrize("name", EXACT)
def test_values_come_back_with_their_types(name: str) -> None:
    tree = {name: EXACT[name]}
    check(tree)
    back = round_trip(tree)
    assert type(back[name]) is type(EXACT[name])
    if name == "ints":
        assert back == tree
    elif name == "sets":  # whose order is not kept
        shown = [[(type(one), sorted(map(repr, one))) for one in t[name]] for t in (back, tree)]
        assert shown[0] == shown[1]
    else:  # repr tells types, order, nan and -0.0
        assert repr(back) == repr(tree)


ARRAYS = [
    *(np.arange(6, dtype=d).reshape(2, 3) for d in ("i1", "u2", "u4", "u8", "f2", "f4", "c16")),
    *(np.array(True), np.zeros((0, 5), np.float32), np.arange(12).reshape(3, 4).T[::2]),
    *(np.array([1.5, math.nan], ">f8"), np.array(["a", "bcd"]), np.array([b"x", b"yz"])),
    *(np.array(["2024-01-01", "NaT"], "M8[us]"), np.longdouble([1.5, 2.5])),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_arrays_come_back(array: np.ndarray[Any, Any], inline: int) -> None:
    back = round_trip({"a": array}, inline=inline)["a"]
    assert type(back) is np.ndarray
    assert back.flags.writeable
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    check(array)


TENSORS = [
    *(torch.arange(6).reshape(2, 3).to(d) for d in (torch.float32, torch.bfloat16, torch.int8)),
    *(torch.tensor(3.0), torch.zeros(0, 5), torch.tensor([True, False]), torch.tensor([1 + 2j])),
    *(torch.arange(12.0).reshape(3, 4).t()[::2], torch.tensor([1 + 2j]).conj()),
    *(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(3).expand(2, 3)),
    torch.arange(4, dtype=torch.uint8).view(torch.float8_e5m2),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{tuple(t.shape)}")
@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_tensors_come_back(tensor: torch.Tensor, inline: int) -> None:
    back = round_trip([tensor], inline=inline)[0]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.flatten().tolist() == tensor.flatten().tolist()
    check([tensor])


def test_tensors_are_named_by_their_path() -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = {"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}, "x": [0, (torch.ones(3),)]}
    encode(tree, tensors)
    assert {name: len(t) for name, t in tensors.items()} == {
        "extras.a.b": 1, "extras.a.b~2": 2, "extras.x.1.0": 3
    }  # fmt: skip


def test_small_tensors_can_be_kept_in_the_json() -> None:
    tensors: dict[str, torch.Tensor] = {}
    encode({"small": torch.ones(2), "large": torch.ones(3)}, tensors, inline=8)
    assert list(tensors) == ["extras.large"]


def test_nothing_is_shared_with_the_source_or_the_file() -> None:
    tree: dict[str, Any] = {"t": torch.ones(2), "a": np.ones(2), "l": [1, 2], "d": {"x": [1]}}
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(tree, tensors)
    tree["t"].fill_(9), tree["a"].fill(9), tree["l"].append(9), tree["d"]["x"].append(9)
    first = decode(encoded, tensors)
    assert first["t"].tolist() == first["a"].tolist() == [1, 1]
    assert first["l"] == [1, 2]
    assert first["d"] == {"x": [1]}
    first["t"].fill_(5), first["a"].fill(5)
    assert decode(encoded, tensors)["t"].tolist() == [1, 1]


def test_a_modules_state_dict_keeps_its_version_numbers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    back = round_trip(module.state_dict())
    assert back._metadata == module.state_dict()._metadata
    torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).load_state_dict(back)
    check(module.state_dict())


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
trees = st.recursive(
    scalars | st.complex_numbers() | st.datetimes() | keys.map(lambda k: {k}),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(trees)
def test_any_tree_of_plain_values_comes_back(tree: object) -> None:
    check(tree)


# ── Refusals ──────────────────────────────────────────────────────────────────────────────────────

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


def _cycle() -> list[object]:
    cycle: list[object] = []
    cycle.append(cycle)
    return cycle


REFUSED = {
    "function": lambda x: x,
    "class": Text,
    "object": object(),
    "named tuple": Point(1, 2),
    "enum": Colour.RED,
    "subclass of str": Text("x"),
    "generator": torch.Generator(),
    "parameter": torch.nn.Parameter(torch.ones(1)),
    "requires grad": torch.ones(1, requires_grad=True),
    "sparse": torch.ones(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "tensor key": {(1, torch.ones(1)): 1},
    "objects": np.array([object()]),
    "structured": np.zeros(2, [("a", "i4")]),
    "masked": np.ma.masked_array([1]),
    "void": np.void(b"abc"),
    "factory": defaultdict(lambda: 3),
    "named zone": datetime(2024, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")),
    "renamed zone": datetime(2024, 1, 1, tzinfo=timezone(timedelta(0), "mine")),
    "bytearray": bytearray(b"x"),
    "cycle": _cycle(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_encoding_is_refused(name: str) -> None:
    with pytest.raises(ExtrasError, match=r"^extras\['s'\]\.foo\[3\]"):
        encode({"s": {"foo": [0, 1, 2, REFUSED[name]]}}, {})


def test_the_path_follows_attributes_keys_and_indices() -> None:
    tree = {"data": OrderedDict(workers=deque([{7: {"a b": (1, object())}}]))}
    with pytest.raises(ExtrasError, match=r"extras\['data'\]\.workers\[0\]\[7\]\['a b'\]\[1\]: "):
        encode(tree, {})


def test_check_finds_what_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gockpt.extras.encode", lambda *a, **k: {"dict": [["s", [1, 2]]]})
    with pytest.raises(ExtrasError, match=r"extras\['s'\]\[1\]: does not come back"):
        check({"s": [1, 2.0]})


# ── Hostile input ─────────────────────────────────────────────────────────────────────────────────


def _deep(levels: int) -> object:
    tree: object = 1
    for _ in range(levels):
        tree = [tree]
    return tree


HOSTILE = [
    {"unknown": [1]}, {"tuple": 3}, {"tuple": [1], "set": [2]}, {}, {"int": ["x"]}, {"int": []},
    {"set": [[1]]}, {"dict": [[[1], 2]]}, {"dict": [[1]]}, {"dict": [1]}, {"deque": [-1, []]},
    {"tensor": ["missing", "float32", 2]}, {"tensor": ["t", "float32", 3]}, {"tensor": []},
    {"tensor": ["t", "nonsense", 2]}, {"tensor": ["t", "float32", -1, -2]},
    {"tensor": ["t", "float32", 10**30]}, {"tensor": [{"bytes": ["!"]}, "uint8", 1]},
    {"tensor": [{"tensor": ["t", "uint8", 8]}, "uint8", 8]}, {"tensor": [7, "uint8", 1]},
    {"array": ["t", "|O", 1]}, {"array": ["t", "f4,f4", 1]}, {"array": ["t", "<f4", 10**9]},
    {"array": ["t", "(2,)f4", 1]}, {"numpy": ["|O", {"bytes": ["AAAAAAAAAAA="]}]},
    {"numpy": ["<f8", {"bytes": ["AA=="]}]}, {"numpy": [1]}, {"bytes": ["é"]}, {"bytes": [1]},
    {"device": ["nonsense"]}, {"dtype": ["Tensor"]}, {"size": ["a"]}, {"datetime": ["x", 0]},
    {"timedelta": [10**30, 0, 0]}, {"defaultdict": ["eval", {"dict": []}]}, {"ordered": [1, 2]},
    {"counter": [{"dict": []}, 1]}, {"float": ["one"]}, {"range": [1, 2, 0]}, _deep(200),
]  # fmt: skip


@pytest.mark.parametrize("encoded", HOSTILE, ids=lambda e: str(e)[:40])
def test_hostile_input_is_an_error_of_ours(encoded: object) -> None:
    with pytest.raises(CorruptError, match="damaged"):
        decode(encoded, {"t": torch.ones(2)})


json_values = st.recursive(
    scalars.filter(lambda v: not isinstance(v, bytes)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tuple", "set", "dict", "int", "tensor", "array", "numpy", "deque"]),
            st.lists(inner, max_size=3),
            max_size=1,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(json_values)
def test_fuzzed_input_decodes_or_is_an_error_of_ours(encoded: object) -> None:
    with contextlib.suppress(CorruptError):
        decode(encoded, {"t": torch.ones(2)})


def test_nesting_is_bounded_alike_in_both_directions() -> None:
    assert round_trip(_deep(100)) == _deep(100)
    with pytest.raises(ExtrasError, match="nested deeper"):
        encode(_deep(101), {})


# ── Schedulers, scaler, generators ────────────────────────────────────────────────────────────────


class _Warm:
    """A callable object: torch's schedulers save its attributes."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, epoch: int) -> float:
        self.seen += 1
        return 1 / (1 + epoch + 0.001 * self.seen)


Sgd = torch.optim.SGD
SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda e: 0.9**e),
    "LambdaLR of an object": lambda o: lrs.LambdaLR(o, _Warm()),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 3),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [4, 6, 6, 9]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 7),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, total_iters=9),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, 0.1), lrs.MultiStepLR(o, [4])], [3]
    ),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 8),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ExponentialLR(o, 0.9), lrs.MultiStepLR(o, [6])]
    ),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "CyclicLR of a function": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=30),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=6),
}


def _optimizer(tensor_lr: bool = False) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.02)]
    if tensor_lr:
        groups = [{**g, "lr": torch.tensor(g["lr"])} for g in groups]
    return Sgd(groups, momentum=0.9)


def _advance(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    rates = []
    for step in range(steps):
        optimizer.step()
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(1.0 + step % 2)
        else:
            scheduler.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


def test_every_scheduler_of_torch_is_here() -> None:
    known = {name.split()[0] for name in SCHEDULERS} - {"SWALR"}
    assert known == set(lrs.__all__) - {"LRScheduler"}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
def test_schedulers_go_on_where_they_were(name: str, tensor_lr: bool) -> None:
    optimizer = _optimizer(tensor_lr)
    scheduler = SCHEDULERS[name](optimizer)
    _advance(optimizer, scheduler, 5)
    extras = Extras({"scheduler": scheduler})
    extras.check()
    tensors: dict[str, torch.Tensor] = {}
    text = msgspec.json.encode(extras.capture(tensors).encoded())
    groups = [float(group["lr"]) for group in optimizer.param_groups]
    expected = _advance(optimizer, scheduler, 12)

    other = _optimizer(tensor_lr)
    fresh = SCHEDULERS[name](other)
    Extras({"scheduler": fresh}).load(msgspec.json.decode(text), tensors)
    for group, rate in zip(other.param_groups, groups, strict=True):  # as the optimizer's restore
        group["lr"] = torch.tensor(rate) if tensor_lr else rate
    assert _advance(other, fresh, 12) == expected


def test_scaler_and_averaged_model_come_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=3)
    scaler.scale(torch.ones(1))
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    tensors: dict[str, torch.Tensor] = {}
    extras = Extras({"scaler": scaler, "average": average})
    extras.check()
    encoded = extras.capture(tensors).encoded()
    scale, weights = scaler.get_scale(), average.module.weight.clone()
    scaler.update(new_scale=2.0)
    average.module.weight.data.fill_(0)
    extras.load(encoded, tensors)
    assert scaler.get_scale() == scale
    assert torch.equal(average.module.weight, weights)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g).tolist()),
        (lambda: random.Random(3), lambda g: [g.gauss(0, 1), g.random()]),
        (lambda: np.random.default_rng(3), lambda g: g.normal(size=3).tolist()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.random(3).tolist()),
        (lambda: np.random.RandomState(3), lambda g: g.normal(size=3).tolist()),
    ],
    ids=["torch", "random", "numpy pcg64", "numpy mt19937", "numpy RandomState"],
)
def test_generators_are_extras(make: Any, draw: Any) -> None:
    generator = make()
    draw(generator)
    extras, tensors = Extras({"g": generator}), {}
    extras.check()
    text = msgspec.json.encode(extras.capture(tensors).encoded())
    expected = draw(generator)
    other = make()
    Extras({"g": other}).load(msgspec.json.decode(text), tensors)
    assert draw(other) == expected


class _Loader:
    """A shuffling loader as users write them: position, order and the generator's state."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.order: list[int] = []

    def __next__(self) -> int:
        if not self.order:
            sampler = torch.utils.data.RandomSampler(range(5), generator=self.generator)
            self.order = list(sampler)
        return self.order.pop()

    def state_dict(self) -> dict[str, object]:
        return {"order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]
        self.generator.set_state(state["generator"])


def test_a_samplers_generator_goes_on_where_it_was() -> None:
    loader = _Loader()
    for _ in range(7):
        next(loader)
    tensors: dict[str, torch.Tensor] = {}
    encoded = Extras({"data": loader}).capture(tensors).encoded()
    expected = [next(loader) for _ in range(20)]
    other = _Loader()
    Extras({"data": other}).load(encoded, tensors)
    assert [next(other) for _ in range(20)] == expected


# ── Random numbers ────────────────────────────────────────────────────────────────────────────────


def _draw() -> list[float]:
    return [
        *(random.random(), random.gauss(0, 1), float(np.random.normal()), np.random.rand()),
        *torch.randn(3).tolist(),
    ]


def test_random_numbers_go_on_where_they_were() -> None:
    random.gauss(0, 1), np.random.normal()  # both keep a second number back
    tensors: dict[str, torch.Tensor] = {}
    text = msgspec.json.encode(encode(rng_tree(capture_rng("cpu")), tensors))
    expected = _draw()
    restore_rng(decode(msgspec.json.decode(text), tensors))
    assert _draw() == expected


def test_random_numbers_are_taken_and_restored_last() -> None:
    class Greedy:
        def state_dict(self) -> dict[str, float]:
            return {"drawn": random.random()}

        def load_state_dict(self, state: object) -> None:
            random.random()

    tensors: dict[str, torch.Tensor] = {}
    extras = Extras({"greedy": Greedy()})
    encoded = extras.capture(tensors).encoded()
    expected = _draw()
    extras.load(encoded, tensors)
    assert _draw() == expected


def test_another_kind_of_numpy_generator_is_refused_before_anything_changes() -> None:
    state = rng_tree(capture_rng("cpu"))
    state["numpy"] = {"bit_generator": "PCG64"}
    state["python"] = (3, np.zeros(625, np.uint32), None)
    before = random.getstate()
    with pytest.raises(ExtrasError, match=r"saved from PCG64.*set_bit_generator"):
        restore_rng(state)
    assert random.getstate() == before


@pytest.mark.parametrize("state", [None, {}, {"python": 3, "numpy": {}, "torch": 1}])
def test_a_damaged_state_of_generators_is_refused(state: object) -> None:
    with pytest.raises(ExtrasError, match="no state of random number generators"):
        restore_rng(state)


# ── The mapping ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "item",
    [3, None, torch.utils.data.DataLoader([1]), _Loader, {"a": 1}],
    ids=["number", "None", "DataLoader", "class", "dict"],
)
def test_objects_without_a_state_are_refused_at_construction(item: object) -> None:
    with pytest.raises(ConfigError, match=r"extras\['x'\].*has no state_dict\(\) and load"):
        Extras({"x": item})


@pytest.mark.parametrize("name", ["", "rng", 3])
def test_names_are_checked(name: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be a name"):
        Extras({name: _Loader()})


def test_a_missing_object_is_an_error_and_nothing_changes() -> None:
    tensors: dict[str, torch.Tensor] = {}
    encoded = Extras({"a": _Loader()}).capture(tensors).encoded()
    torch.rand(1)
    loader, expected = _Loader(), torch.get_rng_state()
    loader.order = [1]
    with pytest.raises(ExtrasError, match=r"\['b'\] are not in the checkpoint.*leave them out"):
        Extras({"a": loader, "b": _Loader()}).load(encoded, tensors)
    assert loader.order == [1]
    assert torch.equal(torch.get_rng_state(), expected)
    Extras({"a": loader}).load(encoded, tensors)
    assert loader.order == []


def test_an_object_that_is_not_given_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tensors: dict[str, torch.Tensor] = {}
    encoded = Extras({"a": _Loader()}).capture(tensors).encoded()
    with caplog.at_level(logging.WARNING, "gockpt"):
        Extras().load(encoded, tensors)
    assert "['a'] that were not given" in caplog.text


def test_a_failing_object_is_named() -> None:
    loader = _Loader()
    loader.state_dict = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ExtrasError, match=r"extras\['data'\]\.state_dict\(\) failed with ZeroDiv"):
        Extras({"data": loader}).capture({})


def test_a_refused_state_is_named() -> None:
    loader = _Loader()
    loader.state_dict = lambda: {"fn": print}  # type: ignore[method-assign]
    for call in (lambda: Extras({"data": loader}).capture({}), Extras({"data": loader}).check):
        with pytest.raises(ExtrasError, match=r"extras\['data'\]\.fn: code"):
            call()
