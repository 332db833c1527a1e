"""``gockpt dashboard``: where it listens, whom it lets in, how it ends; runs that are followed."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from dashboard_kit import fill

from gockpt.cli import dashboard
from gockpt.cli.follow import Follower
from gockpt.cli.main import call
from gockpt.errors import ConfigError, StorageError
from gockpt.results import Store


@contextmanager
def running(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, and the address that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gockpt", "dashboard", "--port", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield process, found[0]
    finally:
        process.kill()
        process.communicate(timeout=200)


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    with running("--db", str(fill(tmp_path / "results.db"))) as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)  # no token for this machine alone
        with urllib.request.urlopen(url, timeout=200) as answer:
            assert answer.status == 200
            assert "server" not in answer.headers
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_beyond_this_machine_it_needs_a_token(tmp_path: Path) -> None:
    database = fill(tmp_path / "results.db")
    with running("--db", str(database), "--host", "0.0.0.0") as (process, url):
        found = re.fullmatch(r"http://([^/:]+):(\d+)/\?token=([\w-]{43})", url)
        assert found is not None
        here = f"http://127.0.0.1:{found[2]}/"
        with pytest.raises(urllib.error.HTTPError) as info:
            urllib.request.urlopen(f"{here}healthz", timeout=200)
        with info.value as refused:
            assert refused.code == 401
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"{here}?token={found[3]}", timeout=200) as answer:
            assert answer.status == 200
            assert "token" not in answer.url
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143


def test_a_token_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abcdefghijklmnopqrstuvwxyz\n")
    assert dashboard._token(str(file)) == "abcdefghijklmnopqrstuvwxyz"
    for bad in ("short", "", "a" * 16 + "\n" + "b", "ä" * 20):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="no token"):
            dashboard._token(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        dashboard._token(str(tmp_path / "nothing"))


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert call(["dashboard", "--db", str(tmp_path / "r.db"), "--port", str(port)]) == 2
    assert re.fullmatch(
        rf"gockpt: .*port {port} .*give another --port.*\n", capsys.readouterr().err
    )
    assert call(["dashboard", "--db", str(tmp_path / "r.db"), "--port", "70000"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True),
     ("0.0.0.0", False), ("::", False), ("192.168.1.7", False), ("example.org", False)],
)  # fmt: skip
def test_only_this_machine_is_this_machine(host: str, local: bool) -> None:
    assert dashboard._is_loopback(host) is local


def test_it_answers_to_the_names_of_its_host() -> None:
    assert dashboard._names("127.0.0.1", True, []) == {"localhost", "127.0.0.1", "[::1]"}
    names = dashboard._names("0.0.0.0", False, ["box.example"])
    assert {"box.example", socket.gethostname(), "127.0.0.1"} <= names


def test_the_address_that_it_prints_is_one_that_a_browser_can_open() -> None:
    assert dashboard._url("127.0.0.1", [], 80, None) == "http://127.0.0.1:80/"
    assert dashboard._url("::1", ["a.example"], 80, None) == "http://[::1]:80/"
    assert dashboard._url("0.0.0.0", [], 80, "t") == f"http://{socket.gethostname()}:80/?token=t"
    # In a container, the host of which is called otherwise.
    assert dashboard._url("0.0.0.0", ["localhost", "b"], 80, "t") == "http://localhost:80/?token=t"


# -- runs that are followed ------------------------------------------------------------------------


def test_a_run_is_there_while_it_is_made_and_then_gone(tmp_path: Path) -> None:
    with Store(tmp_path / "results.db") as store:
        with Follower(store, {"of": "bench", "workload": {"model": "m"}}) as follower:
            follower.show({"progress": {"step": 1}})  # too soon after the first writing
            assert "progress" not in store.live()[0].config
            follower.show({"results": [1]}, now=True)
            assert store.live()[0].config["progress"] == {"step": 1}
            assert store.live()[0].model == "m"
        assert store.live() == []
        with pytest.raises(KeyError), Follower(store, {}):
            raise KeyError
        assert store.live() == []


def test_what_a_killed_run_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "results.db") as store:
        Follower(store, {}).show({}, now=True)  # never ended
        with Follower(store, {}):
            assert len(store.live()) == 2  # it may still run
        monkeypatch.setattr("gockpt.cli.follow.FORGOTTEN", -timedelta(days=1))
        with Follower(store, {}):
            assert len(store.live()) == 1


def test_a_database_that_cannot_be_written_does_not_harm_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("no room")

    with Store(tmp_path / "results.db") as store:
        monkeypatch.setattr(store, "show_live", fail)
        with Follower(store, {}) as follower:
            follower.show({"progress": {}}, now=True)
