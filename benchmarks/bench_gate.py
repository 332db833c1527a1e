"""How often the gate is wrong: alarms between identical runs, and slow-downs that it misses.

Really runs short benches of gpt-nano on a small emulated accelerator (``small.toml``), one after
the other. Each run is compared with the one before it, which is identical: an alarm is false. Then
10 % are planted in one part, and the run is compared with an identical one without: it must fail.

    python benchmarks/bench_gate.py DIR --pairs 40 --planted 10

A run takes about a minute on a quiet machine. The documents stay in DIR; runs that are there
already are not made again, so that a count may be continued. What is planted:

- ``copy``: the link is 10 % slower, ``replay``: the host replays 10 % slower (both in the profile,
  under the same name, as a slower engine would look);
- ``hook``: each window holds up its pass by 10 % of a step, at the fault point ``capture.window``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gockpt.cli import bench_run, bench_setup, gate_config
from gockpt.cli.bench_document import Outcome, Reference
from gockpt.cli.bench_job import Progress
from gockpt.cli.gate import judge
from gockpt.cli.gate_output import sentence
from gockpt.faults import Fault
from gockpt.results.verdicts import Report

PROFILE = Path(__file__).with_name("small.toml")
STEP_S = 0.2
SLOWER = 1.1
PLANTED = {"copy": "link_alone", "replay": "host_replay", "hook": None}
"""Part → the rate of the profile that is divided."""

Json = dict[str, Any]


class Silent:
    """A view that shows nothing."""

    def progress(self, position: int | None, progress: Progress) -> None: ...
    def finished(self, outcomes: list[Outcome], against: Reference) -> None: ...
    def note(self, line: str) -> None: ...
    def tick(self) -> None: ...


def bench(directory: Path, part: str | None, repeats: int) -> Json:
    """One run, with a tenth planted in a part or without."""
    setup = bench_setup.prepare(
        bench_setup.Options(
            model="gpt-nano", device="auto", strategies="gockpt", steps=16, interval=4, tokens=None,
            windows=3, precision=None, seed=0, data=None, directory=str(directory),
            profile_file=str(profile(directory, part)), repeats=repeats,
        )
    )  # fmt: skip
    if part == "hook":
        delay = Fault(point="capture.window", action=f"delay:{STEP_S * (SLOWER - 1)}", times=0)
        setup = replace(setup, faults=(delay,))
    return bench_run.run(setup, Silent()).document


def profile(directory: Path, part: str | None) -> Path:
    """The profile, with one rate slower if that is planted, always under the same name."""
    rate = PLANTED.get(part or "")
    text = PROFILE.read_text()
    if rate is not None:
        (value,) = re.findall(rf"^\[{rate}\]\nvalue = (\S+)$", text, re.MULTILINE)
        slower = f"[{rate}]\nvalue = {float(value) / SLOWER}"
        text = text.replace(f"[{rate}]\nvalue = {value}", slower)
    path = directory / (part or "plain") / PROFILE.name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def kept(directory: Path, part: str | None, number: int, repeats: int) -> Json:
    """A run from the directory, or made now and kept there."""
    path = directory / f"{part or 'plain'}-{number:03}.json"
    if not path.exists():
        began = time.monotonic()
        document = bench(directory, part, repeats)
        path.write_text(json.dumps(document))
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)
    found: Json = json.loads(path.read_text())
    return found


def compared(
    directory: Path, pairs: int, planted: int, repeats: int
) -> Iterator[tuple[str, Report]]:
    """Every comparison, as it can be made: (``same`` or the part, what the gate said)."""
    settings = gate_config.load(None)
    plain = [kept(directory, None, 0, repeats)]
    for number in range(max(pairs, planted)):
        if number < pairs:
            plain.append(kept(directory, None, number + 1, repeats))
            yield "same", judge(plain[-1], plain[-2], settings)
        for part in PLANTED if number < planted else ():
            yield part, judge(kept(directory, part, number, repeats), plain[-1], settings)


def main() -> int:
    """Count; exit with 1 if the gate is wrong more often than it may be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--planted", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    counts = {name: [0, 0] for name in ("same", *PLANTED)}
    for name, report in compared(given.directory, given.pairs, given.planted, given.repeats):
        counts[name][0] += report.verdict.fails
        counts[name][1] += 1
        print(f"{name}: {report.verdict}", *_why(report), sep="\n  ", flush=True)
        print({key: f"{fails} of {runs} fail" for key, (fails, runs) in counts.items()}, flush=True)
    alarms, same = counts.pop("same")
    caught = all(fails >= 0.9 * runs for fails, runs in counts.values())
    return 0 if alarms <= same / 40 and caught else 1


def _why(report: Report) -> list[str]:
    return [sentence(one) for one in report.findings if one.outcome.fails]


if __name__ == "__main__":
    sys.exit(main())
