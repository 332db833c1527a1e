"""The figures: from rows to Plotly objects, without a server.

They are checked by what they show (values, names, words), not by how Plotly is asked for it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from gockpt.dashboard import figures
from gockpt.dashboard.figures import Compared, Curve, Limit, Point, Prediction
from gockpt.dashboard.figures.compare import METRICS, bootstrap, differences
from gockpt.dashboard.figures.lanes import COLOURS, stretches, windows, without_stalls
from gockpt.dashboard.figures.look import STRATEGY_COLOURS, TEMPLATES, strategy_colour
from gockpt.results import Checkpoint, Result, SpanRow, Step, Trial

BAD = "<b>bold</b><img src=x onerror=alert(1)>"


def result(strategy: str, *, loop: float = 10.0, blocked: float = 0.1, **more: Any) -> Result:
    """A row of a bench as the database holds it."""
    relative = 10.0 / loop
    samples = {"relative_throughput": [relative], "blocked_s_per_checkpoint": [blocked]}
    row = {
        "bytes": {"state": 100, "gradients": 37, "persisted": 120},
        "latency_s": {"consistent": 1.5, "durable": 4.0},
        "memory_bytes": {"trainer_added": 2_000_000, "agent_added": 1_000_000,
                         "predicted": 2_900_000},
        "emulation": {"overruns": None},
        "tokens_per_s": {"loop": 1000.0, "wall": 800.0},
        "samples": {**samples, **more.pop("samples", {})},
        **more.pop("row", {}),
    }  # fmt: skip
    given: dict[str, Any] = {
        "run_id": "r", "position": 0, "strategy": strategy, "valid": True, "drain_s": 2.0,
        "relative_throughput": relative, "blocked_s_per_checkpoint": blocked, "loop_s": loop,
        "excess_s_per_checkpoint": blocked + 0.01, "windows": 5, "row": row, **more,
    }  # fmt: skip
    return Result(**given)


BENCH = [
    result("none"),
    result("async-o", loop=11.5, blocked=0.476),
    result("gockpt", loop=10.05, blocked=0.0156),
    result("none", loop=10.001),
]


def span(lane: str, start: float, end: float, step: int, name: str | None = None) -> SpanRow:
    return SpanRow(result_id=1, lane=lane, name=name or lane, start=start, end=end, step=step)


def training(steps: int, *, since: float = 1000.0) -> list[SpanRow]:
    """A second a step: 0.3 forward, 0.6 backward, 0.1 update."""
    return [
        span("compute", since + n + begin, since + n + end, n + 1, name)
        for n in range(steps)
        for name, begin, end in (
            ("forward", 0.0, 0.3), ("backward", 0.3, 0.9), ("update", 0.9, 1.0),
        )
    ]  # fmt: skip


def captured() -> list[SpanRow]:
    """A checkpoint of step 4 over two windows: passes 4 and 5."""
    return [
        *training(8),
        span("state", 1003.0, 1003.4, 3),
        span("state", 1004.05, 1004.5, 4),
        span("gradients", 1003.9, 1004.05, 4),
        span("stall", 1003.95, 1003.97, 4, "update"),
        span("replay", 1004.1, 1004.6, 4),
        *(span("write", 1005 + n / 10, 1005.01 + n / 10, 4, "extent") for n in range(10)),
        span("commit", 1006.0, 1006.1, 4),
        span("state", 1007.0, 1007.5, 7),  # of the next one
    ]


SAVED = Checkpoint(
    result_id=1, step=4, strategy="gockpt", windows=2, blocked_s=0.02, durable_s=3.1, proof="exact"
)


def trial(scenario: str, strategy: str, passed: bool | None, **row: Any) -> Trial:
    recovery = {"detect": 0.1, "start": 0.2, "open": 0.3, "read": 0.4, "to_device": 0.5,
                "first_step": 0.6}  # fmt: skip
    given = {"recovery": recovery, "source": "memory", "lost_steps": 2, "detail": "", **row}
    return Trial(
        run_id="c", position=0, scenario=scenario, point="p", strategy=strategy, passed=passed,
        row=given,
    )  # fmt: skip


TRIALS = [
    trial("kill-trainer", "gockpt", True),
    trial("kill-trainer", "gockpt", True, source="ssd"),
    trial("kill-trainer", "torch-save", False, detail="restored step 4, committed was 8"),
    trial("damage", "gockpt", None, recovery=None),
]

CURVES = [
    Curve(strategy="sync", interval_s=60, stall_s=9, lag_s=0, recovery_s=60),
    Curve(strategy="gockpt", interval_s=60, stall_s=0, lag_s=4, recovery_s=60),
]
POINTS = [
    Point(created=f"2026-01-{day:02}T00:00:00+00:00", run_id=f"r{day}", commit="abcdef",
          strategy="gockpt", value=0.99 - day / 1000) for day in (3, 1, 2)
]  # fmt: skip
PREDICTIONS = [
    Prediction(strategy="async-o", windows=1, traffic_factor=1.0, memory_bytes=3e10,
               stall_s=0.43, goodput=0.9),
    Prediction(strategy="gockpt", windows=5, traffic_factor=1.3, memory_bytes=4e10,
               stall_s=0.0, goodput=0.98),
]  # fmt: skip
OLD = Compared(label="old", results=BENCH)

DRAWN: dict[str, Callable[..., go.Figure]] = {
    "stall": lambda **k: figures.stall(BENCH, **k),
    "throughput": lambda **k: figures.throughput(BENCH, **k),
    "costs": lambda **k: figures.costs(BENCH, **k),
    "timeline": lambda **k: figures.timeline(
        {"gockpt": figures.of_checkpoint(captured(), SAVED)}, **k
    ),
    "steps": lambda **k: figures.steps({"gockpt": steps(50)}, [SAVED], **k),
    "recovery_matrix": lambda **k: figures.recovery_matrix(TRIALS, **k),
    "recovery_split": lambda **k: figures.recovery_split(TRIALS, **k),
    "goodput": lambda **k: figures.goodput(CURVES, **k),
    "compare": lambda **k: figures.compare([OLD, Compared(label="new", results=BENCH)], **k),
    "trend": lambda **k: figures.trend(POINTS, [Limit(name="gate", value=0.97)], **k),
    "plan": lambda **k: figures.plan(PREDICTIONS, **k),
}
EMPTY: dict[str, Callable[..., go.Figure]] = {
    "stall": lambda **k: figures.stall([], **k),
    "throughput": lambda **k: figures.throughput([result("none")], **k),
    "costs": lambda **k: figures.costs([], **k),
    "timeline": lambda **k: figures.timeline({"gockpt": []}, **k),
    "steps": lambda **k: figures.steps({"gockpt": []}, **k),
    "recovery_matrix": lambda **k: figures.recovery_matrix([], **k),
    "recovery_split": lambda **k: figures.recovery_split([TRIALS[-1]], **k),
    "goodput": lambda **k: figures.goodput([], **k),
    "compare": lambda **k: figures.compare([OLD], **k),
    "trend": lambda **k: figures.trend([], **k),
    "plan": lambda **k: figures.plan([], **k),
}


def steps(number: int) -> list[Step]:
    return [Step(result_id=1, step=n, seconds=0.25) for n in range(1, number + 1)]


def shown(figure: go.Figure) -> str:
    """The whole figure as it is sent, for a search."""
    return str(figure.to_json())


def trace(figure: go.Figure, name: str) -> Any:
    return next(one for one in figure.data if one.name == name)


def words(values: Sequence[str] | None) -> str:
    return "\n".join(values or ())


# -- what all figures promise ----------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_has_titles_units_and_a_background_that_is_the_pages(name: str) -> None:
    figure = DRAWN[name]()
    assert figure.data
    assert figure.layout.title.text
    assert figure.layout.height > 150
    template = figure.layout.template.layout
    assert template.paper_bgcolor == template.plot_bgcolor == "rgba(0,0,0,0)"
    assert not {one.type for one in figure.data} & {"scattergl", "heatmapgl"}
    if name not in ("recovery_matrix", "plan"):  # words at each cell, bars with their numbers
        axes = [figure.layout[key].title.text for key in figure.layout if key.startswith("xaxis")]
        assert any(axes), "no title at the axis"


@pytest.mark.parametrize("name", DRAWN)
def test_emulated_times_are_called_so_in_the_figure_itself(name: str) -> None:
    said = DRAWN[name](emulated="a100-pcie4").layout.title.subtitle.text
    assert "a100-pcie4" in said
    assert "emulated" in said or name == "plan"
    assert not DRAWN[name]().layout.title.subtitle.text or name == "plan"


def test_rows_that_were_emulated_are_called_so_even_if_nobody_says_it() -> None:
    row = result("gockpt", row={"emulation": {"overruns": 0, "worst_s": 0.0}})
    assert "emulated" in figures.stall([row]).layout.title.subtitle.text


@pytest.mark.parametrize("name", DRAWN)
def test_only_the_template_depends_on_the_theme(name: str) -> None:
    light, dark = (json.loads(shown(DRAWN[name](theme=one))) for one in ("light", "dark"))
    assert light["layout"].pop("template") != dark["layout"].pop("template")
    assert light == dark


@pytest.mark.parametrize("name", EMPTY)
def test_without_anything_to_draw_a_figure_says_why(name: str) -> None:
    figure = EMPTY[name]()
    assert not figure.data
    assert figure.layout.annotations[0].text


def test_every_public_figure_is_tested() -> None:
    made = {name for name in figures.__all__ if callable(getattr(figures, name))}
    helpers = {"of_checkpoint", "strategy_colour", "emulated_note", "Theme"}
    classes = {name for name in made if isinstance(getattr(figures, name), type)}
    assert made - helpers - classes == set(DRAWN) == set(EMPTY)


def test_names_from_the_database_are_shown_and_not_obeyed() -> None:
    rows = [result("none"), result(BAD), result("none")]
    checkpoint = Checkpoint(result_id=1, step=4, strategy=BAD, windows=1, fallback=BAD)
    for figure in (
        figures.stall(rows),
        figures.throughput(rows),
        figures.costs(rows),
        figures.timeline({BAD: captured()}, emulated=BAD),
        figures.steps({BAD: steps(9)}, [checkpoint]),
        figures.recovery_split([trial("kill", BAD, True, source=BAD)]),
        figures.goodput([Curve(strategy=BAD, interval_s=1, stall_s=0, lag_s=0, recovery_s=1)]),
        figures.compare([Compared(label=BAD, results=rows), Compared(label=BAD, results=rows)]),
        figures.trend([Point(created="2026-01-01", run_id=BAD, commit=BAD, strategy=BAD,
                             value=1.0)], [Limit(name=BAD, value=1.0)], metric="x", unit=BAD),
        figures.plan([Prediction(strategy=BAD, windows=1, traffic_factor=1, memory_bytes=1,
                                 stall_s=1, goodput=1)], emulated=BAD),
    ):  # fmt: skip
        document = json.loads(shown(figure))
        for one in document["data"]:
            one.pop("customdata", None)  # for links, never shown
        plain = json.dumps(document)
        assert "&lt;img" in plain
        assert "<img" not in plain


def test_a_cell_of_the_matrix_keeps_the_raw_names_for_links_only() -> None:
    figure = figures.recovery_matrix([trial(BAD, BAD, False, detail=BAD)])
    assert list(figure.data[0].customdata[0][0]) == [BAD, BAD]
    document = json.loads(shown(figure))
    del document["data"][0]["customdata"]
    assert "<img" not in json.dumps(document)


# -- colours ---------------------------------------------------------------------------------------


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """By WCAG 2: 3 is what a figure's parts need."""
    light = sorted(
        (float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (one, other)), reverse=True
    )
    return light[0] / light[1]


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722],
                    [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)  # fmt: skip
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


SIGHT = {
    "usual": np.eye(3),
    # G. M. Machado et al., "A physiologically-based model for simulation of color vision
    # deficiency", IEEE TVCG 15 (2009), severity 1.0.
    "without red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                             [-0.003882, -0.048116, 1.051998]]),
    "without green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                               [-0.011820, 0.042940, 0.968881]]),
}  # fmt: skip


@pytest.mark.parametrize("sight", SIGHT)
def test_strategies_are_told_apart_by_everybody(sight: str) -> None:
    seen = {name: lab(SIGHT[sight] @ linear(c)) for name, c in STRATEGY_COLOURS.items()}
    near = {
        (one, other): float(np.linalg.norm(seen[one] - seen[other]))
        for one, other in itertools.combinations(seen, 2)
    }
    assert min(near.values()) > 15, min(near, key=near.__getitem__)


@pytest.mark.parametrize("ground", ["#FFFFFF", "#1C2128"])
def test_colours_stand_out_in_light_and_dark(ground: str) -> None:
    weak = [name for name, c in STRATEGY_COLOURS.items() if contrast(c, ground) < 2.9]
    assert weak == []


@pytest.mark.parametrize(("theme", "ground"), [("light", "#FFFFFF"), ("dark", "#1C2128")])
def test_text_can_be_read_in_light_and_dark(theme: str, ground: str) -> None:
    layout = TEMPLATES[theme].layout
    assert contrast(layout.font.color, ground) > 7
    assert contrast(layout.xaxis.title.font.color, ground) > 4.5


def test_a_strategy_has_one_colour_in_all_figures_known_or_not() -> None:
    assert strategy_colour("gockpt") == STRATEGY_COLOURS["gockpt"]
    assert strategy_colour("dcp-async") == strategy_colour("dcp-async")
    bars = trace(figures.stall(BENCH), "blocked (engine's clock)")
    point = figures.throughput(BENCH).data[-1]
    assert list(bars.marker.color) == list(point.marker.color)


# -- a bench ---------------------------------------------------------------------------------------


def test_the_stall_shows_both_clocks_and_their_spread() -> None:
    repeats = {"blocked_s_per_checkpoint": [0.01, 0.0156, 0.02]}
    rows = [*BENCH[:2], result("gockpt", blocked=0.0156, samples=repeats)]
    figure = figures.stall(rows)
    blocked = trace(figure, "blocked (engine's clock)")
    excess = trace(figure, "excess (loop beside none)")
    assert list(blocked.y) == ["async-o", "gockpt"]
    assert list(blocked.x) == [0.476, 0.0156]
    assert list(excess.x) == pytest.approx([0.486, 0.0256])
    assert list(blocked.error_x.array) == pytest.approx([0, 0.0044])
    assert list(blocked.error_x.arrayminus) == pytest.approx([0, 0.0056])
    assert not excess.error_x.visible
    assert "held training up for 15.6 ms" in words(blocked.hovertext)
    assert figure.layout.xaxis.range[1] > 0.486


def test_a_row_that_does_not_count_says_so() -> None:
    figure = figures.stall([result("gockpt", valid=False)])
    assert "(invalid)" in figure.data[0].y[0]


def test_the_throughput_shows_the_noise_that_decides() -> None:
    figure = figures.throughput(BENCH)
    points = figure.data[-1]
    assert list(points.x) == pytest.approx([100 / 1.15, 100 / 1.005])
    band = next(one for one in figure.layout.shapes if one.type == "rect")
    noise = 4 * 0.001 / 10.0005
    assert (band.x0, band.x1) == pytest.approx((100 - 100 * noise, 100 + 100 * noise))
    assert "15.00 % longer" in points.hovertext[0]
    within = figures.throughput([BENCH[0], result("gockpt", loop=10.003), BENCH[3]])
    assert "not decided" in within.data[-1].hovertext[0]


def test_one_run_of_none_tells_no_noise() -> None:
    figure = figures.throughput(BENCH[:3])
    assert [one.type for one in figure.layout.shapes] == ["line"]
    assert "not decided" not in words(figure.data[-1].hovertext)


def test_costs_are_traffic_memory_and_patience() -> None:
    figure = figures.costs(BENCH)
    traffic, memory = figure.data[0], figure.data[1]
    assert list(traffic.x) == pytest.approx([1.37, 1.37])
    assert list(memory.x) == [3_000_000, 3_000_000]
    assert list(trace(figure, "planned").x) == [2_900_000] * 2
    assert list(trace(figure, "in host memory").x) == [1.5, 1.5]
    assert list(trace(figure, "on the disk").x) == [4.0, 4.0]


def test_costs_that_are_not_known_leave_a_gap_and_no_zero() -> None:
    none = {"trainer_added": None, "agent_added": None, "predicted": None}
    bytes_ = {"state": 0, "gradients": 0}
    row = result("gockpt", row={"memory_bytes": none, "bytes": bytes_, "latency_s": {}})
    figure = figures.costs([row])
    assert [list(one.x) for one in figure.data[:3]] == [[None], [None], [None]]


# -- the timeline ----------------------------------------------------------------------------------


def lane(figure: go.Figure, name: str) -> list[tuple[float, float]]:
    """(start, end) of all bars of a kind, in the figure's time."""
    bars = [one for one in figure.data if one.name == name]
    return [
        (round(start, 6), round(start + length, 6))
        for one in bars
        for start, length in zip(one.base, one.x, strict=True)
    ]


def test_a_checkpoints_spans_are_its_own_and_the_training_beside_it() -> None:
    found = figures.of_checkpoint(captured(), SAVED)
    assert {one.lane for one in found} == {"compute", "state", "gradients", "stall", "replay",
                                           "write", "commit"}  # fmt: skip
    assert [one.step for one in found if one.lane == "state"] == [3, 4]
    compute = [one for one in found if one.lane == "compute"]
    assert (compute[0].name, compute[0].step) == ("forward", 4)
    assert compute[-1].step == 7
    assert figures.of_checkpoint(training(3), SAVED) == []


def test_the_timeline_begins_with_the_first_window_and_marks_all() -> None:
    figure = DRAWN["timeline"]()
    assert lane(figure, "state copy") == [(0.0, 0.4), (1.05, 1.5)]
    assert lane(figure, "commit") == [(3.0, 3.1)]
    marked = [(round(one.x0, 6), round(one.x1, 6)) for one in figure.layout.shapes]
    assert marked == [(0.0, 0.9), (1.0, 1.9)]
    assert list(figure.layout.yaxis.categoryarray) == [
        "training", "stall", "state copy", "gradient copy", "replay", "write", "commit",
    ]  # fmt: skip


def test_strategies_lie_under_each_other_on_one_axis() -> None:
    plain = [*training(8), span("state", 1003.0, 1004.2, 4), span("commit", 1005, 1005.1, 4)]
    saved = Checkpoint(result_id=2, step=4, strategy="async-o", windows=1)
    figure = figures.timeline(
        {
            "async-o": figures.of_checkpoint([*plain[: 3 * 3], *plain[3 * 3 :]], saved),
            "gockpt": figures.of_checkpoint(captured(), SAVED),
        }
    )
    assert [one.text for one in figure.layout.annotations[:2]] == ["async-o", "gockpt"]
    assert figure.layout.xaxis.matches == "x2"
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    assert figure.layout.yaxis.domain[0] > figure.layout.yaxis2.domain[1]


def test_training_is_cut_where_it_was_held_up() -> None:
    spans = [span("compute", 0.0, 1.0, 1, "update"), span("stall", 0.2, 0.5, 1, "update"),
             span("stall", 0.9, 1.4, 1, "step"), span("write", 0.0, 1.0, 1)]  # fmt: skip
    left = [(one.lane, one.start, one.end) for one in without_stalls(spans)]
    assert [one for one in left if one[0] == "compute"] == [
        ("compute", 0.0, 0.2),
        ("compute", 0.5, 0.9),
    ]
    assert ("write", 0.0, 1.0) in left


def test_a_copy_belongs_to_the_window_in_which_it_begins() -> None:
    """Also where the update has to wait for it."""
    spans = [*training(3, since=0.0), span("state", 1.0, 1.95, 1)]
    assert [(one.start, one.end) for one in windows(spans)] == [(1.0, 1.9)]


def test_windows_are_not_guessed_where_training_was_not_recorded() -> None:
    found = windows([span("state", 1.0, 2.0, 1), span("commit", 4.0, 5.0, 1)])
    assert len(found) == 1
    assert windows([]) == []


def test_spans_too_short_to_see_are_joined_and_counted() -> None:
    many = [span("write", n, n + 0.9, 1) for n in range(100)]
    joined = stretches([*many, span("write", 500, 501, 2)], gap=0.2)
    assert [(one.start, one.end, one.count) for one in joined] == [(0, 99.9, 100), (500, 501, 1)]
    assert joined[0].busy == pytest.approx(90.0)
    overlapping = stretches([span("write", 0, 10, 1), span("write", 1, 2, 1)], gap=0.1)
    assert (overlapping[0].end, overlapping[0].busy) == (10, 10)


def test_a_timeline_of_very_many_spans_stays_small() -> None:
    spans = [*captured(), *(span("replay", 1004 + n * 1e-5, 1004 + n * 1e-5 + 5e-6, 4)
                            for n in range(5_000))]  # fmt: skip
    figure = figures.timeline({"gockpt": figures.of_checkpoint(spans, SAVED)})
    assert len(shown(figure)) < 100_000
    assert any("parts" in one for one in trace(figure, "replay").hovertext)


def test_every_lane_of_the_engine_has_a_name_and_a_colour() -> None:
    phases = {"forward", "backward", "update"}
    assert set(COLOURS) - phases | {"compute"} == set(figures.LANES)


# -- steps -----------------------------------------------------------------------------------------


def test_steps_show_checkpoints_on_the_line_of_their_strategy() -> None:
    other = Checkpoint(result_id=2, step=9, strategy="async-o", windows=1, durable_s=2.0)
    figure = figures.steps({"gockpt": steps(50), "async-o": steps(50)}, [SAVED, other])
    marks = [one for one in figure.data if one.mode == "markers"]
    assert [list(one.x) for one in marks] == [[4], [9]]
    assert "over 2 windows" in marks[0].hovertext[0]
    assert "durable after 3.10 s" in marks[0].hovertext[0]
    assert [one.x0 for one in figure.layout.shapes] == [4, 9]


def test_a_hiccup_is_seen_in_a_long_run() -> None:
    rows = steps(6_000)
    rows[4_320].seconds = 7.5
    saved = [Checkpoint(result_id=1, step=n, strategy="gockpt", windows=1)
             for n in range(3, 6_000, 3)]  # fmt: skip
    figure = figures.steps({"gockpt": rows}, saved, points=1000)
    line, marks = figure.data
    assert max(line.y) == 7.5
    assert len(line.x) <= 1000
    assert len(marks.x) <= 1000
    assert not figure.layout.shapes


# -- recovery --------------------------------------------------------------------------------------


def test_the_matrix_says_in_words_what_happened() -> None:
    heat = DRAWN["recovery_matrix"]().data[0]
    assert list(heat.y) == ["kill-trainer", "damage"]
    assert list(heat.x) == ["gockpt", "torch-save"]
    assert [list(line) for line in heat.text] == [["2 passed", "1 failed"], ["1 skipped", ""]]
    assert [list(line) for line in heat.z] == [[2, 0], [1, None]]
    assert "committed was 8" in heat.hovertext[0][1]
    assert "2.0 on average" in heat.hovertext[0][0]


def test_one_failure_among_many_makes_the_cell_fail() -> None:
    trials = [*(trial("kill", "gockpt", True) for _ in range(9)), trial("kill", "gockpt", False)]
    heat = figures.recovery_matrix(trials).data[0]
    assert heat.z[0][0] == 0
    assert heat.text[0][0] == "9 passed, 1 failed"


def test_the_way_back_is_split_by_where_the_state_came_from() -> None:
    figure = DRAWN["recovery_split"]()
    read = trace(figure, "read and check")
    assert list(read.y) == ["gockpt, from memory", "gockpt, from ssd", "torch-save, from memory"]
    assert list(read.x) == pytest.approx([0.4] * 3)
    totals = figure.data[-1]
    assert list(totals.x) == pytest.approx([2.1] * 3)


# -- curves, comparisons, trends, plans ------------------------------------------------------------


def test_the_goodput_falls_with_the_failure_rate() -> None:
    figure = DRAWN["goodput"]()
    sync, ours = (np.array(one.y) for one in figure.data)
    assert (np.diff(sync) < 0).all()
    assert (ours > sync).all()
    assert ours[0] == pytest.approx(100, abs=0.1)
    assert CURVES[0].at(24.0) == pytest.approx(60 / 69 * (3600 - 34.5) / 3660)


def test_differences_are_to_the_first_run_with_an_interval() -> None:
    many = {"blocked_s_per_checkpoint": [0.1, 0.11, 0.09, 0.1]}
    less = {"blocked_s_per_checkpoint": [0.05, 0.06, 0.04, 0.05]}
    old = Compared(label="old", results=[result("gockpt", samples=many)])
    new = Compared(label="new", results=[result("gockpt", samples=less), result("sync")])
    (found,) = differences([old, new], METRICS[1])
    assert (found.strategy, found.label) == ("gockpt", "new")
    assert found.value == pytest.approx(-0.05)
    assert found.low is not None
    assert found.high is not None
    assert -0.065 < found.low < -0.05 < found.high < -0.035
    assert found.decided


def test_what_was_measured_once_is_judged_by_the_noise_or_not_at_all() -> None:
    slower = [BENCH[0], result("gockpt", loop=10.5), BENCH[3]]
    pair = [OLD, Compared(label="new", results=slower)]
    (throughput,) = differences(pair, METRICS[0])
    assert throughput.decided
    assert throughput.high is not None
    assert throughput.high - throughput.value == pytest.approx(100 * 4 * 0.001 / 10.0005)
    (blocked,) = differences(pair, METRICS[1])
    assert (blocked.low, blocked.decided) == (None, False)
    figure = figures.compare(pair)
    assert "measured once" in shown(figure)
    assert {s for one in figure.data for s in one.marker.symbol} == {"circle", "circle-open"}


def test_rows_that_do_not_count_are_not_compared() -> None:
    new = Compared(label="new", results=[result("gockpt", valid=False)])
    assert differences([OLD, new], METRICS[0]) == []


def test_the_bootstrap_covers_what_it_says() -> None:
    """Of samples with equal means, about 95 of 100 intervals have 0 in them."""
    chance = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        low, high = bootstrap(chance.normal(size=20), chance.normal(size=20), draws=400)
        assert low is not None
        assert high is not None
        hits += low <= 0 <= high
    assert 175 <= hits <= 199
    same = np.array([1.0, 2.0, 3.0])
    assert bootstrap(same, same) == bootstrap(same, same)
    assert bootstrap(same, same[:1]) == (None, None)


def test_a_trend_is_in_the_order_of_time_with_its_limits() -> None:
    figure = DRAWN["trend"]()
    (line,) = figure.data
    assert list(line.customdata) == ["r1", "r2", "r3"]
    assert list(line.y) == pytest.approx([0.989, 0.988, 0.987])
    assert figure.layout.shapes[0].y0 == 0.97
    assert "gate" in [one.text for one in figure.layout.annotations]
    limit = Limit(name="main", value=0.99, fails=False)
    mark, gate = figures.trend(POINTS, [limit, Limit(name="gate", value=0.97)]).layout.shapes
    assert mark.line != gate.line


def test_the_plan_says_that_nothing_was_run() -> None:
    figure = DRAWN["plan"](emulated="h200-pcie5")
    assert "calculated" in figure.layout.title.subtitle.text
    assert [list(one.x) for one in figure.data] == [
        [0.43, 0.0], [90.0, 98.0], [1, 5], [1.0, 1.3], [3e10, 4e10],
    ]  # fmt: skip
    assert list(figure.data[0].text) == ["0.430 s", "0 µs"]
