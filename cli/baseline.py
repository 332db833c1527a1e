"""``gockpt baseline``: named runs that later ones are compared with.

Kept in the results database, or exported to a file that is committed beside the code.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from gockpt.cli import options, output
from gockpt.cli.gate import Database
from gockpt.errors import ConfigError

app = typer.Typer(help="Keep named runs that `gate` compares with.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the baseline.")]


@app.command("set")
def set_(
    name: Name,
    run: Annotated[
        str, typer.Argument(metavar="[RUN|FILE|latest]", help="What to keep.")
    ] = "latest",
    db: Database = None,
) -> None:
    """Keep a run under a name, in place of an earlier one."""
    from gockpt.cli import gate_runs
    from gockpt.cli.database import database_path
    from gockpt.results import Store

    _check_name(name)
    document = gate_runs.find_run(run, db)
    with Store(database_path(db)) as store:
        store.keep_baseline(name, document)
        said = f"Baseline {name} is run {document['run_id']}, in {store.path}."
        output.people().out(said, highlight=False)


@app.command("list")
def list_(db: Database = None, json: options.Json = None) -> None:
    """List the baselines."""
    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    rows = _rows(db)
    if json is not None:
        output.write_document({"schema": 1, "kind": "baselines", "baselines": rows}, json)
    if not rows:
        console.print("There are no baselines; keep one with `gockpt baseline set NAME`.")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("name", "set (UTC)", "run", "kind", "model", "device", "rounds"):
        table.add_column(head, justify="right" if head == "rounds" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("–" if value is None else str(value)) for value in row.values()))
    console.print(table)


@app.command()
def show(name: Name, db: Database = None, json: options.Json = None) -> None:
    """Show a baseline's figures, as `gate` will see them."""
    from gockpt.cli import gate_config, gate_runs
    from gockpt.results import ratios

    output.check_target(json)
    console = output.people(stderr=json == output.STDOUT)
    with gate_runs.open_existing(db) as store:
        found = store.baseline(name).document
    document = gate_runs.checked(found, f"baseline {name}")
    if json is not None:
        output.write_document(document, json)
    table = Table(
        title=Text(f"{name}: run {document['run_id']}"),
        caption="Throughput as a share of that of none, all else in steps of none.",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("strategy")
    metrics = list(gate_config.load(None).metrics)
    for head in metrics:
        table.add_column(head, justify="right")
    for strategy in ratios.strategies(document):
        values = [ratios.series(document, strategy, one).median for one in metrics]
        table.add_row(
            Text(strategy), *("–" if value is None else f"{value:.4g}" for value in values)
        )
    console.print(table)


@app.command()
def export(
    name: Name,
    file: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="Where to (-: to stdout).")
    ] = output.STDOUT,
    db: Database = None,
) -> None:
    """Write a baseline as a file, to be committed: `gate --baseline FILE` takes it."""
    from gockpt.cli import gate_runs

    output.check_target(file, option="FILE")
    with gate_runs.open_existing(db) as store:
        document = store.baseline(name).document
    output.write_document(document, file)


def _rows(db: str | None) -> list[dict[str, Any]]:
    from gockpt.cli import gate_runs

    with gate_runs.open_existing(db) as store:
        return [
            {
                "name": one.name,
                "created": one.created[:19].replace("T", " "),
                "run_id": one.run_id,
                "kind": one.document.get("kind"),
                "model": (one.document.get("workload") or {}).get("model"),
                "device": (one.document.get("environment") or {}).get("device"),
                "rounds": _rounds(one.document),
            }
            for one in store.baselines()
        ]


def _rounds(document: dict[str, Any]) -> int | None:
    """How often each strategy was measured."""
    rows = document.get("results") or ()
    samples = [len(row.get("samples", {}).get("relative_throughput", ())) for row in rows]
    return max(samples, default=None)


def _check_name(name: str) -> None:
    """
    Raises:
        ConfigError: `gate` would take it for something else.
    """
    if not name.strip() or "/" in name or name.endswith(".json") or name == "latest":
        raise ConfigError(f"baseline {name!r}: not a name for one; take a word such as main")
