"""What ran elsewhere than asked for says so wherever it is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.reports import contestant, flat, report, row
from support.runtime_models import hot_package

from onnxlm.cli.bench_page import drawings, markdown, page
from onnxlm.runtime import bench_package
from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_figures import Point
from onnxlm.runtime.bench_package import PackageContestant
from onnxlm.runtime.bench_report import Curve, Report, read_report
from onnxlm.runtime.bench_tables import describe, remarks, speed_table

REASON = "in decode, 2 MatMul run on CPUExecutionProvider"
NODES = {
    "prefill": {"CUDAExecutionProvider": {"MatMul": 7, "Add": 2}},
    "decode": {"CUDAExecutionProvider": {"MatMul": 5}, "CPUExecutionProvider": {"MatMul": 2}},
}


@pytest.fixture
def partly() -> Report:
    """One contestant that runs where it was asked to in part, and one that does not at all."""
    asked = contestant("m", provider="cuda", ort_name="CUDAExecutionProvider", file_bytes=10**8)
    some = dataclasses.replace(asked, runs_on="CUDAExecutionProvider", fallback=REASON, nodes=NODES)
    none = dataclasses.replace(asked, fallback="no device")
    points = (Point(4, flat(100.0), 1.0, 2.0, 3.0), Point(8, flat(90.0), 1.0, 2.0, 3.0))
    rates = [100.0, 101.0]
    return report(
        [some, none],
        [row(0, rates, rates), row(1, rates, rates)],
        [Curve(0, Case(4, 2, context_lengths=(4, 8)), 2, None, points)],
    )


def test_rows_and_tables_name_it(partly: Report) -> None:
    assert describe(partly, partly.rows[0]) == "m on cuda (partly on CPU), prompt 8"
    assert describe(partly, partly.rows[1]) == "m on cuda (ran on CPU), prompt 8"
    assert describe(partly, partly.curves[0]) == "m on cuda (partly on CPU)"
    assert [cells[1] for cells in speed_table(partly).rows] == [
        "cuda (partly on CPU)",
        "cuda (ran on CPU)",
    ]


def test_the_reason_and_the_nodes_are_a_remark(partly: Report) -> None:
    lines = [
        f"fell back: m on cuda (partly on CPU): {REASON}; nodes of prefill: 9 on CUDA; "
        "nodes of decode: 5 on CUDA, 2 on CPU",
        "fell back: m on cuda (ran on CPU): no device",
    ]
    assert remarks(partly) == lines
    for text in (markdown(partly), page(partly)):
        for line in lines:
            assert line in text


def test_every_plot_names_it(partly: Report) -> None:
    first, steps, context, size = drawings(partly)
    for drawing in (first, steps, size):
        texts = " ".join(shape.text for shape in drawing.shapes)
        assert "m on cuda (partly on CPU)" in texts
        assert "m on cuda (ran on CPU)" in texts
    assert context.legend == [("m on cuda (partly on CPU)", 0)]


def test_the_file_keeps_it(partly: Report, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(partly.to_json(), encoding="utf-8")
    found = read_report(file)
    assert found == partly
    assert found.contestants[0].nodes == NODES


def test_a_package_tells_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    contestant = PackageContestant(str(hot_package().path), threads=1)
    assert contestant.prepare() == "CPUExecutionProvider"
    assert contestant.placement() == {"fallback": None, "nodes": None}
    contestant._running_model().fallback = REASON
    monkeypatch.setattr(bench_package, "assigned_nodes", lambda session: NODES["decode"])
    assert contestant.placement() == {
        "fallback": REASON,
        "nodes": {"prefill": NODES["decode"], "decode": NODES["decode"]},
    }
