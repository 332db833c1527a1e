"""How quickly the dashboard answers over a large database: 200 runs, two million steps and spans.

Printed as milliseconds from the request to the whole answer, without the network; overview and run
page must stay below :data:`LIMIT_S`, and the server's memory must not grow with the database.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fastapi.testclient import TestClient

from gockpt.dashboard.app import create_app
from gockpt.events import Span
from gockpt.results import Store, Trace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from dashboard_kit import bench, traces

RUNS = 200
STEPS = 1_250
SPANS = 3_750
"""Of each of two rows of a run: with the steps, two million rows in all."""

LIMIT_S = 0.2
GROWTH_BYTES = 200 << 20
PATHS = ("/", "/runs", "/run?run=r150", "/timeline?run=r150", "/steps?run=r150", "/trends",
         "/compare?run=r1&run=r150", "/api/figures/stall?run=r150",
         "/api/figures/timeline?run=r150", "/api/figures/steps?run=r150",
         "/api/figures/trend")  # fmt: skip
MUST = PATHS[:3]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dashboard") / "results.db"
    with Store(path) as store:
        for number in range(RUNS):
            day = f"2026-{1 + number // 28:02}-{1 + number % 28:02}T00:00:00+00:00"
            store.add_bench(copy.deepcopy(bench(f"r{number}", created=day)), _traces())
    return path


def _traces() -> Iterator[Trace]:
    for one in traces()[1:3]:
        spans = [
            Span(lane="compute", name="forward", start=200.0 + n, end=200.5 + n, step=38 + n // 3)
            for n in range(SPANS - len(one.spans))
        ]
        yield Trace(
            result=one.result,
            steps=[(n, 0.25) for n in range(1, STEPS + 1)],
            spans=[*one.spans, *spans],
            checkpoints=one.checkpoints,
        )


@pytest.mark.timeout(600)
def test_pages_over_two_million_rows(database: Path) -> None:
    process = psutil.Process()
    with TestClient(create_app(database), base_url="http://localhost") as web:
        web.get("/")
        before = process.memory_info().rss
        medians = {path: statistics.median(_asked(web, path) for _ in range(7)) for path in PATHS}
        grown = process.memory_info().rss - before
    print(f"\n{database.stat().st_size / 1e6:.0f} MB; memory grew by {grown / 1e6:.0f} MB")
    for path, seconds in medians.items():
        print(f"{seconds * 1e3:8.1f} ms  {path}")
    assert grown < GROWTH_BYTES
    assert {path: medians[path] for path in MUST if medians[path] > LIMIT_S} == {}


def _asked(web: TestClient, path: str) -> float:
    began = time.perf_counter()
    assert web.get(path).status_code == 200
    return time.perf_counter() - began
