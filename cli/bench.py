"""``gockpt bench``: what every way of checkpointing costs, on one job."""

from __future__ import annotations

from typing import Annotated

import typer

from gockpt.cli import errors, output


def bench(
    model: Annotated[str, typer.Option(help="What to train; see `gockpt models`.")] = "gpt-1.3b",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda[:N] or emulated:PROFILE; see `gockpt devices`.")
    ] = "auto",
    strategies: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Which to compare.", show_default="all")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 24,
    interval: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 8,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step.", show_default="the model's")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(help="Force this many windows.", show_default="as planned")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32 or bf16-master.", show_default="the model's")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Text to train on.", show_default="the standard library's sources"
        ),
    ] = None,
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
    json: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="Write the results as JSON.")
    ] = None,
    profile_file: Annotated[
        str | None, typer.Option(metavar="TOML", help="An emulation profile of your own.")
    ] = None,
) -> None:
    """Measure what each checkpointing strategy costs, and check every checkpoint it makes."""
    from gockpt.cli import bench_run, bench_setup, bench_table
    from gockpt.cli.bench_document import reference_of
    from gockpt.cli.database import database_path
    from gockpt.results import Store

    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
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
        )
    )
    with Store(database_path(db)) as store:
        if setup.note:
            console.print(setup.note)
        with bench_table.LiveView(setup, console) as view:
            report = bench_run.run(setup, view)
        store.add_bench(report.document, report.traces)
        against = reference_of(report.document)
        console.print(bench_table.table(report.document, report.document["results"], against))
        for line in bench_table.notes(report.document, against.spread):
            console.print(line)
        for strategy, warning in report.warnings:
            console.print(f"{strategy}: {warning}", style="dim")
        if json is not None:
            output.write_document(report.document, json)
        console.print(f"Saved as run {report.document['run_id']} in {store.path}", soft_wrap=True)
    if not all(one["valid"] for one in report.document["results"]):
        raise typer.Exit(errors.FAILED)
