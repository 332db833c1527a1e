"""The web application: routes, errors and the guard put together.

Handlers run on the server's worker threads; nothing is kept between requests but the static files.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gockpt import __version__
from gockpt.dashboard import api, assets, drawing, pages
from gockpt.dashboard.guard import Guard
from gockpt.dashboard.opening import Problem, problem_of
from gockpt.dashboard.templating import page
from gockpt.errors import GockptError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Json(JSONResponse):
    """JSON in which a number that is none (infinite, NaN) is null."""

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except ValueError:
            return super().render(_finite(content))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


def create_app(
    database: str | Path, *, hosts: Collection[str] = LOOPBACK, token: str | None = None
) -> FastAPI:
    """The dashboard over a results database, which need not exist yet.

    Args:
        hosts: names and addresses that it may be called by; others get 400.
        token: needed for every path, else 401; None: for none.
    """
    path = Path(database)
    app = FastAPI(
        title="gockpt dashboard",
        version=__version__,
        description="Results of `gockpt bench` and `gockpt crash-test`, to be read.",
        docs_url=None,  # they load scripts from elsewhere; /api lists the operations
        redoc_url=None,
        default_response_class=Json,
        responses={code: {"description": text} for code, text in _ERRORS.items()},
    )
    app.add_middleware(Guard, hosts=hosts, token=token, styles=assets.style_hashes())
    for one in (api.router(path), drawing.router(path), assets.router, pages.router(path)):
        app.include_router(one)
    _add_own_pages(app)
    _add_errors(app)
    return app


_ERRORS: dict[int | str, str] = {
    404: "There is no such run, or there are no results.",
    409: "The results are of another version of gockpt.",
    500: "The results are damaged.",
    503: "The results are in use.",
}


def _add_own_pages(app: FastAPI) -> None:
    @app.get("/healthz", tags=["server"])
    def healthz() -> dict[str, str]:
        """The server is there; says nothing of the database."""
        return {"status": "ok", "version": __version__}

    @app.get("/api", include_in_schema=False)
    def api_page() -> Response:
        return page("api", here="/api", document=app.openapi())


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    def of_problem(request: Request, problem: Problem) -> Response:
        return _answer(request, problem)

    @app.exception_handler(GockptError)
    def of_ours(request: Request, error: GockptError) -> Response:
        return _answer(request, problem_of(error))

    @app.exception_handler(RequestValidationError)
    def of_address(request: Request, error: RequestValidationError) -> Response:
        found = [f"{one['loc'][-1]}: {one['msg']}" for one in error.errors()[:5]]
        return _answer(request, Problem(422, "Not a valid address", "; ".join(found) + "."))

    @app.exception_handler(HTTPException)
    def of_http(request: Request, error: HTTPException) -> Response:
        words = {404: "There is no such page.", 405: "This dashboard only shows; it takes GET."}
        message = words.get(error.status_code, str(error.detail))
        return _answer(request, Problem(error.status_code, str(error.detail), message))


def _answer(request: Request, problem: Problem) -> Response:
    """A page for people, JSON for programs."""
    path = request.url.path
    headers = {"Retry-After": "5"} if problem.status == 503 else None
    if path.startswith("/api/") or path in ("/healthz", "/openapi.json"):
        facts = {"title": problem.title, "detail": problem.message, "command": problem.command}
        return Json(facts, status_code=problem.status, headers=headers)
    made = page("problem", here=path, status=problem.status, problem=problem)
    made.headers.update(headers or {})
    return made
