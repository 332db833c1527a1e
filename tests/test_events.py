"""Spans and counters: nothing is lost, in whatever thread it happened, up to the limit."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from gockpt.events import Recorder, Span


def span(number: int) -> Span:
    return Span(lane="state", name="copy", start=number, end=number + 0.5, step=number)


def add(recorder: Recorder, one: Span) -> None:
    recorder.add(one.lane, one.name, one.start, one.end, one.step)


def test_draining_returns_everything_once_and_in_order() -> None:
    recorder = Recorder()
    for number in range(3):
        add(recorder, span(number))
    assert recorder.drain() == [span(0), span(1), span(2)]
    assert recorder.drain() == []
    add(recorder, span(3))
    assert recorder.drain() == [span(3)]


def test_the_body_of_a_with_statement_is_a_span() -> None:
    recorder = Recorder()
    before = time.monotonic()
    with recorder.span("write", "sync", 7):
        inside = time.monotonic()
    (found,) = recorder.drain()
    assert (found.lane, found.name, found.step) == ("write", "sync", 7)
    assert before <= found.start <= inside <= found.end <= time.monotonic()


def test_a_body_that_fails_is_recorded_too() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="inside"), recorder.span("write", "sync", 7):
        raise ValueError("inside")
    assert len(recorder.drain()) == 1


def test_spans_of_another_process_are_taken_over() -> None:
    agent, trainer = Recorder(), Recorder()
    add(agent, span(1))
    sent = msgspec.msgpack.encode(agent.drain())
    add(trainer, span(2))
    trainer.extend(msgspec.msgpack.decode(sent, type=list[Span]))
    assert trainer.drain() == [span(2), span(1)]


def test_beyond_the_limit_the_oldest_go_and_are_counted() -> None:
    recorder = Recorder(limit=100)
    for number in range(101):
        add(recorder, span(number))
    assert recorder.counters == {"spans_dropped": 10}
    kept = recorder.drain()
    assert [one.step for one in kept] == list(range(10, 101))


def test_memory_is_bounded() -> None:
    recorder = Recorder(limit=100)
    for number in range(10_000):
        add(recorder, span(number))
    kept = recorder.drain()
    assert len(kept) <= 100
    assert kept[-1] == span(9_999)
    assert recorder.counters["spans_dropped"] + len(kept) == 10_000


def test_counters_add_up_and_are_given_out_as_copies() -> None:
    recorder = Recorder()
    recorder.count("fallbacks")
    recorder.count("bytes", 10.5)
    recorder.count("bytes", 1)
    copy = recorder.counters
    assert copy == {"fallbacks": 1, "bytes": 11.5}
    copy["bytes"] = 0
    assert recorder.counters["bytes"] == 11.5


def test_no_span_and_no_count_is_lost_between_threads() -> None:
    recorder = Recorder()
    together = threading.Barrier(4)

    def work() -> None:
        together.wait(10)
        for number in range(500):
            add(recorder, span(number))
            recorder.count("n")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    drained = 0
    while any(thread.is_alive() for thread in threads):
        drained += len(recorder.drain())
    for thread in threads:
        thread.join(10)
    assert drained + len(recorder.drain()) == 2000
    assert recorder.counters == {"n": 2000}


def test_spans_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        span(1).end = 0.0  # type: ignore[misc]
