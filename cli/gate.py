"""``gockpt gate``: whether a run is worse than the one before, beyond the noise.

docs/ci.md says how it decides, and what it compares with what.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gockpt.cli import errors, options, output
from gockpt.errors import ConfigError

if TYPE_CHECKING:
    from gockpt.cli.gate_config import Config
    from gockpt.results.verdicts import Finding, Outcome, Report

Database = Annotated[
    str | None,
    typer.Option(
        "--db", metavar="FILE", help="Results database.", show_default="in the user's data"
    ),
]


def gate(
    run: Annotated[
        str, typer.Argument(metavar="[RUN|FILE|latest]", help="What to judge.")
    ] = "latest",
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|FILE|TAG", help="What to compare it with.", show_default="limits only"
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="TOML", help="What to check; see docs/ci.md.")
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(metavar="A,B", help="Which to look at.", show_default="gockpt")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Compare this; may be repeated.",
            show_default="six, see docs/ci.md",
        ),
    ] = None,
    max_regression: Annotated[
        str | None, typer.Option(metavar="SHARE", help="How much worse is too much: 0.05 or 5%.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="'A <= B'", help="A figure that must hold; may be repeated."),
    ] = None,
    absolute: Annotated[
        bool, typer.Option("--absolute", help="Compare seconds, not ratios within a run.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 where the evidence is not enough.")
    ] = False,
    junit: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a JUnit report too.")
    ] = None,
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a comment for a pull request too.")
    ] = None,
    db: Database = None,
    json: options.Json = None,
) -> int:
    """Compare a run with a baseline; fail if it is worse beyond threshold and noise.

    Exit code 0: not worse; 1: worse, or a limit is broken; 3: with --strict, not enough evidence.
    """
    from gockpt.cli import gate_config, gate_output, gate_runs
    from gockpt.results import verdicts

    for option, target in (("--json", json), ("--junit", junit), ("--markdown", markdown)):
        output.check_target(target, option=option)
    console = output.people(stderr=output.STDOUT in (json, junit, markdown))
    settings = gate_config.load(
        config,
        gate_config.Overrides(
            metrics=metric or (),
            max_regression=max_regression,
            limits=limit or (),
            strategies=strategies,
            strict=strict,
            absolute=absolute,
        ),
    )
    now = gate_runs.find_run(run, db)
    before = None if baseline is None else gate_runs.find_baseline(baseline, db)
    report = judge(now, before, settings)
    document = verdicts.document(report)
    console.print(gate_output.table(report))
    for warning in report.warnings:
        console.out(f"note: {warning}", style="yellow", highlight=False)
    console.out(report.summary, highlight=False)
    if (kept := gate_runs.keep(document, now, db)) is not None:
        console.out(kept, highlight=False)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in gate_output.github(report):
            console.out(line, highlight=False)
    if json is not None:
        output.write_document(document, json)
    if junit is not None:
        output.write_text(gate_output.junit(report), junit, option="--junit")
    if markdown is not None:
        output.write_text(gate_output.markdown(report), markdown, option="--markdown")
    return _exit_code(report.verdict, settings)


def _exit_code(verdict: Outcome, settings: Config) -> int:
    if verdict.fails:
        return errors.FAILED
    return errors.UNDECIDED if verdict.open and settings.strict else errors.GOOD


def judge(now: dict[str, Any], before: dict[str, Any] | None, settings: Config) -> Report:
    """Everything that is checked of a run.

    Raises:
        ConfigError: the two do not compare, or nothing at all would be checked.
    """
    from gockpt.cli import gate_decide, gate_limits, gate_rules
    from gockpt.results.verdicts import Report

    warnings = (
        [] if before is None else gate_rules.comparable(now, before, absolute=settings.absolute)
    )
    strategies = _strategies(now, before, settings)
    limits = gate_limits.defaults(now) if settings.limits is None else settings.limits
    findings = [] if before is None else _compared(now, before, settings, strategies)
    findings += gate_limits.check(now, limits, strategies)
    if not findings:
        raise ConfigError("nothing would be checked; give --baseline or --limit")
    return Report(
        run_id=now["run_id"],
        baseline=None if before is None else before["run_id"],
        verdict=gate_decide.verdict(findings),
        findings=findings,
        warnings=warnings,
        absolute=settings.absolute,
        thresholds=settings.metrics,
    )


def _strategies(
    now: dict[str, Any], before: dict[str, Any] | None, settings: Config
) -> tuple[str, ...]:
    """Those that the user named; else ``gockpt``, or all that the baseline has without it.

    Raises:
        ConfigError: one is named that neither run has.
    """
    from gockpt.results import ratios

    if settings.strategies is None:
        return ratios.watched(before or now)
    both = {*ratios.strategies(before or now), *ratios.strategies(now)}
    for name in settings.strategies:
        if name not in both and now["kind"] == "bench":
            known = ", ".join(sorted(both)) or "none"
            raise ConfigError(f"no strategy {name!r} in the run or the baseline; there are {known}")
    return settings.strategies


def _compared(
    now: dict[str, Any],
    before: dict[str, Any],
    settings: Config,
    strategies: tuple[str, ...],
) -> list[Finding]:
    from gockpt.cli import gate_decide
    from gockpt.results import ratios

    if now["kind"] != "bench":
        return []
    chance = gate_decide.chance_of_each(
        settings.confidence, len(strategies) * len(settings.metrics)
    )
    return [
        gate_decide.compare(
            strategy,
            name,
            ratios.series(before, strategy, name, absolute=settings.absolute),
            ratios.series(now, strategy, name, absolute=settings.absolute),
            threshold,
            chance=chance,
        )
        for strategy in strategies
        for name, threshold in settings.metrics.items()
    ]
