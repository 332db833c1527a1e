"""What the gate asks of a run: the TOML file of ``--config``, and the options that override it.

What always holds: a key, metric or limit that is not known is refused with the nearest name, so
that a slip of the pen never turns a check off.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gockpt.cli import gate_limits
from gockpt.cli.gate_limits import Limit
from gockpt.errors import ConfigError, suggestion
from gockpt.results.ratios import DEFAULT, METRICS, metric_of
from gockpt.results.verdicts import Threshold

CONFIDENCE = 0.95

KEYS = ("strategies", "metrics", "limits", "strict", "absolute", "confidence")
OF_METRIC = ("max_regression", "floor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What to check."""

    metrics: Mapping[str, Threshold]
    """By name, in the order of the table."""
    limits: tuple[Limit, ...] | None = None
    """None: those of every run."""
    strategies: tuple[str, ...] | None = None
    """None: ``gockpt``, or all where the baseline has none."""
    strict: bool = False
    """Not enough evidence is a result of its own, 3."""
    absolute: bool = False
    """Seconds, and not ratios within a run."""
    confidence: float = CONFIDENCE
    """That a gate of nothing but noise passes, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Options of the command line; what was not given is None, empty or False."""

    metrics: Sequence[str] = ()
    max_regression: str | None = None
    limits: Sequence[str] = ()
    strategies: str | None = None
    strict: bool = False
    absolute: bool = False


def load(path: str | None, options: Overrides = Overrides()) -> Config:
    """The configuration: defaults, over them the file, over it the options.

    Raises:
        ConfigError: the file cannot be read, or asks for what there is not.
    """
    config = Config(metrics={name: threshold(name) for name in DEFAULT})
    if path is not None:
        config = _from_file(config, _read(Path(path)), path)
    return _override(config, options)


def threshold(name: str, **changes: float) -> Threshold:
    """The threshold of a metric, by default or changed.

    Raises:
        ConfigError: no such metric, or a value that is no share.
    """
    metric = metric_of(name)
    if metric is None:
        raise ConfigError(f"no metric {name!r}; {_nearest(name, METRICS)}")
    for key, value in changes.items():
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{key} of {name} is {value}; give a share such as 0.05")
    # A ratio between two strategies is no share of a step: the floor of one would hide it.
    floor = metric.floor if name in METRICS else 0.0
    chosen = {"max_regression": metric.max_regression, "floor": floor, **changes}
    return Threshold(sign=metric.sign, **chosen)


def _override(config: Config, options: Overrides) -> Config:
    if options.metrics:
        metrics = {one: config.metrics.get(one) or threshold(one) for one in options.metrics}
        config = replace(config, metrics=metrics)
    if options.max_regression is not None:
        share = _share(options.max_regression)
        metrics = {name: replace(one, max_regression=share) for name, one in config.metrics.items()}
        config = replace(config, metrics=metrics)
    if options.limits:
        config = replace(config, limits=tuple(map(gate_limits.parse, options.limits)))
    if options.strategies is not None:
        names = tuple(one.strip() for one in options.strategies.split(",") if one.strip())
        if not names:
            raise ConfigError("--strategies names none; leave it out for gockpt")
        config = replace(config, strategies=names)
    return replace(
        config,
        strict=config.strict or options.strict,
        absolute=config.absolute or options.absolute,
    )


def _share(text: str) -> float:
    """``0.05`` or ``5%``.

    Raises:
        ConfigError: neither.
    """
    number, percent = text.removesuffix("%").strip(), text.endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"--max-regression {text}: not a share; give 0.05 or 5%")
    return value


# -- the file --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the file, with its place for what is said of it."""

    place: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def only(self, known: Iterable[str]) -> None:
        names = list(known)
        for name in self.values:
            if name not in names:
                raise ConfigError(f"{self.place}: no key {name!r}; {_nearest(name, names)}")

    def get(self, name: str, kind: type[Any] | tuple[type[Any], ...], what: str) -> Any:
        """A value, or None where there is none."""
        value = self.values.get(name)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if value is not None and wrong:
            raise ConfigError(f"{self.place}: {name} = {value!r}; give {what}")
        return value


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML ({error}); mend it") from error


def _from_file(config: Config, values: dict[str, Any], path: str) -> Config:
    table = _Table(f"--config {path}", values)
    table.only(KEYS)
    metrics = table.get("metrics", dict, "a table for each metric")
    confidence = table.get("confidence", (int, float), "a number between 0.5 and 1")
    if confidence is not None and not 0.5 <= confidence < 1:
        raise ConfigError(f"{table.place}: confidence = {confidence}; give 0.95 or the like")
    return Config(
        metrics=config.metrics if metrics is None else _metrics(metrics, path),
        limits=_limits(table),
        strategies=_words(table, "strategies"),
        strict=bool(table.get("strict", bool, "true or false")),
        absolute=bool(table.get("absolute", bool, "true or false")),
        confidence=config.confidence if confidence is None else confidence,
    )


def _metrics(metrics: Mapping[str, Any], path: str) -> dict[str, Threshold]:
    found = {}
    for name, values in metrics.items():
        if not isinstance(values, dict):
            raise ConfigError(f"--config {path}: metrics.{name} is no table; see docs/ci.md")
        table = _Table(f"--config {path}, metrics.{name}", values)
        table.only(OF_METRIC)
        given = {key: table.get(key, (int, float), "a share such as 0.05") for key in values}
        found[name] = threshold(name, **given)
    return found


def _limits(table: _Table) -> tuple[Limit, ...] | None:
    words = _words(table, "limits")
    return None if words is None else tuple(map(gate_limits.parse, words))


def _words(table: _Table, name: str) -> tuple[str, ...] | None:
    value = table.get(name, list, "a list of texts")
    if value is None:
        return None
    if not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{table.place}: {name} = {value!r}; give a list of texts")
    return tuple(value)


def _nearest(name: str, known: Iterable[str]) -> str:
    return suggestion(name, known, otherwise="there are")
