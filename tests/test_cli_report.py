"""``gockpt report``: one file with everything in it, and nothing that leaves it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from dashboard_kit import fill, gate

from gockpt.cli.main import call
from gockpt.events import Span
from gockpt.results import CheckpointRecord, Store, Trace

BAD = "<script>alert(1)</script>\"'&<img src=x>"


def row(strategy: str, loop: float) -> dict[str, Any]:
    blocked = 0.0 if strategy == "none" else loop - 10
    return {
        "strategy": strategy, "valid": True, "problems": [], "attempts": 1,
        "relative_throughput": 10 / loop,
        "tokens_per_s": {"loop": 100.0, "wall": 90.0}, "step_s": {"median": 1.0, "p95": 1.5},
        "stall": {"blocked_s_per_checkpoint": blocked, "excess_s_per_checkpoint": blocked},
        "loop_s": loop, "drain_s": 0.5, "wall_s": loop + 0.5,
        "checkpoints": {"requested": 2, "committed": 2, "verified": 2, "identical": 2,
                        "in_flight_max": 1},
        "windows": 2, "fallbacks": [], "bytes": {"state": 10, "gradients": 3, "persisted": 12},
        "latency_s": {"consistent": 1.0, "durable": 2.0},
        "memory_bytes": {"trainer_added": 1, "agent_added": 1, "predicted": 2},
        "emulation": {"overruns": 0, "worst_s": 0.0},
        "samples": {"relative_throughput": [10 / loop]},
    }  # fmt: skip


def bench(run_id: str, **more: Any) -> dict[str, Any]:
    return {
        "schema": 1, "kind": "bench", "run_id": run_id, "created": "2026-01-02T03:04:05+00:00",
        "environment": {"git_sha": "abc", "host": "h", "torch": "2.9", "python": "3.11",
                        "device": "emulated:a100-pcie4", "emulated": True,
                        "profile": "a100-pcie4", "shrink": 8},
        "workload": {"model": "gpt-1.3b", "steps": 12, "interval": 4, "seed": 7, "windows": 2,
                     "tokens_per_step": 4096, "precision": "bf16-master"},
        "results": [row("none", 10.0), row("async-o", 11.0), row("gockpt", 10.1),
                    row("none", 10.01)],
        **more,
    }  # fmt: skip


def traces() -> list[Trace]:
    spans = [
        Span(lane="compute", name=name, start=n + at, end=n + at + 0.3, step=n + 1)
        for n in range(12)
        for name, at in (("forward", 0.0), ("backward", 0.3), ("update", 0.6))
    ]
    spans += [
        Span(lane="state", name="state", start=6.95, end=7.5, step=7),
        Span(lane="state", name="state", start=7.95, end=8.5, step=8),
        Span(lane="commit", name="commit", start=9.0, end=9.1, step=8),
    ]
    saved = [
        CheckpointRecord(step=step, strategy="gockpt", windows=2, durable_s=2.0, proof="exact")
        for step in (4, 8)
    ]
    times = [(n, 0.9) for n in range(1, 13)]
    return [
        Trace(result=0, steps=times),
        Trace(result=2, steps=times, spans=spans, checkpoints=saved),
        Trace(result=3, steps=times),
    ]


def crash_test(run_id: str) -> dict[str, Any]:
    def trial(scenario: str, passed: bool | None, **more: Any) -> dict[str, Any]:
        return {
            "scenario": scenario, "point": "commit", "strategy": "gockpt", "passed": passed,
            "injected_at_step": 9, "restored_step": 8, "lost_steps": 1, "lost_s": 0.2,
            "source": "memory", "recovery_s": 1.0, "recovery": {"detect": 0.4, "read": 0.6},
            "detail": "", "command": "gockpt crash-test --scenario x", **more,
        }  # fmt: skip

    return {
        "schema": 1, "kind": "crash-test", "run_id": run_id, "seed": 3, "sabotage": None,
        "created": "2026-01-02T03:04:06+00:00",
        "environment": {"host": "h", "torch": "2.9", "device": "cpu", "emulated": False},
        "workload": {"model": "gpt-nano"},
        "trials": [trial("kill-trainer", True), trial("damage", False, detail=BAD),
                   trial("cuda", None, recovery=None, recovery_s=None), trial(BAD, True)],
        "summary": {"trials": 4, "passed": 2, "failed": 1, "skipped": 1},
    }  # fmt: skip


class Page(HTMLParser):
    """What a browser would do with a file: scripts it runs, addresses it asks, text it shows."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self._data = False
        self.content: dict[str, Any] = {}
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        self._data = tag == "script" and dict(attrs).get("type") == "application/json"
        if tag == "script" and not self._data:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script" and self._data:
            self.content = json.loads(data)
        elif self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    def attributes(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]

    @property
    def policy(self) -> str:
        return next(attrs["content"] or "" for _, attrs in self.tags
                    if attrs.get("http-equiv") == "Content-Security-Policy")  # fmt: skip


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "results.db"
    with Store(path) as store:
        store.add_bench(bench("20260102-030405-aaaa"), traces())
        store.add_crash_test(crash_test("20260102-030406-bbbb"))
    return path


def made(database: Path, out: Path, run: str) -> Page:
    assert call(["report", run, "--db", str(database), "--out", str(out)]) == 0
    return Page(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def of_bench(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return made(database, tmp_path_factory.mktemp("out") / "r.html", "20260102-030405-aaaa")


@pytest.fixture(scope="module")
def of_crash_test(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return made(database, tmp_path_factory.mktemp("out") / "r.html", "latest")


# -- the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["of_bench", "of_crash_test"])
def test_nothing_in_it_asks_a_network(name: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(name)
    assert page.attributes("src") == page.attributes("href") == page.attributes("action") == []
    assert {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "base"} == set()
    assert page.content["config"]["showSendToCloud"] is False
    assert "default-src 'none'" in page.policy


def test_only_the_scripts_that_the_policy_names_would_run(of_bench: Page) -> None:
    hashes = {
        "sha256-" + base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()
        for one in of_bench.scripts
    }
    named = re.search(r"script-src ([^;]*);", of_bench.policy)
    assert named is not None
    assert {one.strip("'") for one in named[1].split()} == hashes
    assert len(hashes) == 2
    assert "Plotly" in of_bench.scripts[0]
    assert "unsafe" not in named[1]
    assert not [name for _, attrs in of_bench.tags for name in attrs if name.startswith("on")]


def test_plotly_is_in_it_once(of_bench: Page) -> None:
    assert sum(len(one) > 1_000_000 for one in of_bench.scripts) == 1


def test_a_bench_has_its_configuration_figures_and_the_way_to_do_it_again(of_bench: Page) -> None:
    titles = [one["layout"]["title"]["text"] for one in of_bench.content["figures"]]
    assert len(titles) == 6
    assert "Stall of a checkpoint" in titles
    assert all(one["data"] for one in of_bench.content["figures"])
    assert all("template" not in one["layout"] for one in of_bench.content["figures"])
    assert set(of_bench.content["templates"]) == {"light", "dark"}
    canvases = [a for tag, a in of_bench.tags if tag == "div" and a.get("class") == "canvas"]
    assert len(canvases) == len(titles)
    assert "--model gpt-1.3b --device emulated:a100-pcie4 --strategies async-o,gockpt" in (
        of_bench.text
    )
    assert "--windows 2" in of_bench.text
    for fact in ("abc", "4096", "bf16-master", "99.01 %"):
        assert fact in of_bench.text


def test_emulated_times_are_called_so_above_and_in_every_figure(of_bench: Page) -> None:
    assert "emulated by a100-pcie4" in of_bench.text
    for one in of_bench.content["figures"]:
        assert "a100-pcie4" in one["layout"]["title"]["subtitle"]["text"]


def test_a_crash_test_has_its_matrix_and_trials(of_crash_test: Page) -> None:
    figures = of_crash_test.content["figures"]
    assert len(figures) == 3
    assert figures[0]["data"][0]["type"] == "heatmap"
    assert "kill-trainer" in of_crash_test.text
    assert "crash-test --strategies gockpt" in of_crash_test.text


def test_names_are_text_and_never_markup(of_crash_test: Page, tmp_path: Path) -> None:
    assert BAD in of_crash_test.text  # the parser has undone the escaping, once
    matrix = of_crash_test.content["figures"][0]["data"][0]
    assert matrix["customdata"][-1] == [[BAD, "gockpt"]]  # for links; ends no script
    path = tmp_path / "results.db"
    document = bench(BAD)
    document["workload"]["model"] = BAD
    document["environment"].update(host=BAD, device=BAD, profile=BAD)
    document["results"][1]["strategy"] = BAD
    document["results"][1]["problems"] = [BAD]
    with Store(path) as store:
        store.add_bench(document)
    page = made(path, tmp_path / "r.html", "latest")
    assert len(page.scripts) == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert BAD in page.text
    shown = json.dumps([one["layout"] for one in page.content["figures"]])
    assert "<img" not in shown
    assert html.escape(BAD, quote=False).split("&amp;")[1] in shown


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("20260102-030405-aaab", "did you mean '20260102-030405-aaaa'?"),
        ("x", "there are 20260102-030406-bbbb, 20260102-030405-aaaa"),
        ("20260102", "more than one run"),
    ],
)
def test_a_run_that_is_not_there(
    run: str, said: str, database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.html"
    assert call(["report", run, "--db", str(database), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("gockpt: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_gate_is_no_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fill(tmp_path / "results.db")
    with Store(path) as store:
        name = store.add_gate(gate(), store.document("b1"))
    out = tmp_path / "r.html"
    assert call(["report", name, "--db", str(path), "--out", str(out)]) == 2
    assert f"{name} is a gate, and a report is about a run: name b1" in capsys.readouterr().err
    assert not out.exists()
    assert call(["report", "--db", str(path), "--out", str(out)]) == 0
    assert "crash-test c1" in capsys.readouterr().out


def test_no_database_is_made_by_looking_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none.db"
    assert call(["report", "--db", str(missing), "--out", str(tmp_path / "r.html")]) == 2
    assert "gockpt bench" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_replaced_on_demand_only(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.html"
    out.write_text("mine")
    line = ["report", "latest", "--db", str(database), "--out", str(out)]
    assert call(line) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert call([*line, "--force"]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert "20260102-030406-bbbb" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out]


def test_a_failure_leaves_what_was_there(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.html"
    out.write_text("mine")
    line = ["report", "nothing", "--force", "--db", str(database), "--out", str(out)]
    assert call(line) == 2
    assert out.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("out", "said"), [("there", "directory"), ("no/r.html", "make it first")])
def test_a_place_that_cannot_be(
    out: str, said: str, database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    line = ["report", "--force", "--db", str(database), "--out", str(tmp_path / out)]
    assert call(line) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "there").is_dir()
