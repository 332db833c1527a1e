"""``gockpt bench``: what every way of checkpointing costs, on one job or on those of a suite."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gockpt.cli import errors, options, output
from gockpt.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from gockpt.cli.bench_setup import Options, Setup
    from gockpt.results import Store


def bench(
    context: typer.Context,
    model: options.Model = "gpt-1.3b",
    device: options.Device = "auto",
    strategies: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Which to compare.", show_default="all")
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Other people's engines, too: all that can run here.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 36,
    interval: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 12,
    tokens: options.Tokens = None,
    repeats: Annotated[
        int, typer.Option(help="Rounds of all strategies; `gate` needs several.")
    ] = 1,
    windows: options.Windows = None,
    precision: options.Precision = None,
    seed: options.Seed = 0,
    data: options.Data = None,
    dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where checkpoints are written, for the time of the bench.",
            show_default="the system's",
        ),
    ] = None,
    db: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Results database.", show_default="in the user's data"),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Several benches and one comparison: paper, sweep or scale. --steps is of each.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="Only these benches of the suite.", show_default="all"),
    ] = None,
    json: options.Json = None,
    markdown: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Write the comparison as Markdown too."),
    ] = None,
    profile_file: options.ProfileFile = None,
) -> None:
    """Measure what each checkpointing strategy costs, and check every checkpoint that it makes."""
    from gockpt.cli import bench_setup

    output.check_target(json)
    output.check_target(markdown, option="--markdown")
    console = output.people(stderr=output.STDOUT in (json, markdown))
    wanted = bench_setup.Options(
        model=model,
        device=device,
        strategies=strategies,
        steps=steps,
        interval=interval,
        tokens=tokens,
        windows=windows,
        precision=precision,
        seed=seed,
        data=data,
        directory=dir,
        profile_file=profile_file,
        repeats=repeats,
        peers=peers,
    )
    if suite is None:
        if only is not None:
            raise ConfigError("--only is of a suite; name one with --suite")
        document, good = _single(wanted, markdown, db, console)
    else:
        document, good = _suite(suite, wanted, context, only, markdown, db, console)
    if json is not None:
        output.write_document(document, json)
    if not good:
        raise typer.Exit(errors.FAILED)


def _single(
    wanted: Options, markdown: str | None, db: str | None, console: Console
) -> tuple[dict[str, Any], bool]:
    """One bench: its document, and whether every row counts."""
    from gockpt.cli import bench_markdown, bench_setup
    from gockpt.cli.database import database_path
    from gockpt.results import Store

    setup = bench_setup.prepare(wanted)
    with Store(database_path(db)) as store:
        document = measure(setup, store, console)
        if markdown is not None:
            text = bench_markdown.page(document, bench_markdown.machine())
            output.write_text(text, markdown, option="--markdown")
        console.print(f"Saved as run {document['run_id']} in {store.path}. To see it in a browser:")
        console.print(look_again(str(store.path)), soft_wrap=True)
    return document, all(one["valid"] for one in document["results"])


def _suite(
    name: str,
    wanted: Options,
    context: typer.Context,
    only: str | None,
    markdown: str | None,
    db: str | None,
    console: Console,
) -> tuple[dict[str, Any], bool]:
    """A suite: the document of its comparison, and whether every row of all its benches counts."""
    from gockpt.cli import bench_suite, bench_suites
    from gockpt.cli.database import database_path
    from gockpt.results import Store

    request = bench_suite.Request(options=wanted, given=_given(context), only=only)
    prepared = bench_suites.prepare(name, request)
    with Store(database_path(db)) as store:
        document = bench_suites.run(
            prepared,
            lambda setup: measure(setup, store, console),
            console,
            markdown=markdown,
        )
        console.print(f"The runs are in {store.path}. To see them in a browser:")
        console.print(look_again(str(store.path)), soft_wrap=True)
    return document, bench_suite.passed(document)


def _given(context: typer.Context) -> frozenset[str]:
    """Names of the parameters that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(
        name for name, source in sources.items() if source and source.name == "COMMANDLINE"
    )


def measure(setup: Setup, store: Store, console: Console) -> dict[str, Any]:
    """Run one bench, let others see it meanwhile, store and show it; its document."""
    from gockpt.cli import bench_follow, bench_run, bench_table
    from gockpt.cli.follow import Follower

    if setup.note:
        console.print(setup.note)
    with Follower(store, bench_follow.beginning(setup)) as follower:
        with bench_table.LiveView(setup, console) as view:
            report = bench_run.run(setup, bench_follow.FollowedView(view, setup, follower))
        store.add_bench(report.document, report.traces)
    bench_table.show(report.document, report.warnings, console)
    return report.document


def look_again(database: str) -> str:
    """A command that shows the run."""
    return f"  {shlex.join(['gockpt', 'dashboard', '--db', database, '--open'])}"
