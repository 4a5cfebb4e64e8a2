"""A report as text: cells, columns that are left out, remarks, ratios."""

from __future__ import annotations

import dataclasses

from support.reports import CASE, contestant, flat, report, row

from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_figures import Point
from onnxlm.runtime.bench_report import Curve
from onnxlm.runtime.bench_tables import (
    curve_table,
    load_table,
    number,
    rates_table,
    ratios,
    remarks,
    speed_table,
    spread,
    summary,
    tables,
)

QUALITY = {"kl": 0.0027, "top1": 0.965}


def test_a_row_of_speed() -> None:
    one = row(0, [812.0] * 3, [131.4] * 3, prefill_of_roofline=0.456, decode_of_roofline=0.78)
    made = speed_table(report([contestant("m")], [one]))
    assert dict(zip(made.header, made.rows[0], strict=False)) == {
        "model": "m",
        "provider": "cpu",
        "precision": "int8",
        "prompt": "8",
        "TTFT ms": "9.85 (9.85-9.85)",
        "prefill tok/s": "812 (812-812)",
        "of roof": "78%",  # the last of two columns of that name
        "decode tok/s": "131 (131-131)",
        "p50 ms": "7.61",
        "p95 ms": "7.61",
        "p99 ms": "7.61",
    }
    assert made.rows[0][6] == "46%"


def test_settings_are_columns_where_they_differ() -> None:
    rows = [row(0, [1.0], [1.0], Case(8, 4, batch)) for batch in (1, 8)]
    found = report([contestant("m")], rows)
    assert speed_table(found).header[3:5] == ("prompt", "batch")
    assert summary(found) == (
        "Some CPU; 5 rounds: median (lowest-highest); threads 1; prompt 8; new 4"
    )


def test_energy_is_a_column_where_it_was_read() -> None:
    one = row(0, [1.0], [1.0])
    assert "J/token" not in speed_table(report([contestant("m")], [one])).header
    assert one.speed is not None
    read = dataclasses.replace(
        one, speed=dataclasses.replace(one.speed, energy_j_per_token=flat(0.5))
    )
    made = speed_table(report([contestant("m")], [read]))
    assert (made.header[-1], made.rows[0][-1]) == ("J/token", "0.500 (0.500-0.500)")


def test_what_did_not_run_fills_its_row() -> None:
    bad = dataclasses.replace(row(0, [], []), failure="no such device")
    found = report([dataclasses.replace(contestant("m"), footprint=None)], [bad])
    made = speed_table(found)
    assert made.rows[0][4:] == ("not run", "-", "-", "-", "-", "-", "-", "-")
    assert len(made.rows[0]) == len(made.header)
    assert load_table(found).rows[0][-4:] == ("not run", "-", "-", "-")
    assert remarks(found) == ["not run: m on cpu, prompt 8: no such device"]


def test_a_row_that_stopped_says_after_how_many_rounds() -> None:
    short = dataclasses.replace(row(0, [1.0, 1.0], [1.0, 1.0]), failure="out of room")
    assert remarks(report([contestant("m")], [short])) == [
        "stopped after 2 rounds: m on cpu, prompt 8: out of room"
    ]


def test_a_row_of_load() -> None:
    who = contestant("m", file_bytes=152_400_000, quality=QUALITY)
    made = load_table(report([who], []))
    assert dict(zip(made.header, made.rows[0], strict=True)) == {
        "model": "m",
        "provider": "cpu",
        "precision": "int8",
        "threads": "1",
        "KL": "0.0027",
        "top-1": "0.965",
        "file MB": "152",
        "load s": "0.25",
        "first run s": "0.50",
        "peak RSS MB": "300",
        "PSS MB": "200",
    }


def test_memory_of_a_device_is_a_column_where_one_was_asked() -> None:
    on_cpu = contestant("m")
    assert on_cpu.footprint is not None
    footprint = dataclasses.replace(on_cpu.footprint, device_bytes=410_000_000)
    there = contestant("m", provider="cuda", ort_name="CUDAExecutionProvider")
    there = dataclasses.replace(there, footprint=footprint)
    failed = dataclasses.replace(there, footprint=None)
    made = load_table(report([on_cpu, there, failed], []))
    assert made.header[-2:] == ("PSS MB", "device MB")
    assert [cells[-1] for cells in made.rows] == ["-", "410", "-"]
    assert len({len(cells) for cells in made.rows}) == 1


def test_another_provider_than_asked_for_is_named() -> None:
    other = contestant("m", provider="cuda", ort_name="CUDAExecutionProvider")
    assert load_table(report([other], [])).rows[0][1] == "cuda (ran on CPU)"
    same = contestant("m", ort_name="CPUExecutionProvider")
    assert load_table(report([same], [])).rows[0][1] == "cpu"


def test_a_curve_has_a_column_a_length() -> None:
    points = tuple(Point(n, flat(1000.0 / n), 1.0, 2.0, 3.0) for n in (4, 8))
    curves = [
        Curve(0, Case(4, 2, context_lengths=(4, 8)), 3, None, points),
        Curve(1, Case(4, 2, context_lengths=(4, 8)), 0, "no", ()),
    ]
    made = curve_table(report([contestant("m"), contestant("n")], [], curves))
    assert made.header == ("model", "provider", "precision", "after 4", "after 8")
    assert made.rows[0][3:] == ("250 (250-250)", "125 (125-125)")
    assert made.rows[1][3:] == ("not run", "not run")


def test_the_machine_s_rates() -> None:
    made = rates_table(report([], []))
    assert made.rows == (("1", "20.0 (20.0-20.0)", "100 (100-100)", "400 (400-400)"),)
    assert [table.title for table in tables(report([], []))] == ["The machine's own rates"]


def test_ratios_are_of_rounds() -> None:
    base = contestant("eager", provider="torch", baseline=True)
    slow = row(1, [100.0, 200.0, 300.0], [10.0, 20.0, 40.0])
    fast = row(0, [150.0, 300.0, 300.0], [40.0, 80.0, 80.0])
    found = report([contestant("m"), base], [fast, slow])
    # Rounds: 1.5, 1.5, 1; and 4, 4, 2.
    assert ratios(found) == [
        "m on cpu, prompt 8 by eager: prefill 1.5x (1.0-1.5), decode 4.0x (2.0-4.0)"
    ]
    other = dataclasses.replace(slow, case=Case(16, 4))
    assert ratios(report([contestant("m"), base], [fast, other])) == []


def test_a_package_is_compared_with_the_baseline_of_its_source() -> None:
    who = [
        contestant("m", source="first"),
        contestant("n", source="second"),
        contestant("eager first", provider="torch", baseline=True, source="first"),
        contestant("eager second", provider="torch", baseline=True, source="second"),
    ]
    found = report(who, [row(i, [100.0], [10.0]) for i in range(4)])
    assert [line.partition(":")[0] for line in ratios(found)] == [
        "m on cpu, prompt 8 by eager first",
        "n on cpu, prompt 8 by eager second",
    ]


def test_options_of_the_sessions_are_told() -> None:
    options = {"graph_capture": True, "kv_budget": 1000}
    found = report([contestant("m", options=options), contestant("n")], [])
    assert summary(found).endswith("; graph_capture; kv_budget 1000")


def test_numbers_have_three_digits() -> None:
    shown = [number(value) for value in (None, 1234.5, 99.96, 9.876, 0.1234)]
    assert shown == ["-", "1234", "100.0", "9.88", "0.123"]
    assert spread(None) == "-"


def test_a_busy_machine_is_said() -> None:
    assert report([], [], foreign_load_cores=0.1).notes() == []
    assert report([], [], foreign_load_cores=1.26, energy_note="no RAPL").notes() == [
        "no RAPL",
        "other processes kept 1.3 cores busy meanwhile: the figures are lower than those of an idle machine",
    ]
    assert CASE.batch == 1
