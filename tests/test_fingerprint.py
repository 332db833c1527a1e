"""Fingerprints: both sides compute the same from the same bytes, and any changed word shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gockpt import fingerprint
from gockpt.fingerprint import RUN_BYTES, RUN_WORDS, Fingerprinter, home
from gockpt.state import Entry, Layout, bits, dtype_name, memory_order

SIZES = [0, 1, 7, 8, 9, 4088, 4095, 4096, 4097, 4104, 3 * 4096, 3 * 4096 + 13]


def data_of(nbytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def layout_of(*tensors: Tensor) -> Layout:
    entries = [
        Entry(
            name=str(number),
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            order=tuple(range(tensor.dim())),
            offset=0,
        )
        for number, tensor in enumerate(tensors)
    ]
    return Layout(entries=entries, params=[], size=0)


def take(*tensors: Tensor, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Sums and samples of some tensors."""
    prints = Fingerprinter(layout_of(*tensors), list(enumerate(tensors)))
    sums = torch.full((prints.runs,), -1, dtype=torch.int64)
    samples = torch.full((prints.runs,), -1, dtype=torch.int64)
    prints.run(seed, sums, samples)
    return sums, samples


def words_of(data: Tensor) -> list[int]:
    raw = bytes(data.tolist())
    raw += bytes(-len(raw) % 8)
    return [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]


@pytest.mark.parametrize("nbytes", SIZES)
def test_it_is_what_its_docstring_says(nbytes: int) -> None:
    """Against the definition in plain Python integers."""
    data = data_of(nbytes)
    sums, samples = take(data)
    pick = fingerprint.picks(torch.arange(len(sums)), 5).tolist()
    words = words_of(data)
    runs = [words[at : at + RUN_WORDS] for at in range(0, len(words), RUN_WORDS)]
    mask = 2**64 - 1
    assert [value & mask for value in sums.tolist()] == [sum(run) & mask for run in runs]
    assert [value & mask for value in samples.tolist()] == [
        run[place % len(run)] for run, place in zip(runs, pick, strict=True)
    ]


@given(nbytes=st.integers(1, 3 * RUN_BYTES), place=st.integers(0), bit=st.integers(0, 7))
@example(nbytes=1, place=0, bit=0)
@example(nbytes=RUN_BYTES + 3, place=RUN_BYTES + 2, bit=7)
def test_one_flipped_bit_changes_the_sum_of_its_run_and_of_no_other(
    nbytes: int, place: int, bit: int
) -> None:
    data = data_of(nbytes)
    place %= nbytes
    before, _ = take(data)
    data[place] ^= 1 << bit
    after, _ = take(data)
    assert (before != after).nonzero().flatten().tolist() == [place // RUN_BYTES]


def test_words_that_change_places_are_found_by_the_sample_alone() -> None:
    """What a sum cannot see; why there are samples, at places that differ from proof to proof."""
    data = data_of(RUN_BYTES)
    swapped = data.view(torch.int64).clone()
    swapped[:-1] = data.view(torch.int64)[1:]
    swapped[-1] = data.view(torch.int64)[0]
    before, after = take(data), take(swapped.view(torch.uint8))
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@given(total=st.integers(0, 3000), seed=st.integers(0, 2**40))
def test_picks_are_words_of_a_run_and_the_same_on_both_sides(total: int, seed: int) -> None:
    pick = fingerprint.picks(torch.arange(total), seed)
    assert pick.dtype == torch.int64
    assert pick.shape == (total,)
    assert torch.equal(pick, fingerprint.picks(torch.arange(total), seed))
    assert total == 0 or 0 <= int(pick.min()) <= int(pick.max()) < RUN_WORDS


def test_picks_are_spread_and_differ_from_checkpoint_to_checkpoint() -> None:
    one, two = (
        fingerprint.picks(torch.arange(100_000), 1),
        fingerprint.picks(torch.arange(100_000), 2),
    )
    counts = torch.bincount(one, minlength=RUN_WORDS)
    assert int(counts.min()) > 100
    assert int(counts.max()) < 300
    assert float((one == two).double().mean()) < 0.05


def test_a_layouts_runs_lie_behind_each_other() -> None:
    sizes = [0, 1, 1024, 1025]
    entries = [
        Entry(name=str(size), dtype="float32", shape=(size,), order=(0,), offset=0)
        for size in sizes
    ]
    layout = Layout(entries=entries, params=[], size=0)
    assert fingerprint.offsets(layout) == [0, 0, 1, 2, 4]


TENSORS = {
    "plain": torch.randn(3, 5),
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 5),
    "one byte": torch.tensor([True]),
    "transposed": torch.randn(5, 3).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "complex": torch.randn(7, dtype=torch.complex64),
    "complex, transposed": torch.randn(3, 2, dtype=torch.complex128).t(),
    "16 bits": torch.randn(999).bfloat16(),
    "with gradient": torch.nn.Parameter(torch.randn(4)),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_bytes_are_those_of_the_image(tensor: Tensor) -> None:
    """Memory order, nothing converted: what a copy into a slot would put there."""
    assert memory_order(tensor) is not None
    found = fingerprint.as_bytes(tensor)
    assert found.dtype == torch.uint8
    assert found.numel() == tensor.numel() * tensor.dtype.itemsize
    assert torch.equal(found, bits(tensor.detach().clone()))


def test_a_tensor_with_holes_is_read_as_if_it_had_none() -> None:
    tensor = torch.arange(12.0).view(3, 4)[:, :3]
    assert memory_order(tensor) is None
    assert torch.equal(fingerprint.as_bytes(tensor), bits(tensor.contiguous()))


def test_bytes_that_do_not_begin_at_a_word_are_the_same() -> None:
    base = data_of(4 * RUN_BYTES)
    for shift in (1, 4, 8):
        part = base[shift : shift + RUN_BYTES + 5]
        assert all(map(torch.equal, take(part), take(part.clone())))


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_both_sides_agree(tensor: Tensor) -> None:
    """The trainer reads the tensor, the agent the bytes of its slot."""
    slot = torch.zeros(4096, dtype=torch.uint8)
    size = tensor.numel() * tensor.dtype.itemsize
    slot[64 : 64 + size].copy_(fingerprint.as_bytes(tensor))
    assert all(map(torch.equal, take(tensor.detach()), take(slot[64 : 64 + size])))


def test_many_tensors_have_the_fingerprints_of_each() -> None:
    """Ends of the same length are taken together; whose is whose must not be mixed up."""
    sizes = [*SIZES, *SIZES, 5, 5, 5, 2 * RUN_BYTES + 5]
    tensors = [data_of(size, seed=number) for number, size in enumerate(sizes)]
    layout = layout_of(*tensors)
    sums, samples = take(*tensors)
    first = fingerprint.offsets(layout)
    pick = fingerprint.picks(torch.arange(first[-1]), 5).tolist()
    mask = 2**64 - 1
    for number, tensor in enumerate(tensors):
        words = words_of(tensor)
        for run in range(first[number], first[number + 1]):
            mine = words[(run - first[number]) * RUN_WORDS :][:RUN_WORDS]
            assert int(sums[run]) & mask == sum(mine) & mask
            assert int(samples[run]) & mask == mine[pick[run] % len(mine)]


def test_it_reads_what_stands_there_when_it_is_asked() -> None:
    """Views are made once; the values are those of the moment, in tensors of every kind."""
    tensors = [torch.randn(2000), torch.randn(3), torch.randn(40, 50)[:, :30]]
    prints = Fingerprinter(layout_of(*tensors), list(enumerate(tensors)))
    for tensor in tensors:
        tensor.add_(1)
    sums = torch.zeros(prints.runs, dtype=torch.int64)
    samples = torch.zeros(prints.runs, dtype=torch.int64)
    prints.run(5, sums, samples)
    assert all(map(torch.equal, (sums, samples), take(*(tensor.clone() for tensor in tensors))))


def test_what_is_absent_is_left_alone() -> None:
    """Reserved state that does not exist (yet) has no fingerprint, and moves nobody else's."""
    tensors = [data_of(RUN_BYTES), data_of(3 * RUN_BYTES), data_of(9)]
    prints = Fingerprinter(layout_of(*tensors), [(0, tensors[0]), (2, tensors[2])])
    sums = torch.full((prints.runs,), 77, dtype=torch.int64)
    samples = torch.full((prints.runs,), 77, dtype=torch.int64)
    prints.run(5, sums, samples)
    assert sums[1:4].tolist() == samples[1:4].tolist() == [77, 77, 77]
    everything, _ = take(*tensors)
    assert (sums[0], sums[4]) == (everything[0], everything[4])


@given(stretch=st.integers(1, 20 * RUN_BYTES))
def test_slices_read_everything_once(stretch: int) -> None:
    tensors = [data_of(size, seed=size) for size in (3 * RUN_BYTES, 10, RUN_BYTES + 1, 0, 8)]
    prints = Fingerprinter(layout_of(*tensors), list(enumerate(tensors)))
    sums = torch.zeros(prints.runs, dtype=torch.int64)
    samples = torch.zeros(prints.runs, dtype=torch.int64)
    read = list(prints.slices(5, sums, samples, stretch))
    assert sum(read) == prints.nbytes
    assert all(map(torch.equal, (sums, samples), take(*tensors)))


def test_it_is_computed_where_it_is_told_to() -> None:
    """A model on an accelerator whose buffers are all in host memory: sums lie on the device."""
    there = torch.device("meta")
    tensors = [torch.randn(2000), torch.randn(3)]
    assert Fingerprinter(layout_of(*tensors), list(enumerate(tensors))).device.type == "cpu"
    prints = Fingerprinter(layout_of(*tensors), list(enumerate(tensors)), there)
    sums = torch.zeros(prints.runs, dtype=torch.int64, device=there)
    prints.run(5, sums, torch.zeros_like(sums))
    assert prints.device == there
    assert home([*tensors, torch.empty(1, device=there), tensors[0]]) == there
