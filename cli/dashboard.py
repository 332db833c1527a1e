"""``gockpt dashboard``: the results in a browser.

Runs the server on the main thread until it is told to stop. What always holds: without ``--host``
it answers to this machine only; beyond it, only to who has the token.
"""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from gockpt.cli import errors, output
from gockpt.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

SHORTEST_TOKEN = 16
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def dashboard(
    db: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Results database.", show_default="in the user's data"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8787,
    token_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Read the token from here.", show_default="a new one"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that it may be called by; may be repeated."),
    ] = None,
    open: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> int:
    """Show results in a browser: costs, timelines, recovery, trends. Changes nothing."""
    from gockpt.cli.database import database_path
    from gockpt.dashboard.app import create_app

    path = database_path(db)
    local = _is_loopback(host)
    token = _token(token_file) if token_file is not None or not local else None
    with _listen(host, port) as listening:
        app = create_app(path, hosts=_names(host, local, allow_host or []), token=token)
        url = _url(host, allow_host or [], listening.getsockname()[1], token)
        console = output.people()
        console.print(f"Results of {path}", soft_wrap=True, markup=False)
        console.print(f"The dashboard is at {url} (Ctrl-C ends it).", soft_wrap=True, markup=False)
        _serve(_server(app), listening, url if open else None)
    return errors.GOOD


def _server(app: object) -> uvicorn.Server:
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=100,
            timeout_graceful_shutdown=1,
        )
    )


def _serve(server: uvicorn.Server, listening: socket.socket, show: str | None) -> None:
    """Until Ctrl-C or SIGTERM; the socket listens already, so a browser may come at once."""
    if show is not None:
        threading.Thread(target=webbrowser.open, args=[show], daemon=True).start()
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        return  # the way to end it


def _listen(host: str, port: int) -> socket.socket:
    """
    Raises:
        ConfigError: not to be had, and why.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, not {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}); give another --port or --host"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _token(file: str | None) -> str:
    """
    Raises:
        ConfigError: the file cannot be read, or holds no good token.
    """
    if file is None:
        return secrets.token_urlsafe(32)
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file}: cannot be read ({error}); name another") from error
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"--token-file {file}: no token; put at least {SHORTEST_TOKEN} letters or digits in it"
        )
    return token


def _names(host: str, local: bool, more: list[str]) -> set[str]:
    """What browsers may call this server."""
    own = f"[{host}]" if ":" in host else host
    names = {*LOOPBACK_NAMES, own, *more}
    if not local:
        names |= {socket.gethostname(), socket.getfqdn()}
        for addresses in psutil.net_if_addrs().values():
            for one in addresses:
                if one.family == socket.AF_INET:
                    names.add(one.address)
                elif one.family == socket.AF_INET6:
                    names.add(f"[{one.address.partition('%')[0]}]")
    return names


def _url(host: str, names: list[str], port: int, token: str | None) -> str:
    """Where a browser finds it: if it listens everywhere, by its first name or the machine's."""
    everywhere = host in ("0.0.0.0", "::")
    shown = next(iter(names), socket.gethostname()) if everywhere else host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
