"""``gockpt bench``: what every way of checkpointing costs, on one job."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from gockpt.cli import errors, options, output


def bench(
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
    json: options.Json = None,
    markdown: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Write the comparison as Markdown too."),
    ] = None,
    profile_file: options.ProfileFile = None,
) -> None:
    """Measure what each checkpointing strategy costs, and check every checkpoint that it makes."""
    from gockpt.cli import bench_follow, bench_markdown, bench_run, bench_setup, bench_table
    from gockpt.cli.database import database_path
    from gockpt.cli.follow import Follower
    from gockpt.results import Store

    output.check_target(json)
    output.check_target(markdown, option="--markdown")
    console = output.people(stderr=output.STDOUT in (json, markdown))
    setup = bench_setup.prepare(
        bench_setup.Options(
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
    )
    with Store(database_path(db)) as store:
        if setup.note:
            console.print(setup.note)
        with Follower(store, bench_follow.beginning(setup)) as follower:
            with bench_table.LiveView(setup, console) as view:
                report = bench_run.run(setup, bench_follow.FollowedView(view, setup, follower))
            store.add_bench(report.document, report.traces)
        bench_table.show(report.document, report.warnings, console)
        if json is not None:
            output.write_document(report.document, json)
        if markdown is not None:
            text = bench_markdown.page(report.document, bench_markdown.machine())
            output.write_text(text, markdown, option="--markdown")
        run_id = report.document["run_id"]
        console.print(f"Saved as run {run_id} in {store.path}. To see it in a browser:")
        console.print(look_again(str(store.path)), soft_wrap=True)
    if not all(one["valid"] for one in report.document["results"]):
        raise typer.Exit(errors.FAILED)


def look_again(database: str) -> str:
    """A command that shows the run."""
    return f"  {shlex.join(['gockpt', 'dashboard', '--db', database, '--open'])}"
