"""What stands before every page: allowed hosts, the token, and strict headers on every answer.

A plain ASGI middleware, on the server's event loop. What always holds: nothing behind it is reached
under a foreign ``Host`` (so no other site can make a browser read the results by DNS rebinding) or,
where there is a token, without it; and every answer, errors included, carries the headers.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "gockpt_dashboard"
PARAMETER = "token"

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def policy(styles: Iterable[str]) -> str:
    """The content policy: everything from here, no inline script, these inline style sheets."""
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            f"style-src 'self' {' '.join(styles)}",
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


class Guard:
    """Lets through what may pass, and adds the headers."""

    def __init__(
        self, app: ASGIApp, *, hosts: Collection[str], token: str | None, styles: Iterable[str]
    ) -> None:
        """
        Args:
            hosts: names and addresses (without port) that the server may be called by.
            token: needed for every path; None: for none.
            styles: hashes of inline style sheets that are known.
        """
        self._headers = {"Content-Security-Policy": policy(styles), **HEADERS}
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = token
        self._cookie = None if token is None else hashlib.sha256(token.encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets here
        refused = self._refuse(HTTPConnection(scope))
        await (refused or self._app)(scope, receive, _with_headers(send, self._headers))

    def _refuse(self, request: HTTPConnection) -> Response | None:
        """The answer, if the request may not pass."""
        host = request.headers.get("host", "")
        if hostname(host) not in self._hosts:
            return PlainTextResponse(
                "This dashboard does not answer to that name. Start it with --allow-host NAME if "
                "it should.\n",
                status_code=400,
            )
        if self._token is None or self._knows(request):
            return None
        query = parse_qsl(request.url.query, keep_blank_values=True)
        given = [value for name, value in query if name == PARAMETER]
        if given and _same(given[-1], self._token):
            return self._welcome(request, query)
        return PlainTextResponse(
            "This dashboard needs its token: open the address that was printed when it started.\n",
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _knows(self, request: HTTPConnection) -> bool:
        """Whether the request carries the cookie, or the token as a header."""
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _same(value.strip(), self._token or ""):
            return True
        return _same(_cookie(request.headers.getlist("cookie")), self._cookie or "")

    def _welcome(self, request: HTTPConnection, query: Iterable[tuple[str, str]]) -> Response:
        """To the same page without the token in its address, which a cookie replaces."""
        left = urlencode([pair for pair in query if pair[0] != PARAMETER])
        # Never '//host': that would lead elsewhere.
        path = "/" + request.url.path.lstrip("/")
        answer = RedirectResponse(f"{path}?{left}" if left else path, status_code=303)
        answer.set_cookie(COOKIE, self._cookie or "", httponly=True, samesite="strict")
        return answer


def hostname(header: str) -> str:
    """The name or address in a ``Host`` header, without its port."""
    if header.startswith("["):
        return header[: header.find("]") + 1].lower()
    return header.partition(":")[0].lower()


def _cookie(headers: Iterable[str]) -> str:
    for header in headers:
        try:
            found = SimpleCookie(header).get(COOKIE)
        except CookieError:
            continue
        if found is not None:
            return found.value
    return ""


def _same(one: str, other: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


def _with_headers(send: Send, added: Mapping[str, str]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in added.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return sending
