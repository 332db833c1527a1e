"""The dashboard in a real browser, over a database of a real bench and a real crash test.

Screenshots of every page are kept in the test's directory of temporary files. Skipped where there
is no Chromium.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dashboard_kit import bench, fill

from gockpt.cli.main import call
from gockpt.results import Store

playwright = pytest.importorskip("playwright.sync_api", reason="needs the dev extra")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here"),
]

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update",
         "--disable-sync"]  # fmt: skip
PAGES = {"overview": "/", "runs": "/runs", "run": "/run?run={bench}", "timeline": "/timeline",
         "steps": "/steps", "recovery": "/recovery", "compare": "/compare", "trends": "/trends",
         "live": "/live", "plan": "/plan", "api": "/api"}  # fmt: skip
WAIT = 30_000
"""Milliseconds; a busy machine draws slowly."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Really measured, on the CPU, and two made benches beside it."""
    place = tmp_path_factory.mktemp("browser")
    path = fill(place / "results.db")
    where = f"--db {path} --dir {place}"
    bench_line = "bench --model gpt-nano --device cpu --steps 4 --interval 4 --windows 2"
    assert call(f"{bench_line} --strategies gockpt {where}".split()) == 0
    line = "crash-test --scenario kill-trainer --point half-written --trials 1"
    assert call(f"{line} --strategies sync --db {path}".split()) in (0, 1)  # not judged here
    return path


@contextmanager
def served(database: Path) -> Iterator[str]:
    """``gockpt dashboard`` as a process; its address."""
    command = [sys.executable, "-m", "gockpt", "dashboard", "--db", str(database), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = re.search(r"http://\S+/", process.stdout.readline())
        assert found is not None, process.stderr and process.stderr.read()
        with urllib.request.urlopen(f"{found[0]}healthz", timeout=200) as answer:
            assert answer.status == 200
        yield found[0].rstrip("/")
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, (out, err)
    assert err == ""


@pytest.fixture(scope="module")
def site(results: Path) -> Iterator[str]:
    with served(results) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@contextmanager
def page_of(browser: Any, site: str, width: int, theme: str) -> Iterator[Any]:
    """A page that fails the test for any word on its console, and any request to elsewhere."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    page = context.new_page()
    wrong: list[str] = []

    def heard(message: Any) -> None:
        if message.type in ("error", "warning"):
            wrong.append(f"console: {message.text}")

    def asked(request: Any) -> None:
        if not request.url.startswith((f"{site}/", "data:", "blob:")):
            wrong.append(f"request: {request.url}")

    page.on("console", heard)
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("request", asked)
    yield page
    context.close()
    assert wrong == []


def draw_all(page: Any) -> int:
    """Scroll to every figure and wait until it is drawn; how many there are."""
    places = page.locator("figure[data-figure]")
    for index in range(places.count()):
        place = places.nth(index)
        place.scroll_into_view_if_needed()
        page.wait_for_function("f => f.dataset.drawn", arg=place.element_handle(), timeout=WAIT)
        assert place.get_attribute("data-drawn") == "yes", place.text_content()
    return int(places.count())


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_every_page_is_drawn(
    browser: Any, site: str, results: Path, tmp_path: Path, width: int, theme: str
) -> None:
    with Store(results, read_only=True) as store:
        newest = store.runs(kind="bench")[0].run_id
    with page_of(browser, site, width, theme) as page:
        for name, path in PAGES.items():
            page.goto(site + path.format(bench=newest))
            figures = draw_all(page)
            assert (figures > 0) == (name not in ("runs", "live", "api")), name
            assert page.locator("h1").count() == 1
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} pixels wide"
            page.screenshot(path=tmp_path / f"{name}-{width}-{theme}.png", full_page=True)


def test_the_timeline_shows_its_lanes(browser: Any, site: str) -> None:
    with page_of(browser, site, 1280, "light") as page:
        page.goto(f"{site}/timeline?run=b1")
        draw_all(page)
        words = page.locator("figure[data-name=timeline]").text_content()
        for lane in ("training", "stall", "state copy", "replay", "write", "commit"):
            assert lane in words, lane
        assert page.locator("figure .barlayer path").count() > 20
        page.goto(f"{site}/timeline")  # the real one
        draw_all(page)
        assert page.locator("figure .barlayer path").count() > 10


def test_light_and_dark_by_the_button_and_without_a_mouse(browser: Any, site: str) -> None:
    with page_of(browser, site, 1280, "light") as page:
        page.goto(f"{site}/run?run=b1")
        draw_all(page)
        colour = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(colour)
        page.evaluate("scrollTo(0, 0)")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.focus("#theme")
        page.keyboard.press("Enter")
        assert page.evaluate(colour) != light
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        reached = page.evaluate(
            "[...document.querySelectorAll('a, button, select, summary, .scroll')]"
            ".filter(one => !one.hidden && one.tabIndex < 0).length"
        )
        assert reached == 0


def test_a_figure_is_downloaded(browser: Any, site: str, tmp_path: Path) -> None:
    with page_of(browser, site, 1280, "light") as page:
        page.goto(f"{site}/run?run=b1")
        draw_all(page)
        for kind, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
            with page.expect_download(timeout=WAIT) as download:
                page.locator("figure[data-name=stall] button", has_text=kind).click()
            download.value.save_as(tmp_path / kind)
            assert start in (tmp_path / kind).read_bytes()[:200]


def test_sliders_ask_again(browser: Any, site: str) -> None:
    with page_of(browser, site, 1280, "light") as page:
        page.goto(f"{site}/plan")
        draw_all(page)
        row = page.locator("#predictions tr", has_text="async-o").first
        before = row.text_content()
        page.focus("[data-name=link_gb_s]")
        page.keyboard.press("Home")  # the slowest link
        page.wait_for_function(
            "old => document.querySelector('#predictions table') && "
            "![...document.querySelectorAll('#predictions tr')].some(r => r.textContent === old)",
            arg=before, timeout=WAIT,
        )  # fmt: skip
        assert "link_gb_s=1" in page.url


def test_live_follows_without_a_reload(browser: Any, tmp_path: Path) -> None:
    database = fill(tmp_path / "results.db")
    document = {**bench("live-1"), "of": "bench", "results": [],
                "strategies": ["none", "async-o", "gockpt", "none"]}  # fmt: skip
    rows = bench()["results"]
    with served(database) as site, page_of(browser, site, 390, "light") as page:
        page.goto(f"{site}/live")
        page.get_by_text("Nothing runs now").wait_for(timeout=WAIT)
        with Store(database) as store:
            for done in range(3):
                progress = {"strategy": "async-o", "stage": "training", "step": done, "of": 37}
                store.show_live({**document, "results": rows[:done], "progress": progress})
                page.get_by_text(f"{done} of 4 done").wait_for(timeout=WAIT)
            assert page.locator(".badge.emulated").text_content() == "emulated by a100-pcie4"
            assert page.locator(".badge.running").count() == 1
            store.add_bench(bench("b9", created="2026-03-01T00:00:00+00:00"))
            store.end_live("live-1")
        page.get_by_text("Finished: bench b9").click(timeout=WAIT)
        page.wait_for_url("**/run?run=b9", timeout=WAIT)
