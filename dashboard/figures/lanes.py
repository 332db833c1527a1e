"""The lanes of a timeline: which there are, how they are named, and which spans a checkpoint has.

Pure functions over spans, :class:`gockpt.results.SpanRow`. All times are seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gockpt.results import Checkpoint, SpanRow

LANES: Mapping[str, str] = MappingProxyType(
    {
        "compute": "training",
        "stall": "stall",
        "state": "state copy",
        "gradients": "gradient copy",
        "replay": "replay",
        "proof": "proof",
        "write": "write",
        "commit": "commit",
    }
)
"""Lane of a span → what the figure calls it, from top to bottom."""

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#7FA8D1",
        "backward": "#4A7DB5",
        "update": "#A98BD6",
        "stall": "#C23528",
        "state": "#33A566",
        "gradients": "#E07F10",
        "replay": "#C040A8",
        "proof": "#8C8C3E",
        "write": "#2098E0",
        "commit": "#B5555A",
    }
)
"""The lane's colour; of the phases of training, each its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch in which parameters and optimizer state stand still, and are copied."""

    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Spans of one kind that follow on one another as closely as a person can see."""

    start: float
    end: float
    busy: float
    """Seconds of it that were spans."""
    count: int
    """How many spans it is made of."""
    step: int
    """Of the first one."""


def of_checkpoint(spans: Iterable[SpanRow], checkpoint: Checkpoint) -> list[SpanRow]:
    """The spans that belong to one checkpoint, and the training that went on meanwhile.

    From the opening of its first window until it was committed; what training did at either end
    is there as a whole.
    """
    spans = list(spans)
    base = checkpoint.step - max(1, checkpoint.windows) + 1
    own = [
        one
        for one in spans
        if one.lane not in ("compute", "stall") and base <= one.step <= checkpoint.step
    ]
    if not own:
        return []
    begin = _opened(spans, base, min(one.start for one in own))
    end = max(one.end for one in own)
    beside = [
        one
        for one in spans
        if one.lane in ("compute", "stall") and one.end > begin and one.start < end
    ]
    return sorted(own + beside, key=lambda one: one.start)


def _opened(spans: Iterable[SpanRow], base: int, first_copy: float) -> float:
    """The first window opens when the update of pass ``base`` has ended."""
    updates = [one.end for one in spans if one.name == "update" and one.lane == "compute"
               and one.step == base]  # fmt: skip
    return min([*updates, first_copy])


def windows(spans: Sequence[SpanRow]) -> list[Window]:
    """The windows that state was copied in: from the end of an update to the next update's start.

    A copy belongs to the window that it begins in; the update may have to wait for it.
    Found by the phases of training; none where those are not recorded.
    """
    updates = sorted(
        (one for one in spans if one.lane == "compute" and one.name == "update"),
        key=lambda one: one.start,
    )
    copies = [one for one in spans if one.lane == "state"]
    start = min((one.start for one in spans), default=0.0)
    ends = [start, *(one.end for one in updates)]
    starts = [*(one.start for one in updates), max((one.end for one in spans), default=0.0)]
    return [
        Window(start=begin, end=end)
        for begin, end in zip(ends, starts, strict=True)
        if any(begin <= one.start < end for one in copies)
    ]


def without_stalls(spans: Sequence[SpanRow]) -> list[SpanRow]:
    """The same spans, those of training cut where training was held up.

    An update that has to wait is recorded as one span from its start to its end.
    """
    stalls = sorted((one.start, one.end) for one in spans if one.lane == "stall")
    made: list[SpanRow] = []
    for one in spans:
        made += _cut(one, stalls) if one.lane == "compute" else [one]
    return made


def _cut(span: SpanRow, gaps: Iterable[tuple[float, float]]) -> Iterator[SpanRow]:
    """What is left of a span; ``gaps`` in their order."""
    start = span.start
    for begin, end in gaps:
        if begin < span.end and end > start:
            if begin > start:
                yield _piece(span, start, begin)
            start = end
    if start < span.end:
        yield _piece(span, start, span.end)


def _piece(span: SpanRow, start: float, end: float) -> SpanRow:
    return SpanRow(
        result_id=span.result_id,
        lane=span.lane,
        name=span.name,
        start=start,
        end=end,
        step=span.step,
    )


def stretches(spans: Iterable[SpanRow], gap: float) -> list[Stretch]:
    """Spans joined where less than ``gap`` seconds lie between them, so that many become few."""
    ordered = sorted(spans, key=lambda one: one.start)
    return [_join(group) for group in _runs(ordered, gap)]


def _runs(ordered: Sequence[SpanRow], gap: float) -> Iterator[list[SpanRow]]:
    run: list[SpanRow] = []
    end = 0.0
    for one in ordered:
        if run and one.start - end >= gap:
            yield run
            run = []
        end = max(end, one.end) if run else one.end
        run.append(one)
    if run:
        yield run


def _join(run: Sequence[SpanRow]) -> Stretch:
    end = max(one.end for one in run)
    return Stretch(start=run[0].start, end=end, busy=_busy(run), count=len(run), step=run[0].step)


def _busy(ordered: Sequence[SpanRow]) -> float:
    """Seconds in which at least one of them was at work."""
    reached = itertools.accumulate((one.end for one in ordered), max, initial=float("-inf"))
    return sum(
        max(0.0, one.end - max(one.start, before))
        for one, before in zip(ordered, reached, strict=False)
    )
