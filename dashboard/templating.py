"""Pages from templates. What always holds: whatever comes from the database is escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gockpt import __version__, units
from gockpt.dashboard import assets, metrics
from gockpt.results import noise
from gockpt.results.verdicts import COLUMNS

PAGES = (
    ("/", "Overview"),
    ("/runs", "Runs"),
    ("/timeline", "Timeline"),
    ("/steps", "Steps"),
    ("/recovery", "Recovery"),
    ("/compare", "Compare"),
    ("/trends", "Trends"),
    ("/live", "Live"),
    ("/plan", "Plan"),
    ("/api", "API"),
)
"""The navigation."""


def address(path: str, **query: Any) -> str:
    """A path with its query; what is None is left out, lists are repeated."""
    given = {name: value for name, value in query.items() if value not in (None, "", [])}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def moment(created: str) -> str:
    """``2026-01-31 17:05`` of an ISO time; as it is if it is none."""
    try:
        return datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return created


def signed(share: float | None) -> str:
    """``+1.2 %``."""
    return "" if share is None else f"{share * 100:+.1f} %".replace("-", "−")


def rows_of(value: Any, head: str = "") -> list[tuple[str, Any]]:
    """A document as lines of name and value."""
    found: list[tuple[str, Any]] = []
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if isinstance(inner, Mapping):
            found += rows_of(inner, f"{head}{name} ")
        elif isinstance(inner, Sequence) and not isinstance(inner, str):
            found.append((f"{head}{name}", ", ".join(str(one) for one in inner) or "–"))
        else:
            found.append((f"{head}{name}", "–" if inner is None else inner))
    return found


def _log10(value: float) -> float:
    """Where a slider of equal ratios stands."""
    return round(math.log10(value), 4)


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        seconds=units.seconds, size=units.size, count=units.count, percent=units.percent,
        written=metrics.written, moment=moment, signed=signed, rows_of=rows_of,
        log10=_log10,
    )  # fmt: skip
    made.globals.update(
        address=address, asset=assets.address, pages=PAGES, version=__version__,
        metrics=metrics.METRICS, check_columns=COLUMNS, least_decided=noise.least,
    )  # fmt: skip
    return made


_TEMPLATES = _environment()


def page(name: str, *, here: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A page.

    Args:
        name: of the template, without its ending.
        here: the address of the page in the navigation.
    """
    return HTMLResponse(text(name, here=here, **values), status_code=status)


def text(name: str, **values: Any) -> str:
    """What a template makes of these values."""
    return _TEMPLATES.get_template(f"{name}.html").render(**values)
