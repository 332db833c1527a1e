"""What a person sees of a bench: a table that fills while it runs, and the one that stays.

What always holds: a table of an emulated device says so in its title, in each row and below.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gockpt.cli import output
from gockpt.cli.bench_document import Outcome, Reference, decided, reference_of, row
from gockpt.cli.bench_job import Progress
from gockpt.cli.bench_setup import Setup
from gockpt.results.noise import least

REFRESH = 0.5
"""Seconds between two drawings of the live table: drawing takes time from a core under test."""

COLUMNS = {
    "strategy": "strategy",
    "throughput": "throughput\nof none",
    "blocked": "blocked\neach",
    "excess": "excess\neach",
    "drain": "drain",
    "windows": "K",
    "traffic": "traffic",
    "durable": "durable\nafter",
    "identical": "identical",
    "memory": "memory, of\nplanned",
    "times": "times",
}
"""The columns, with their heads."""

LEFT = ("strategy", "times")
WIDE = 115
"""Columns of a terminal that all of these fit into."""

LESS = ("excess", "traffic", "durable", "memory")
"""What a narrower one does without; it is in the document all the same."""

Json = Mapping[str, Any]


class LiveView:
    """The live table on a terminal; one line a strategy elsewhere. Used in a ``with`` statement."""

    def __init__(self, setup: Setup, console: Console) -> None:
        self._setup = setup
        self._console = console
        self._rows: list[Json] = []
        self._against: Reference | None = None
        self._position: int | None = None
        self._progress: Progress | None = None
        self._drawn = 0.0
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )

    def progress(self, position: int | None, progress: Progress) -> None:
        """See :class:`gockpt.cli.bench_run.View`."""
        if self._live is None and progress.stage == "starting" and position is not None:
            name = self._setup.strategies[position]
            self._console.print(f"{position + 1}/{len(self._setup.strategies)} {name} …")
        self._position, self._progress = position, progress
        self.tick()

    def finished(self, outcomes: list[Outcome], against: Reference) -> None:
        """See :class:`gockpt.cli.bench_run.View`."""
        self._rows = [row(self._setup, one, against) for one in outcomes]
        self._against = against
        self._position = len(outcomes)
        self._progress = None
        self._draw()

    def note(self, line: str) -> None:
        """See :class:`gockpt.cli.bench_run.View`."""
        self._console.print(line)

    def tick(self) -> None:
        """Draw, if the last drawing is old enough."""
        if time.monotonic() - self._drawn >= REFRESH:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._live is not None:
            body = table(
                _facts(self._setup),
                self._rows,
                self._against,
                width=self._console.width,
                waiting=self._waiting(),
            )
            self._live.update(Group(body, Text(self._status(), style="dim")), refresh=True)

    def _waiting(self) -> list[str]:
        return list(self._setup.strategies[len(self._rows) :])

    def _status(self) -> str:
        name = "golden run" if self._position is None else ""
        if self._position is not None and self._position < len(self._setup.strategies):
            name = self._setup.strategies[self._position]
        now = self._progress
        if now is None:
            return f"{name}: starting"
        return f"{name}: {now.stage}" + (f", step {now.step} of {now.of}" if now.of else "")

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _facts(setup: Setup) -> Json:
    """The part of the document that a title needs, before there is one."""
    return {
        "environment": {
            "device": setup.task.device,
            "emulated": setup.task.profile is not None,
            "profile": setup.task.profile.name if setup.task.profile else None,
        },
        "workload": {
            "model": setup.task.model,
            "precision": setup.task.precision,
            "tokens_per_step": setup.task.tokens,
            "steps": setup.steps,
            "interval": setup.interval,
        },
    }


def table(
    facts: Json,
    rows: Sequence[Json],
    against: Reference | None,
    *,
    width: int,
    waiting: Sequence[str] = (),
) -> Table:
    """The table of a document (or of what there is of it), for a terminal of this width."""
    environment, workload = facts["environment"], facts["workload"]
    where = environment["device"]
    title = (
        f"{workload['model']}, {workload['precision']}, {workload['tokens_per_step']:,} tokens a "
        f"step, {workload['steps']} steps, a checkpoint every {workload['interval']} – {where}"
    )
    body = Table(
        title=title,
        title_justify="left",
        caption=_caption(facts),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    shown = [name for name in COLUMNS if width >= WIDE or name not in LESS]
    for name in shown:
        side: JustifyMethod = "left" if name in LEFT else "right"
        body.add_column(COLUMNS[name], justify=side, no_wrap=True)
    kind = "emulated" if environment["emulated"] else "measured"
    for one in rows:
        texts = {**cells(one, against), "times": kind}
        body.add_row(
            *(texts.get(name, "") for name in shown), style=None if one["valid"] else "red"
        )
    for waits in waiting:
        body.add_row(waits, style="dim")
    return body


def _caption(facts: Json) -> str | None:
    environment = facts["environment"]
    each = "Blocked, excess: seconds of stall for each checkpoint."
    if not environment["emulated"]:
        return each
    return (
        f"{each} Emulated by the profile {environment['profile']}: times model that hardware and "
        "were not measured on it; bytes are of the shrunk model."
    )


def cells(one: Json, against: Reference | None) -> dict[str, str]:
    """Texts by column; what is left out does not apply."""
    name = one["strategy"]
    if one["loop_s"] is None:
        return {"strategy": name, "throughput": "failed"}
    if name == "none":
        throughput = output.percent(one["relative_throughput"], 2) if one["valid"] else "invalid"
        return {"strategy": name, "throughput": throughput}
    saved, stall = one["checkpoints"], one["stall"]
    return {
        "strategy": name,
        "throughput": _relative(one["relative_throughput"], against) if one["valid"] else "invalid",
        "blocked": output.seconds(stall["blocked_s_per_checkpoint"]),
        "excess": output.seconds(stall["excess_s_per_checkpoint"]),
        "drain": output.seconds(one["drain_s"]),
        "windows": f"{one['windows'] or '–'}{'*' if one['fallbacks'] else ''}",
        "traffic": _traffic(one["bytes"]),
        "durable": output.seconds(one["latency_s"]["durable"]),
        "identical": f"{saved['identical']} of {saved['requested']}",
        "memory": _memory(one["memory_bytes"]),
    }


def _relative(relative: float | None, against: Reference | None) -> str:
    """The throughput, in brackets where it is within the machine's noise."""
    text = output.percent(relative, 2)
    if relative is None or against is None or against.spread is None or decided(relative, against):
        return text
    return f"({text})"


def _traffic(sent: Json) -> str:
    if not sent["state"]:
        return "–"
    return f"{(sent['state'] + sent['gradients']) / sent['state']:.2f}×"


def _memory(sizes: Json) -> str:
    parts = (sizes["trainer_added"], sizes["agent_added"])
    if None in parts:
        return "–"
    added, planned = sum(parts), sizes["predicted"]
    if planned is None:
        return output.size(added)
    return f"{output.size(added)}, {output.percent(added / planned, 0)}"


def show(document: Json, warnings: Sequence[tuple[str, str]], console: Console) -> None:
    """The final table, and below it whatever a reader of it must know."""
    against = reference_of(document)
    console.print(table(document, document["results"], against, width=console.width))
    if against.spread is not None:
        console.print(
            f"The two runs of none differ by {against.spread:.2%}, so a difference in throughput "
            f"below {least(against.spread):.2%} is not decided: in brackets."
        )
    for one in document["results"]:
        for problem in one["problems"]:
            console.print(f"{one['strategy']}: {problem}", style="red")
        for reason in dict.fromkeys(one["fallbacks"]):
            console.print(f"{one['strategy']}: * in one window, because {reason}")
    if "engines" in document:
        show_engines(document, console)
    for strategy, warning in dict.fromkeys(warnings):
        console.print(f"{strategy}: {warning}", style="dim")


def show_engines(document: Json, console: Console) -> None:
    """What "durable after" means in each row of other people's engines, and which did not run."""
    console.print("What each engine calls saved:")
    for names, one in alike(document["engines"]):
        version = f" ({one['version']})" if one["version"] else ""
        console.print(f"  {', '.join(names)}{version}: {promises(one)}")
    for one in document["not_run"]:
        console.print(f"{one['strategy']} did not run: {one['reason']}", style="yellow")


def alike(engines: Sequence[Json]) -> list[tuple[list[str], Json]]:
    """Engines that say the same of themselves, together: their names, and one of them."""
    groups: dict[tuple[Any, ...], tuple[list[str], Json]] = {}
    for one in engines:
        said = tuple(value for key, value in one.items() if key != "strategy")
        groups.setdefault(said, ([], one))[0].append(one["strategy"])
    return list(groups.values())


def promises(engine: Json) -> str:
    """Durability of an engine in a few words."""
    return ", ".join(
        (
            "synced to disk" if engine["fsync"] else "NOT synced",
            "atomic" if engine["atomic"] else "NOT atomic",
            "verified when read" if engine["verified"] else "NOT verified when read",
        )
    )
