"""The files that pages load: our own, and Plotly's script from its package.

Read once when the server starts. What always holds: a name is looked up among these, never in the
file system, and an address with the right version may be kept by the browser for ever.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fastapi import APIRouter, Request, Response

from gockpt.dashboard.opening import Problem

HERE = Path(__file__).parent / "static"
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
         ".svg": "image/svg+xml"}  # fmt: skip
PLOTLY = "plotly.min.js"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file."""

    body: bytes
    media_type: str
    version: str


@functools.cache
def assets() -> dict[str, Asset]:
    """All of them, by name."""
    bodies = {path.name: path.read_bytes() for path in sorted(HERE.iterdir()) if path.is_file()}
    plotly = resources.files("plotly") / "package_data" / PLOTLY
    bodies[PLOTLY] = plotly.read_bytes()
    return {
        name: Asset(
            body=body,
            media_type=TYPES[Path(name).suffix],
            version=hashlib.sha256(body).hexdigest()[:12],
        )
        for name, body in bodies.items()
        if Path(name).suffix in TYPES
    }


_STYLE = re.compile(
    r"""createElement\("style"\);(\w+)\.id="[0-9a-f]+",\1\.textContent='([^'\\]*)'"""
)
"""A style sheet that a part of Plotly puts into the page when its script is loaded."""


@functools.cache
def style_hashes() -> tuple[str, ...]:
    """Of the style sheets that Plotly's script makes, as a content policy names them.

    One is empty, and filled by the script afterwards.
    """
    sheets = ["", *(found[1] for found in _STYLE.findall(assets()[PLOTLY].body.decode()))]
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in sheets]
    return tuple(f"'sha256-{one}'" for one in hashes)


def address(name: str) -> str:
    """Where a page finds it."""
    return f"/static/{name}?v={assets()[name].version}"


@functools.cache
def _zipped(name: str) -> bytes:
    return gzip.compress(assets()[name].body, 6, mtime=0)


router = APIRouter(include_in_schema=False)


@router.get("/static/{name}")
def static(name: str, request: Request, v: str = "") -> Response:
    """One file, compressed where the browser takes that."""
    found = assets().get(name)
    if found is None:
        raise Problem(404, "Not there", f"There is no file {name}.")
    zipped = "gzip" in request.headers.get("accept-encoding", "")
    headers = {"Vary": "Accept-Encoding"}
    if v == found.version:
        headers["Cache-Control"] = "private, max-age=31536000, immutable"
    if zipped:
        headers["Content-Encoding"] = "gzip"
    return Response(
        _zipped(name) if zipped else found.body, media_type=found.media_type, headers=headers
    )
