"""A bench, a crash test and a gate in a few sentences, for who opens the page the first time.

Pure functions of rows. What always holds: a difference that the machine's noise could make is never
claimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gockpt.dashboard.metrics import METRICS
from gockpt.results import Result
from gockpt.results.noise import decided, spread_of
from gockpt.results.verdicts import Outcome, Report

OURS = "gockpt"

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One figure, large, and what it says."""

    value: str
    words: str
    tone: Tone = "plain"


def of_bench(results: Sequence[Result]) -> list[Headline]:
    """The most that a bench has to say, of the engine itself and beside the costliest other way."""
    ours = next((one for one in results if one.strategy == OURS), None)
    if ours is None or ours.loop_s is None:
        return []
    if not ours.valid:
        problems = ours.row.get("problems") or ["its row does not count"]
        return [Headline(value="invalid", words=f"gockpt: {problems[0]}.", tone="bad")]
    found = [_speed(ours, spread_of(results)), *_against_others(ours, results)]
    durable = METRICS["durable"].read(ours.row)
    if durable is not None:
        value = METRICS["durable"].show(durable)
        found.append(
            Headline(
                value=value, words="after its start, a checkpoint survives the machine's crash."
            )
        )
    return [*found, *_proved(ours)]


def _speed(ours: Result, spread: float | None) -> Headline:
    relative = ours.relative_throughput
    value = METRICS["throughput"].show(relative)
    words = "of the training speed without checkpoints is kept with gockpt."
    if relative is not None and spread is not None and not decided(relative, spread):
        words += " The machine's noise is larger than the difference."
    return Headline(value=value, words=words)


def _against_others(ours: Result, results: Sequence[Result]) -> list[Headline]:
    """How much less gockpt holds training up than the best and the worst of the others."""
    mine = ours.blocked_s_per_checkpoint
    others = [
        (one.blocked_s_per_checkpoint, one.strategy)
        for one in results
        if one.valid and one.strategy not in (OURS, "none") and one.blocked_s_per_checkpoint
    ]
    if mine is None:
        return []
    show = METRICS["blocked"].show
    found = [Headline(value=show(mine), words="one checkpoint with gockpt holds training up.")]
    if not others or mine <= 0:
        return found
    for seconds, name in dict.fromkeys((min(others), max(others))):
        more = seconds > mine
        ratio = seconds / mine if more else mine / seconds
        found.append(
            Headline(
                value=f"{ratio:,.1f} ×",
                words=f"{'less' if more else 'more'} waiting for a checkpoint than with {name} "
                f"({show(seconds)}).",
                tone="good" if more else "bad",
            )
        )
    return found


def _proved(ours: Result) -> list[Headline]:
    counts = ours.row.get("checkpoints")
    if not isinstance(counts, Mapping) or not counts.get("requested"):
        return []
    identical, requested = counts.get("identical") or 0, counts["requested"]
    return [
        Headline(
            value=f"{identical} of {requested}",
            words="checkpoints of gockpt were read back and are, bit for bit, the state of a run "
            "without them.",
            tone="good" if identical == requested else "bad",
        )
    ]


def of_crash_test(counts: Mapping[bool | None, int]) -> Headline:
    """How many trials passed."""
    passed, failed, skipped = (counts.get(key, 0) for key in (True, False, None))
    words = "crashes were recovered from."
    if skipped:
        words += f" {skipped} did not come to their point and were skipped."
    return Headline(
        value=f"{passed} of {passed + failed}", words=words, tone="bad" if failed else "good"
    )


def of_gate(report: Report) -> Headline:
    """What a gate decided."""
    words = {
        Outcome.GOOD: "No figure has become worse than in the baseline, beyond threshold and noise."
        if report.baseline
        else "Every limit holds. There was no baseline to compare with.",
        Outcome.WORSE: "The run is worse than the baseline, beyond threshold and noise.",
        Outcome.BROKEN: "A limit that every run has to keep is broken.",
        Outcome.MISSING: "A figure that has to be there is not in the run.",
        Outcome.UNKNOWN: "Nothing failed, but noise or too few rounds leave something undecided.",
    }
    failed = report.verdict.fails
    tone: Tone = "bad" if failed else "plain" if report.verdict.open else "good"
    return Headline(
        value=str(report.verdict), words=words.get(report.verdict, "See its checks."), tone=tone
    )
