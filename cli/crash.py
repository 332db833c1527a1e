"""``gockpt crash-test``: kill it, damage it, starve it, and prove the recovery."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from gockpt.cli import errors, options, output
from gockpt.cli.bench import look_again
from gockpt.errors import ConfigError

if TYPE_CHECKING:
    from gockpt.cli.crash_command import Options
    from gockpt.results import Store

OWN = "A trainer of your own"

WITH_TABLE1 = ("table1", "mtbf", "db", "json")
"""Options that mean something with ``--table1``."""


def crash_test(
    context: typer.Context,
    scenario: Annotated[
        str | None,
        typer.Option(metavar="A,B|all", help="Scenarios or families.", show_default="all"),
    ] = None,
    point: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only at these points.", show_default="all")
    ] = None,
    strategies: Annotated[
        str, typer.Option(metavar="A,B|all", help="Methods to test; torch-save is another one.")
    ] = "gockpt",
    trials: Annotated[
        int | None, typer.Option(help="How many.", show_default="each case once")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, data, and what happens when.")] = 0,
    model: options.Model = "gpt-nano",
    device: options.Device = "cpu",
    tokens: options.Tokens = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few of everything.")] = False,
    mtbf: Annotated[
        str, typer.Option(metavar="SECONDS", help="Time between failures, for the goodput.")
    ] = "600s",
    table1: Annotated[
        bool,
        typer.Option(
            "--table1", help="From results that are there, beside Table 1 of GoCkpt's paper."
        ),
    ] = False,
    sabotage: Annotated[
        str | None, typer.Option(metavar="BUG", help="Plant a bug that must be found.")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            help="Test this trainer instead; {dir} in it: the directory of the run.",
            rich_help_panel=OWN,
        ),
    ] = None,
    result: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="A file (or directory) that it makes; may be repeated.",
            rich_help_panel=OWN,
        ),
    ] = None,
    first_kill_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Kill it not before.",
            show_default="when it is ready",
            rich_help_panel=OWN,
        ),
    ] = None,
    step_regex: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help=r"Finds the number in its line at the end of a step: 'step (\d+)'.",
            rich_help_panel=OWN,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="In which it ends when nobody kills it.", rich_help_panel=OWN
        ),
    ] = 3600.0,
    list_: Annotated[bool, typer.Option("--list", help="Show scenarios and points.")] = False,
    dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="New or empty, for checkpoints.", show_default="the system's"
        ),
    ] = None,
    db: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Results database.", show_default="in the user's data"),
    ] = None,
    json: options.Json = None,
) -> int:
    """Interrupt training in every way that happens, and compare with an uninterrupted run."""
    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    between = _seconds(mtbf)
    if list_:
        return _list(console, json)
    if table1:
        _refuse_others(context)
        return _table1(between, console, db, json)
    if command is not None or result:
        from gockpt.cli import crash_command

        own = crash_command.Options(
            command=command or "",
            results=tuple(result or ()),
            trials=trials,
            seed=seed,
            directory=dir,
            quick=quick,
            first_kill_after=first_kill_after,
            step_regex=step_regex,
            timeout=timeout,
        )
        return _own_trainer(own, console, db, json)
    from gockpt.cli import crash_follow, crash_run, crash_setup
    from gockpt.cli.crash_table import LiveView, show
    from gockpt.cli.database import database_path
    from gockpt.cli.follow import Follower
    from gockpt.results import Store

    setup = crash_setup.prepare(
        crash_setup.Options(
            scenario=scenario,
            point=point,
            strategies=strategies,
            trials=trials,
            seed=seed,
            model=model,
            device=device,
            tokens=tokens,
            quick=quick,
            sabotage=sabotage,
            directory=dir,
        )
    )
    with Store(database_path(db)) as store:
        if setup.note:
            console.print(setup.note)
        with Follower(store, crash_follow.beginning(setup)) as follower:
            with LiveView(setup, console) as view:
                report = crash_run.run(setup, crash_follow.FollowedView(view, follower))
            store.add_crash_test(report.document)
        show(report, mtbf=between, console=console)
        if json is not None:
            output.write_document(report.document, json)
        _say_where(report.document, store, console)
    return errors.GOOD if report.good else errors.FAILED


def _own_trainer(own: Options, console: Console, db: str | None, json: str | None) -> int:
    """``--command``: trials, database, document."""
    from gockpt.cli import crash_command
    from gockpt.cli.database import database_path
    from gockpt.results import Store

    order = crash_command.prepare(own)
    with Store(database_path(db)) as store:
        document = crash_command.run(order, console)
        store.add_crash_test(document)
        if json is not None:
            output.write_document(document, json)
        _say_where(document, store, console)
    return errors.FAILED if document["summary"]["failed"] else errors.GOOD


def _say_where(document: dict[str, Any], store: Store, console: Console) -> None:
    """The last lines: where the run is kept, and how to look at it."""
    kept = f"Saved as run {document['run_id']} in {store.path}. To see it in a browser:"
    console.print(kept, soft_wrap=True)
    console.print(look_again(str(store.path)), soft_wrap=True)


def _list(console: Console, json: str | None) -> int:
    """``--list``."""
    from gockpt.cli.crash_table import list_document, show_list

    if json is not None:
        output.write_document(list_document(), json)
    show_list(console)
    return errors.GOOD


def _refuse_others(context: typer.Context) -> None:
    """``--table1`` does no trials, so whatever says which would be ignored.

    Raises:
        ConfigError: such an option was given.
    """
    for one in context.command.params:
        source = context.get_parameter_source(one.name or "")
        if one.name not in WITH_TABLE1 and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"--table1 shows results that are there and does no trials; leave out {one.opts[0]}"
            )


def _table1(mtbf: float, console: Console, db: str | None, json: str | None) -> int:
    """What was taken in emulation, beside the paper's Table 1."""
    from gockpt.cli import crash_table1_find, crash_table1_show

    found = crash_table1_find.find(db)
    crash_table1_show.show(found, mtbf, console)
    if json is not None:
        output.write_document(crash_table1_show.document(found, mtbf), json)
    return errors.GOOD


def _seconds(text: str) -> float:
    """``600`` or ``600s``, ``10m``, ``2h``.

    Raises:
        ConfigError: no such time.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text.strip())
    value = float(found[1]) * {"m": 60, "h": 3600}.get(found[2], 1) if found else 0.0
    if value <= 0:
        raise ConfigError(f"--mtbf {text}: not a time; give seconds, such as 600s")
    return value
