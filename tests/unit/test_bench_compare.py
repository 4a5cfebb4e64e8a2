"""When a change counts, and what is compared with what."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.reports import contestant, report, row

from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_compare import (
    Change,
    compare,
    compare_table,
    machine_drift,
    unmatched,
)
from onnxlm.runtime.bench_figures import Point, Spread
from onnxlm.runtime.bench_report import Contestant, Curve, Report

STEADY = [100.0, 101.0, 99.0, 100.5, 99.5]


def decode_of(rates: list[float], read_rate: float = 2e10) -> Report:
    return report([contestant("m")], [row(0, STEADY, rates)], read_rate=read_rate)


def verdicts(old: Report, new: Report) -> dict[str, str]:
    return {change.figure: change.verdict for change in judged(old, new)}


def judged(old: Report, new: Report) -> list[Change]:
    """What the rounds tell; load, memory and the like are not judged."""
    return [change for change in compare(old, new) if change.verdict != "-"]


def test_a_clear_change_counts_and_the_rest_is_noise() -> None:
    slower = verdicts(decode_of(STEADY), decode_of([v * 0.9 for v in STEADY]))
    assert slower == {
        "TTFT ms": "noise",
        "prefill tok/s": "noise",
        "decode tok/s": "worse",
    }
    faster = verdicts(decode_of(STEADY), decode_of([v * 1.1 for v in STEADY]))
    assert faster["decode tok/s"] == "better"


def test_less_time_is_better() -> None:
    quick = report([contestant("m")], [row(0, [v * 2 for v in STEADY], STEADY)])
    found = verdicts(decode_of(STEADY), quick)
    assert (found["TTFT ms"], found["prefill tok/s"]) == ("better", "better")


def test_rounds_that_overlap_are_noise_however_far_their_medians() -> None:
    wild = [100.0, 180.0, 60.0, 170.0, 165.0]
    (*_, change) = judged(decode_of(STEADY), decode_of(wild))
    assert change.change is not None
    assert change.change > 0.5
    assert change.verdict == "noise"


def test_a_change_of_two_percent_is_noise_however_steady() -> None:
    (*_, change) = judged(decode_of(STEADY), decode_of([v * 1.025 for v in STEADY]))
    assert change.p is not None
    assert change.p < 0.05
    assert change.verdict == "noise"


def test_a_change_that_the_machine_made_too_is_noise() -> None:
    slow_machine = decode_of([v * 0.9 for v in STEADY], read_rate=1.7e10)
    assert machine_drift(decode_of(STEADY), slow_machine)[1] == pytest.approx(
        {"read_bytes_per_s": 0.15, "fp32_flops_per_s": 0.0, "int8_ops_per_s": 0.0}
    )
    assert verdicts(decode_of(STEADY), slow_machine)["decode tok/s"] == "noise"


def test_three_rounds_cannot_tell() -> None:
    few = [report([contestant("m")], [row(0, [r] * 3, [r] * 3)]) for r in (100.0, 50.0)]
    assert set(verdicts(*few).values()) == {"noise"}


def test_only_the_same_is_compared() -> None:
    old = report(
        [contestant("m"), contestant("gone")], [row(0, STEADY, STEADY), row(1, STEADY, STEADY)]
    )
    new = report([contestant("m")], [row(0, STEADY, STEADY, Case(16, 4))])
    # What it takes to load the package is the same thing in any case, the memory of a case is not.
    assert [change.figure for change in compare(old, new)] == ["load s"]
    assert unmatched(old, new) == [
        "only in the old report: m on cpu, threads 1, prompt 8, new 4, batch 1",
        "only in the old report: gone on cpu, threads 1, prompt 8, new 4, batch 1",
        "only in the new report: m on cpu, threads 1, prompt 16, new 4, batch 1",
    ]


def test_rows_are_found_wherever_their_contestant_stands() -> None:
    old = report([contestant("a"), contestant("b")], [row(1, STEADY, [50.0] * 5)])
    new = report([contestant("b"), contestant("a")], [row(0, STEADY, [100.0] * 5)])
    (*_, change) = judged(old, new)
    assert (change.old, change.new, change.verdict) == (50.0, 100.0, "better")


def test_the_table_holds_both_medians() -> None:
    made = compare_table(compare(decode_of(STEADY), decode_of([v * 0.8 for v in STEADY])))
    assert made.rows[2] == (
        *("m on cpu, prompt 8", "decode tok/s", "100", "80.0", "-20.0%", "0.008", "3.0%", "worse"),
    )
    assert len(made.header) == len(made.rows[0])


def curve_of(rates: tuple[float, ...], who: int = 0) -> Curve:
    points = [Point(n, Spread.of(rates), 1.0, 2.0, 3.0, rates) for n in (64, 512)]
    return Curve(who, Case(64, 16, 1, (64, 512)), len(rates), None, tuple(points))


def test_each_context_length_is_compared() -> None:
    old = report([contestant("m")], [], [curve_of(tuple(STEADY))])
    new = report([contestant("m")], [], [curve_of(tuple(v * 0.8 for v in STEADY))])
    assert verdicts(old, new) == {
        "decode tok/s after 64": "worse",
        "decode tok/s after 512": "worse",
    }
    assert unmatched(old, new) == []
    assert unmatched(report([contestant("m")], []), new) == [
        "only in the new report: m on cpu, threads 1, context lengths 64, 512, batch 1"
    ]


def test_a_curve_without_rounds_is_put_beside_the_other() -> None:
    """Files of the version before hold the medians alone."""
    (curve,) = report([], [], [curve_of(tuple(STEADY))]).curves
    points = tuple(dataclasses.replace(point, rounds=()) for point in curve.points)
    old = report([contestant("m")], [], [dataclasses.replace(curve, points=points)])
    new = report([contestant("m")], [], [curve_of((50.0,) * 5)])
    found = {change.figure: change for change in compare(old, new)}
    change = found["decode tok/s after 512"]
    assert (change.old, change.new, change.p, change.verdict) == (100.0, 50.0, None, "-")


def test_load_memory_size_and_quality_are_put_beside_each_other() -> None:
    def measured(load_s: float, factor: int, **label: Any) -> Report:
        who = contestant("m", file_bytes=10_000_000 * factor, **label)
        assert who.footprint is not None
        footprint = dataclasses.replace(
            who.footprint, load_s=load_s, peak_rss_bytes=300_000_000 * factor, pss_bytes=None
        )
        return report([dataclasses.replace(who, footprint=footprint)], [])

    old = measured(0.25, 1, quality={"kl": 0.0})
    new = measured(100.0, 2, quality={"kl": 0.5})
    table = compare_table(compare(old, new))
    assert [row[1:] for row in table.rows] == [
        ("load s", "0.250", "100", "+39900.0%", "-", "-", "-"),
        ("first run s", "0.500", "0.500", "+0.0%", "-", "-", "-"),
        ("peak RSS MB", "300", "600", "+100.0%", "-", "-", "-"),
        ("file MB", "10.0", "20.0", "+100.0%", "-", "-", "-"),
        ("KL", "0.000", "0.500", "-", "-", "-", "-"),
    ]


def fallen(provider: Contestant) -> Contestant:
    return dataclasses.replace(provider, fallback="2 MatMul run on CPUExecutionProvider")


def test_what_fell_back_is_not_compared_with_what_did_not() -> None:
    asked = {"provider": "cuda", "ort_name": "CUDAExecutionProvider"}
    on_cpu = contestant("m", **asked)
    real = dataclasses.replace(on_cpu, runs_on="CUDAExecutionProvider")
    reports = [
        report([who], [row(0, STEADY, STEADY)], [curve_of(tuple(STEADY))])
        for who in (real, on_cpu, fallen(real))
    ]
    for i, old in enumerate(reports):
        for j, new in enumerate(reports):
            assert bool(compare(old, new)) == (i == j)
            assert bool(unmatched(old, new)) == (i != j)
