"""The page and the plots on it: self-contained, escaped, axes by hand."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from support.reports import contestant, flat, report, row

from onnxlm.cli.bench_page import drawings, markdown, page
from onnxlm.cli.charts import (
    Bar,
    Dot,
    Drawing,
    Series,
    bar_chart,
    line_chart,
    nice_ticks,
    scatter_chart,
)
from onnxlm.cli.charts import tick_text as tick
from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_compare import RULE, compare, compare_table
from onnxlm.runtime.bench_figures import Point
from onnxlm.runtime.bench_report import Curve, Report

RATES = [100.0, 110.0, 105.0, 101.0, 99.0]


@pytest.fixture
def whole() -> Report:
    """A report with everything that is plotted, and names that HTML gives a meaning."""
    who = [
        contestant("<b>&m", file_bytes=150_000_000, quality={"kl": 0.0035, "top1": 0.96}),
        contestant("n", precision="int4", file_bytes=90_000_000),
        contestant("eager", provider="torch", baseline=True),
    ]
    points = tuple(Point(n, flat(1000.0 / n), 1.0, 2.0, 3.0) for n in (4, 8))
    curves = [Curve(0, Case(4, 2, context_lengths=(4, 8)), 3, None, points)]
    rows = [row(i, RATES, [rate / (1 + i) for rate in RATES]) for i in range(3)]
    return report(who, rows, curves)


def test_a_page_needs_nothing_else(whole: Report) -> None:
    text = page(whole)
    assert not re.search(r"https?:|//[a-z]|<script|<link|<img|@import|url\(|src=|href=", text)
    assert text.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in text


def test_a_page_escapes_names(whole: Report) -> None:
    text = page(whole)
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;m on cpu" in text


def test_a_page_holds_every_plot_and_table(whole: Report) -> None:
    text = page(whole)
    assert re.findall(r"<h2>(.*?)</h2>", text) == [
        "Time to first token",
        "Time of a decode step",
        "Decode speed by context",
        "Size, speed and quality",
        "Speed",
        "Decode tok/s by context length",
        "Load, memory and quality",
        "The machine&#39;s own rates",
        "Notes",
    ]
    for axis in ("milliseconds", "tokens in the cache", "tokens a second", "MB"):
        assert axis in text
    assert "KL 0.0035, top-1 96.0%" in text
    assert "int4, no quality recorded" in text
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert len(list(ElementTree.fromstring(drawing))) > 5  # well-formed


def test_a_contestant_keeps_its_colour_and_cases_stand_apart() -> None:
    who = [contestant(name, file_bytes=10**8) for name in ("failed", "a", "b")]
    cases = (Case(8, 4), Case(16, 4))
    rows = [row(i, RATES, RATES, case) for case in cases for i in range(3)]
    rows[0] = dataclasses.replace(rows[0], speed=None, rounds=(), failure="no")
    rows[3] = dataclasses.replace(rows[3], speed=None, rounds=(), failure="no")
    points = tuple(Point(n, flat(1000.0 / n), 1.0, 2.0, 3.0) for n in (4, 8))
    curves = [Curve(2, Case(4, 2, context_lengths=(4, 8)), 3, None, points)]
    first, steps, context, size = drawings(report(who, rows, curves))
    for drawing in (first, steps):
        bars = of_tag(drawing, "rect")
        assert [bar["class"] for bar in bars] == [f"fill c{i}" for i in (1, 2, 1, 2)]
        tops = [float(bar["y"]) for bar in bars]
        assert tops[2] - tops[1] == pytest.approx(2 * (tops[1] - tops[0]))
    assert {dot["class"] for dot in of_tag(context, "circle")} == {"dot c2"}
    assert [dot["class"] for dot in of_tag(size, "circle")] == ["dot c1", "dot c2"]


def test_changes_are_on_the_page(whole: Report) -> None:
    changes = compare_table(compare(whole, whole))
    text = page(whole, changes)
    assert "<h2>Changes</h2>" in text
    assert RULE.replace("<", "&lt;").replace(">", "&gt;") in text
    assert RULE in markdown(whole, changes)


def test_a_report_of_nothing_is_a_page_too() -> None:
    empty = report([contestant("m")], [])
    assert drawings(empty) == []
    assert "<h2>Load, memory and quality</h2>" in page(empty)


def test_markdown_tables_have_a_column_a_cell(whole: Report) -> None:
    text = markdown(whole)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for lines in tables:
        assert len({line.count("|") for line in lines}) == 1
        assert set(lines[1]) <= set("|-: ")
    assert "| <b>&m | cpu | int8 | 8 |" in text


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (6, [0, 1, 2, 3, 4, 5, 6]),
        (130, [0, 50, 100, 150]),
        (0.7, [0, 0.2, 0.4, 0.6, 0.8]),
        (0, [0, 1]),
    ],
)
def test_ticks_are_round(most: float, ticks: list[float]) -> None:
    assert nice_ticks(most) == pytest.approx(ticks)


def test_ticks_have_the_decimals_of_their_steps() -> None:
    assert [tick(value, [0, 0.2]) for value in (0, 0.2, 1)] == ["0.0", "0.2", "1.0"]
    assert [tick(value, [0, 500]) for value in (0, 500, 1500)] == ["0", "500", "1,500"]


def of_tag(drawing: Drawing, tag: str) -> list[dict[str, str | float]]:
    return [dict(shape.attributes) for shape in drawing.shapes if shape.tag == tag]


def test_bars_are_as_long_as_their_numbers() -> None:
    bars = [Bar("one", ((10.0, 0),), "10"), Bar("two", ((20.0, 1), (20.0, 2)), "40", (30.0, 50.0))]
    one, two, three = of_tag(bar_chart("t", "c", "ms", bars), "rect")
    assert two["width"] == pytest.approx(2 * float(one["width"]), abs=0.11)
    assert float(three["x"]) == pytest.approx(float(two["x"]) + float(two["width"]), abs=0.11)
    assert (one["y"], one["class"]) < (two["y"], two["class"])


LONG = (
    "SmolLM2-135M-Instruct-int8-prefill-rows on openvino, threads 2, prompt 1024, new 128, batch 8"
)


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        ("m on cpu", ["m on cpu"]),
        (
            LONG,
            [
                "SmolLM2-135M-Instruct-int8-prefill-rows on openvino,",
                "threads 2, prompt 1024, new 128, batch 8",
            ],
        ),
        ("x" * 100, ["x" * 63, "x" * 37]),
        ("a" * 90 + " on cpu, " + "b" * 90, ["a" * 62 + "…", "b" * 63]),
    ],
)
def test_a_long_label_stays_in_the_drawing(label: str, lines: list[str]) -> None:
    bars = [Bar(label, ((10.0, 0),), "10.0 ms"), Bar("short", ((5.0, 0),), "5.0 ms")]
    drawing = bar_chart("t", "c", "ms", bars)
    words = [shape for shape in drawing.shapes if shape.attributes.get("class") == "label"]
    assert [shape.text for shape in words] == [*lines, "short"]
    places = [(float(shape.attributes["x"]), float(shape.attributes["y"])) for shape in words]
    for shape, (x, _) in zip(words, places, strict=True):
        assert x - 6.9 * len(shape.text) >= 0
    heights = [y for _, y in places]
    assert all(b - a >= 14 for a, b in pairwise(heights))
    # Beside it there is still half of the page for the bar.
    (bar, _) = of_tag(drawing, "rect")
    assert float(bar["width"]) > 300


def test_versions_are_told_by_provider_where_interpreters_differ() -> None:
    who = [
        dataclasses.replace(contestant("m", provider=name), libraries=libraries)
        for name, libraries in (
            ("cpu", {"onnxruntime": "1.25.0", "numpy": "2.4", "python": "3.12.1"}),
            ("openvino", {"onnxruntime": "1.24.1", "numpy": "2.4", "python": "3.11.2"}),
        )
    ]
    text = page(report(who, []))
    facts = dict(re.findall(r"<dt>(.*?)</dt>\s*<dd>(.*?)</dd>", text))
    assert facts["onnxruntime"] == "1.25.0 (cpu), 1.24.1 (openvino)"
    assert facts["Python"] == "3.12.1 (cpu), 3.11.2 (openvino)"
    assert facts["numpy"] == "2.4"


def test_doublings_are_equally_far_apart() -> None:
    points = tuple((float(n), 100.0 / n, 90.0 / n, 110.0 / n) for n in (1, 2, 4))
    drawing = line_chart("t", "c", ("x", "y"), [Series("s", points, 5)])
    a, b, c = (float(dot["cx"]) for dot in of_tag(drawing, "circle"))
    assert b - a == pytest.approx(c - b, abs=0.11)
    assert drawing.legend == [("s", 5)]


def test_labels_of_neighbours_do_not_lie_on_each_other() -> None:
    dots = [Dot(100, 50, "first", "note", 0), Dot(101, 50.2, "second", "note", 1)]
    drawing = scatter_chart("t", "c", ("x", "y"), dots)
    heights = [
        float(shape.attributes["y"])
        for shape in drawing.shapes
        if shape.attributes.get("class") == "value"
    ]
    assert abs(heights[0] - heights[1]) >= 28


def test_labels_of_slow_neighbours_stay_inside_the_plot() -> None:
    """Two dots near the axis: the second label goes above the first, not across the numbers below."""
    dots = [
        Dot(100, 90, "fast", "note", 0),
        Dot(500, 9, "slow", "note", 1),
        Dot(501, 8, "slower", "", 2),
    ]
    drawing = scatter_chart("t", "c", ("x", "y"), dots)
    words = of_tag(drawing, "text")
    axis = max(float(word["y"]) for word in words if word["class"] == "tick")
    assert all(float(word["y"]) < axis - 20 for word in words if word["class"] == "value")


def test_a_label_does_not_lie_on_another_dot() -> None:
    dots = [Dot(100, 50, "first", "a note of some length", 0), Dot(112, 49.5, "second", "note", 1)]
    drawing = scatter_chart("t", "c", ("x", "y"), dots)
    (_, second), words = of_tag(drawing, "circle"), of_tag(drawing, "text")
    label = next(w for w in words if w["class"] == "value" and w["x"] < second["cx"])
    assert abs(float(label["y"]) - float(second["cy"])) >= 28
