"""The dashboard's server: what it answers, whom it answers, and what it says when it cannot."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from dashboard_kit import bench, fill, gate, hostile
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings

from gockpt.dashboard import templating
from gockpt.dashboard.app import create_app
from gockpt.dashboard.assets import assets
from gockpt.dashboard.guard import COOKIE, hostname
from gockpt.results import Store

PAGES = ["/", "/runs", "/run", "/run?run=b1", "/run?run=c1", "/timeline", "/steps", "/recovery",
         "/compare", "/trends", "/live", "/plan", "/api"]  # fmt: skip
FIGURES = ["stall", "throughput", "costs", "timeline", "steps", "matrix", "recovery", "goodput",
           "compare", "trend", "plan"]  # fmt: skip
TOKEN = "a-token-of-more-than-16-letters"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("dashboard") / "results.db")


def client(database: Path, **options: Any) -> TestClient:
    return TestClient(
        create_app(database, **options), base_url="http://localhost", follow_redirects=False
    )


@pytest.fixture(scope="module")
def web(database: Path) -> Iterator[TestClient]:
    with client(database) as made:
        yield made


# -- pages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES)
def test_pages_are_there_and_strict(web: TestClient, path: str) -> None:
    answer = web.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert_clean(answer.text)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = _Tags()
    parser.feed(text)
    return parser.found


def assert_clean(text: str) -> None:
    """No inline script or style, nothing from elsewhere, every field has a name."""
    for tag, attributes in tags(text):
        assert tag not in ("style", "iframe", "object", "base"), tag
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        if tag == "script":
            assert (attributes.get("src") or "").startswith("/static/")
        for name in ("href", "src", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("/", "#")), value
            assert value is None or not value.startswith("//"), value


def test_everything_emulated_bears_its_profile(web: TestClient) -> None:
    for path in ("/", "/runs", "/run?run=b1", "/timeline?run=b1", "/steps?run=b1", "/compare",
                 "/trends"):  # fmt: skip
        assert "emulated by a100-pcie4" in web.get(path).text, path
    assert "emulated by" not in web.get("/run?run=b0").text.partition("<footer>")[0]
    for name in ("stall", "throughput", "costs", "timeline", "steps"):
        assert "emulated by a100-pcie4" in web.get(f"/api/figures/{name}?run=b1").text, name
        assert "emulated by" not in web.get(f"/api/figures/{name}?run=b0").text, name


def test_the_newest_gate_is_on_the_overview_and_has_its_page(tmp_path: Path) -> None:
    database = fill(tmp_path / "results.db")
    with client(database) as web:
        assert "No gate yet" in web.get("/").text
        with Store(database) as store:
            store.add_gate(gate("good"), bench("b1"))
            name = store.add_gate(gate(baseline="gone"), bench("b1"))
        overview, listed = web.get("/").text, web.get("/runs?kind=gate").text
        shown = web.get(f"/run?run={name}").text
        for text in (overview, shown):
            assert "worse than the baseline, beyond threshold and noise" in text
            assert '<a href="/run?run=b1">b1</a>' in text
            assert "gone (not in these results)" in text
            assert "3 checks: 2 good, 1 worse." in text
            assert "+20.0% ± 2.0%" in text
            assert "emulated by a100-pcie4" in text
            assert_clean(text)
        assert "identical == verified" not in overview  # only what failed
        assert "identical == verified" in shown
        assert "torch is 2.13.0, and was 2.12.0" in shown
        assert listed.count("worse: run b1") == listed.count("good: run b1") == 1
        assert web.get(f"/api/run?run={name}").json() == gate(baseline="gone")
        assert web.get("/run").text == web.get("/run?run=c1").text


def test_a_trend_has_the_limit_of_the_gate(web: TestClient) -> None:
    figure = web.get("/api/figures/trend?device=cpu").json()
    base, limit = (one["y0"] for one in figure["layout"]["shapes"])
    assert limit == pytest.approx(0.97 * base)
    words = [one["text"] for one in figure["layout"]["annotations"]]
    assert {"baseline main", "gate's limit by main"} <= set(words)
    page = web.get("/trends?device=cpu").text
    assert "The gate's limit is" in page
    assert "does not look at this figure" in web.get("/trends?device=cpu&metric=memory").text
    assert "gockpt baseline set main" in web.get("/trends").text  # b1's device has none


def test_a_page_that_is_not_there_offers_those_that_are(web: TestClient) -> None:
    answer = web.get("/runs/b1")
    assert answer.status_code == 404
    offered = {values.get("href") for tag, values in tags(answer.text) if tag == "a"}
    assert {path for path, _ in templating.PAGES} <= offered


def test_a_page_says_what_is_asked_for_is_not_there(web: TestClient) -> None:
    for path, status, words in (
        ("/run?run=nope", 404, "no run"),
        ("/timeline?run=c1", 404, "about a bench"),
        ("/trends?metric=nope", 404, "choose one of"),
        ("/plan?model=nope", 404, "no model"),
        ("/plan?interval=0", 422, "interval"),
        ("/runs?offset=-1", 422, "offset"),
        ("/nope", 404, "no such page"),
        ("/static/..%2fapp.py", 404, ""),
    ):
        answer = web.get(path)
        assert answer.status_code == status, path
        assert words in answer.text, path
        assert_clean(answer.text)


def test_it_only_shows(web: TestClient) -> None:
    for method in ("post", "put", "delete", "patch"):
        assert getattr(web, method)("/api/runs").status_code == 405


def test_files_are_kept_by_the_browser_and_come_from_the_package(web: TestClient) -> None:
    page = web.get("/run?run=b1").text
    found = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
    assert len(found) >= 6
    for address in found:
        answer = web.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert web.get("/static/style.css?v=old").headers["cache-control"] == "no-store"
    assert set(assets()) >= {"plotly.min.js", "style.css", "theme.js", "figures.js"}


# -- the API ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_json_in_both_themes(web: TestClient, name: str) -> None:
    for theme in ("light", "dark"):
        answer = web.get(f"/api/figures/{name}?theme={theme}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["data"]
    assert web.get(f"/api/figures/{name}?theme=pink").status_code == 422


def test_the_api_gives_the_rows(web: TestClient) -> None:
    assert [one["run_id"] for one in web.get("/api/runs").json()] == ["c1", "b1", "b0"]
    assert web.get("/api/runs?kind=bench&limit=1").json()[0]["profile"] == "a100-pcie4"
    assert web.get("/api/run?run=b1").json() == bench()
    assert len(web.get("/api/steps?run=b1&strategy=gockpt").json()) == 37
    spans = web.get("/api/spans?run=b1&strategy=gockpt&step=12").json()
    assert min(one["start"] for one in spans) == 0
    saved = web.get("/api/checkpoints?run=b1").json()
    assert [(one["strategy"], one["step"]) for one in saved][-1] == ("gockpt", 36)
    compared = web.get("/api/compare?run=b0&run=b1").json()
    verdicts = {
        one["metric"]: one["runs"][1]["verdict"] for one in compared if one["strategy"] == "async-o"
    }
    assert verdicts["throughput"] == "better"
    assert [one["value"] for one in web.get("/api/trend?metric=blocked").json()] == [0.03, 0.01]
    assert web.get("/api/baselines").json()[0]["run_id"] == "b0"
    assert web.get("/api/plan").json()["predictions"][3]["windows"] == 5
    assert web.get("/api/live").json()["newest"] == "c1"


def test_tables_come_as_csv(web: TestClient) -> None:
    answer = web.get("/api/tables/steps.csv?run=b1")
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    assert len(list(csv.reader(io.StringIO(answer.text)))) == 1 + 4 * 37
    assert web.get("/api/tables/nope.csv").status_code == 422
    assert web.get("/api/tables/steps.csv?run=nope").status_code == 404


def test_the_page_of_the_api_lists_every_operation(web: TestClient) -> None:
    page = web.get("/api").text
    for path in web.get("/openapi.json").json()["paths"]:
        assert path in page


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    made = bench("nan")
    made["results"][1]["loop_s"] = float("nan")
    made["results"][1]["stall"]["blocked_s_per_checkpoint"] = float("inf")
    with Store(tmp_path / "results.db") as store:
        store.add_bench(made)
    with client(tmp_path / "results.db") as web:
        assert web.get("/api/run").json()["results"][1]["loop_s"] is None
        for path in ("/", "/run", "/api/figures/stall", "/api/trend?metric=blocked"):
            assert web.get(path).status_code == 200, path


# -- who is answered -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "name"),
    [("localhost:8787", "localhost"), ("LocalHost", "localhost"), ("[::1]:80", "[::1]"),
     ("[::1", ""), ("", ""), ("a.b.c:1", "a.b.c")],
)  # fmt: skip
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert hostname(header) == name


def test_a_foreign_name_gets_nothing(web: TestClient) -> None:
    for host in ("evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example:8787"):
        answer = web.get("/healthz", headers={"Host": host})
        assert answer.status_code == 400, host
        assert "content-security-policy" in answer.headers
        assert "ok" not in answer.text
    for host in ("localhost", "127.0.0.1:8787", "[::1]:8787"):
        assert web.get("/healthz", headers={"Host": host}).status_code == 200


def test_without_its_token_everything_is_refused(database: Path) -> None:
    with client(database, token=TOKEN) as web:
        for path in (*PAGES, "/healthz", "/openapi.json", "/static/style.css", "/nope",
                     "/api/tables/runs.csv", "/?token=wrong", f"/?token={TOKEN}x",
                     "/?token="):  # fmt: skip
            answer = web.get(path)
            assert answer.status_code == 401, path
            assert "gpt" not in answer.text
            assert "content-security-policy" in answer.headers
        assert web.get("/", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert web.get("/", headers={"Cookie": f"{COOKIE}={TOKEN}"}).status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(database: Path) -> None:
    with client(database, token=TOKEN) as web:
        answer = web.get(f"/run?run=b1&token={TOKEN}")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/run?run=b1"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        assert web.get("/run?run=b1").status_code == 200  # the client sends the cookie
        assert web.get(f"//evil.example/?token={TOKEN}").headers.get("location", "/")[:2] != "//"


def test_a_program_sends_the_token_as_a_header(database: Path) -> None:
    with client(database, token=TOKEN) as web:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert web.get("/api/runs", headers=headers).status_code == 200


# -- what is wrong with the database ---------------------------------------------------------------


def answers(database: Path, path: str = "/") -> tuple[int, str, dict[str, Any]]:
    with client(database) as web:
        page, data = web.get(path), web.get("/api/runs")
        assert page.status_code == data.status_code
        assert_clean(page.text)
        for other in ("/live", "/plan", "/api", "/healthz"):
            assert web.get(other).status_code == 200, other
        return page.status_code, page.text, data.json()


def test_no_database_says_what_to_run(tmp_path: Path) -> None:
    status, page, data = answers(tmp_path / "results.db")
    assert status == 404
    assert "gockpt bench --model gpt-tiny" in page
    assert data["command"] == "gockpt bench --model gpt-tiny"
    assert list(tmp_path.iterdir()) == []


def test_a_database_without_runs_says_what_to_run(tmp_path: Path) -> None:
    Store(tmp_path / "results.db").close()
    status, page, data = answers(tmp_path / "results.db")
    assert (status, data) == (200, [])
    assert "gockpt bench" in page
    assert "gockpt crash-test" in page
    with client(tmp_path / "results.db") as web:
        for path in ("/run", "/timeline", "/recovery"):
            assert web.get(path).status_code == 404, path
        for path in ("/compare", "/trends", "/runs"):
            assert web.get(path).status_code == 200, path


def test_a_newer_database_names_its_version(tmp_path: Path) -> None:
    path = fill(tmp_path / "results.db")
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE meta SET value = '99'")
    raw.close()
    status, page, _ = answers(path)
    assert status == 409
    assert "schema version 99" in page


def test_a_damaged_database_says_so_on_every_page(tmp_path: Path) -> None:
    path = fill(tmp_path / "results.db")
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with client(path) as web:
        for address in ("/", "/runs", "/run", "/recovery", "/api/runs", "/api/tables/runs.csv"):
            answer = web.get(address)
            assert answer.status_code == 500, address
            assert "results.db" in answer.text


def test_a_row_that_is_damaged_is_told_by_name(tmp_path: Path) -> None:
    path = fill(tmp_path / "results.db")
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE results SET row = '{\"broken'")
    raw.close()
    with client(path) as web:
        answer = web.get("/run?run=b1")
        assert answer.status_code == 500
        assert "results.db" in answer.text


# -- hostile names ---------------------------------------------------------------------------------

MARK = "<img src=x onerror=alert(1)>\"'</script>&{{7*7}}"


def test_names_from_the_database_are_only_names(tmp_path: Path) -> None:
    with Store(tmp_path / "results.db") as store:
        store.add_bench(hostile(MARK))
        store.keep_baseline(MARK, store.document("latest"))
        check = {"strategy": MARK, "metric": MARK, "outcome": "worse", "detail": MARK}
        store.add_gate(
            gate(run_id=MARK, baseline=MARK, warnings=[MARK], checks=[check]), hostile(MARK)
        )
        kept = store.runs(kind="gate")[0].run_id
    with client(tmp_path / "results.db") as web:
        for path in [*PAGES, f"/run?run={kept}"]:
            if "c1" in path or "b1" in path or path == "/recovery":
                continue
            text = web.get(path).text
            assert "<img" not in text, path
            assert "49" not in re.findall(r"&amp;(\S\S)", text), path
            assert_clean(text)
        page = web.get("/").text
        links = [a["href"] for t, a in tags(page) if t == "a" and "/run?" in (a["href"] or "")]
        assert web.get(links[0] or "").status_code == 200  # its address leads to it
        for name in ("stall", "throughput", "costs", "trend", "compare"):
            figure = web.get(f"/api/figures/{name}").json()
            for trace in figure["data"]:
                trace.pop("customdata", None)  # is never shown
            assert "<img" not in json.dumps(figure), name


# -- anything at all -------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_no_request_breaks_the_server(database: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs the dev extra")
    app = create_app(database, hosts=["localhost", "testserver"])
    quick = settings(
        max_examples=3, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    tried: list[str] = []

    def ask(case: Any) -> None:
        tried.append(case.path)
        answer = case.call()
        assert answer.status_code < 500, (case.path, case.query, answer.text)

    for found in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations():
        quick(given(case=found.ok().as_strategy())(ask))()
    assert len(tried) > 50
