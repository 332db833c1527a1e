"""Shared memory: segments, and the ring that gradients pass through.

The ring's tests are property tests: whatever is allocated and freed, no two stretches in use
overlap, and a replay that frees what it has used never leaves the trainer waiting for ever.
"""

from __future__ import annotations

import errno
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gockpt.arena import Ring, Segment
from gockpt.state import ALIGNMENT, PAGE, align

# -- segments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 1])
def test_a_segment_is_whole_pages_of_zeros(size: int) -> None:
    segment = Segment.create("test", size)
    assert segment.size == align(max(size, 1), PAGE)
    assert segment.tensor.shape == (segment.size,)
    assert segment.tensor.data_ptr() % PAGE == 0
    assert not segment.tensor.any()
    segment.close()


def test_two_mappings_of_one_segment_are_the_same_memory() -> None:
    ours = Segment.create("test", PAGE)
    assert ours.fd is not None
    theirs = Segment(ours.size, fd=os.dup(ours.fd))
    ours.view(64, 4, torch.float32).copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    assert theirs.view(64, 4, torch.float32).tolist() == [1.0, -2.0, 3.0, 0.5]
    ours.close()
    theirs.view(64, 1, torch.float32).fill_(9.0)
    assert ours.view(64, 1, torch.float32).item() == 9.0  # the mapping outlives the descriptor
    theirs.close()


def test_a_view_counts_bytes_for_its_place_and_elements_for_its_length() -> None:
    segment = Segment.create("test", PAGE)
    segment.tensor.copy_(torch.arange(PAGE, dtype=torch.int32).to(torch.uint8))
    view = segment.view(128, 3, torch.int16)
    assert view.view(torch.uint8).tolist() == [128, 129, 130, 131, 132, 133]
    assert segment.view(0, 0, torch.float64).numel() == 0
    segment.close()


def test_a_segment_is_not_inherited_by_programs_that_are_started() -> None:
    segment = Segment.create("test", PAGE)
    assert segment.fd is not None
    assert not os.get_inheritable(segment.fd)
    segment.close()
    segment.close()
    assert segment.fd is None


def test_without_memfd_the_memory_is_anonymous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    segment = Segment.create("test", 100)
    assert segment.fd is None
    segment.tensor.fill_(7)
    assert segment.view(PAGE - 1, 1, torch.uint8).item() == 7
    segment.close()


def test_too_little_memory_is_an_error_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def refuse(fd: int, offset: int, size: int) -> None:
        made.append(fd)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="allocate"):
        Segment.create("test", PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


# -- the ring --------------------------------------------------------------------------------------

SIZE = 64 * ALIGNMENT

actions = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, SIZE + ALIGNMENT)),
        st.tuples(st.just("free"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(actions)
def test_stretches_in_use_never_overlap(steps: list[tuple[str, int]]) -> None:
    ring = Ring(SIZE)
    live: list[tuple[int, int, int]] = []
    last = 0
    for action, number in steps:
        if action == "free":
            if live:
                ticket, _, _ = live.pop(min(number, len(live) - 1))
                ring.free([ticket])
            continue
        found = ring.allocate(number)
        if found is None:
            assert live or align(number) > SIZE, "an empty ring refuses only what is too large"
            continue
        ticket, start = found
        stop = start + number
        assert ticket == last + 1
        assert start % ALIGNMENT == 0
        assert 0 <= start <= stop <= SIZE
        assert all(stop <= begin or end <= start for _, begin, end in live)
        last = ticket
        live.append((ticket, start, stop))
    assert ring.used >= sum(stop - start for _, start, stop in live)


@given(actions)
def test_a_ring_that_was_emptied_takes_anything_that_fits(steps: list[tuple[str, int]]) -> None:
    ring = Ring(SIZE)
    last = 0
    for action, number in steps:
        if action == "allocate" and (found := ring.allocate(number)) is not None:
            last = found[0]
        elif action == "free":
            ring.free(range(0, last, number + 1))
    ring.free(range(last + 1))
    assert ring.used == 0
    assert ring.allocate(SIZE) is not None
    assert ring.allocate(1) is None


@settings(max_examples=50)
@given(st.data())
def test_one_set_of_gradients_fits_once_the_sets_before_it_are_used_up(data: st.DataObject) -> None:
    """The ring has room for two sets. A set is only announced, and so freed, when all of it has its
    place: if it did not fit beside nothing but itself, trainer and agent would wait for ever."""
    stretches = data.draw(st.lists(st.integers(0, 20 * ALIGNMENT), min_size=1, max_size=6))
    ring = Ring(2 * sum(align(size) for size in stretches) + PAGE)
    earlier: list[int] = []
    for _ in range(8):
        tickets: list[int] = []
        count = data.draw(st.integers(1, len(stretches)))  # earlier windows hold fewer blocks
        for size in stretches[:count]:
            found = ring.allocate(size)
            if found is None:
                ring.free(earlier)
                found = ring.allocate(size)
            assert found is not None
            tickets.append(found[0])
        earlier += tickets


def test_the_ring_goes_round() -> None:
    ring = Ring(4 * ALIGNMENT)
    first, second, third = (ring.allocate(ALIGNMENT) for _ in range(3))
    assert (first, second, third) == ((1, 0), (2, ALIGNMENT), (3, 2 * ALIGNMENT))
    assert ring.allocate(2 * ALIGNMENT) is None
    ring.free([1, 2])
    assert ring.allocate(2 * ALIGNMENT) is None, "head must not meet tail: full would look empty"
    assert ring.allocate(ALIGNMENT) == (4, 3 * ALIGNMENT)
    assert ring.allocate(ALIGNMENT) == (5, 0)


def test_what_lies_before_is_waited_for_and_freeing_twice_does_nothing() -> None:
    """A checkpoint that is dropped frees its gradients while an older one still needs its own."""
    ring = Ring(SIZE)
    for _ in range(3):
        ring.allocate(100)
    ring.free([2])
    assert ring.used == 3 * align(100)
    assert not ring.only([2, 3])
    assert ring.only([1, 2, 3])
    ring.free([1])
    assert ring.used == align(100)
    ring.free([1, 2])
    assert ring.used == align(100)
    assert ring.only([3])
    ring.free([3])
    assert (ring.used, ring.only([])) == (0, True)


def test_tickets_of_the_ring_before_free_nothing() -> None:
    before = Ring(SIZE)
    before.allocate(100)
    ring = Ring(SIZE, before.tickets)
    assert ring.allocate(100) == (2, 0)
    ring.free([1])
    assert ring.used == align(100)


def test_an_empty_stretch_does_not_fill_the_ring() -> None:
    """Gradients of empty parameters: a stretch of nothing must not block what follows."""
    ring = Ring(SIZE)
    assert ring.allocate(0) == (1, 0)
    assert ring.allocate(ALIGNMENT) is not None
