"""The ``gockpt`` command: its sub-commands, and what its exit codes mean.

What always holds: one line on stderr for everything that is wrong; exit code 0 good, 1 a check
failed, 2 wrong use, 130 interrupted. Commands import what they need when they are called, so that
``gockpt --help`` is quick.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import typer

from gockpt.cli import baseline, errors
from gockpt.cli.agents import agents
from gockpt.cli.bench import bench
from gockpt.cli.crash import crash_test
from gockpt.cli.dashboard import dashboard
from gockpt.cli.devices import devices
from gockpt.cli.doctor import doctor
from gockpt.cli.export import export
from gockpt.cli.gate import gate
from gockpt.cli.inspect import inspect
from gockpt.cli.listing import ls, verify
from gockpt.cli.models import models
from gockpt.cli.pins import pin, unpin
from gockpt.cli.plan import plan
from gockpt.cli.report import report
from gockpt.cli.train import train
from gockpt.errors import GockptError

MEASURE = "Measure"
TRAIN = "Train"
LOOK = "Look at checkpoints"
KNOW = "What there is"

app = typer.Typer(
    name="gockpt",
    help="Checkpoints of PyTorch training that do not stop it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

for panel, commands in {
    MEASURE: (bench, gate, crash_test, dashboard, report, plan, doctor),
    TRAIN: (train, agents),
    LOOK: (ls, inspect, verify, export, pin, unpin),
    KNOW: (models, devices),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(baseline.app, name="baseline", rich_help_panel=MEASURE)

# Typer has its own copy of click in some versions and uses the real one in others.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from gockpt import __version__

        typer.echo(f"gockpt {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def call(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own if None) and return its exit code."""
    try:
        code = app(arguments, prog_name="gockpt", standalone_mode=False)
    except GockptError as error:
        errors.complain(error)
        return errors.exit_code(error)
    except _USAGE_ERROR as error:
        errors.complain(_usage(error))
        return errors.WRONG_USE
    except (KeyboardInterrupt, typer.Abort):
        errors.complain("interrupted")
        return errors.INTERRUPTED
    except BrokenPipeError:
        return errors.FAILED  # whoever read the output (a pager, head) has seen enough
    if code == errors.INTERRUPTED:  # some versions of Typer make an exit code of Ctrl-C
        errors.complain("interrupted")
    return code if isinstance(code, int) else errors.GOOD


def run() -> None:
    """The entry point of the ``gockpt`` program."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(call())


def _usage(error: Exception) -> str:
    """Click's complaint, with the way to the help."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "gockpt"
    return f"{message.rstrip('.')}; see `{path} --help`"


def _terminated(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the program as any exception does: what was begun is cleaned up."""
    raise SystemExit(errors.TERMINATED)
