"""When a change counts: the test by hand, and samples whose answer is known."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from support.reports import contestant, report, row

from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_compare import (
    compare,
    compare_table,
    machine_drift,
    mann_whitney,
    unmatched,
)
from onnxlm.runtime.bench_report import Report

STEADY = [100.0, 101.0, 99.0, 100.5, 99.5]


def decode_of(rates: list[float], read_rate: float = 2e10) -> Report:
    return report([contestant("m")], [row(0, STEADY, rates)], read_rate=read_rate)


def verdicts(old: Report, new: Report) -> dict[str, str]:
    return {change.figure: change.verdict for change in compare(old, new)}


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        # All of one below all of the other: the two extreme ways of so many.
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
        ([1, 2, 3, 4], [9, 8, 7, 6], 2 / 70),
        ([1, 2, 3], [4, 5, 6], 2 / 20),
        # Ranks 1, 2, 4 sum to 7, 3.5 from their mean: so do 7 and 14 less, 2 + 2 of 20 ways.
        ([1, 2, 4], [3, 5, 6], 4 / 20),
        ([1, 3], [2, 4], 4 / 6),
        ([7, 7, 7], [7, 7, 7], 1.0),
    ],
)
def test_the_test_by_hand(a: list[float], b: list[float], p: float) -> None:
    assert mann_whitney(a, b) == pytest.approx(p)
    assert mann_whitney(b, a) == pytest.approx(p)


def test_the_test_against_every_deal() -> None:
    random = np.random.default_rng(0)
    for sizes in ((3, 5), (4, 4), (5, 2)):
        pooled = random.integers(0, 6, sum(sizes)).astype(float)  # with ties
        ranks = np.array([(pooled < v).sum() + ((pooled == v).sum() + 1) / 2 for v in pooled])
        mean = sizes[0] * (sum(sizes) + 1) / 2
        sums = [ranks[list(deal)].sum() for deal in combinations(range(sum(sizes)), sizes[0])]
        far = abs(ranks[: sizes[0]].sum() - mean)
        expected = np.mean(np.abs(np.array(sums) - mean) >= far - 1e-9)
        found = mann_whitney(pooled[: sizes[0]].tolist(), pooled[sizes[0] :].tolist())
        assert found == pytest.approx(float(expected))


def test_a_clear_change_counts_and_the_rest_is_noise() -> None:
    slower = verdicts(decode_of(STEADY), decode_of([v * 0.9 for v in STEADY]))
    assert slower == {
        "ttft_ms": "noise",
        "prefill_tokens_per_s": "noise",
        "decode_tokens_per_s": "worse",
    }
    faster = verdicts(decode_of(STEADY), decode_of([v * 1.1 for v in STEADY]))
    assert faster["decode_tokens_per_s"] == "better"


def test_less_time_is_better() -> None:
    quick = report([contestant("m")], [row(0, [v * 2 for v in STEADY], STEADY)])
    found = verdicts(decode_of(STEADY), quick)
    assert (found["ttft_ms"], found["prefill_tokens_per_s"]) == ("better", "better")


def test_rounds_that_overlap_are_noise_however_far_their_medians() -> None:
    wild = [100.0, 180.0, 60.0, 170.0, 165.0]
    (*_, change) = compare(decode_of(STEADY), decode_of(wild))
    assert change.change > 0.5
    assert change.verdict == "noise"


def test_a_change_of_two_percent_is_noise_however_steady() -> None:
    (*_, change) = compare(decode_of(STEADY), decode_of([v * 1.025 for v in STEADY]))
    assert change.p < 0.05
    assert change.verdict == "noise"


def test_a_change_that_the_machine_made_too_is_noise() -> None:
    slow_machine = decode_of([v * 0.9 for v in STEADY], read_rate=1.7e10)
    assert machine_drift(decode_of(STEADY), slow_machine)[1] == pytest.approx(
        {"read_bytes_per_s": 0.15, "fp32_flops_per_s": 0.0, "int8_ops_per_s": 0.0}
    )
    assert verdicts(decode_of(STEADY), slow_machine)["decode_tokens_per_s"] == "noise"


def test_three_rounds_cannot_tell() -> None:
    few = [report([contestant("m")], [row(0, [r] * 3, [r] * 3)]) for r in (100.0, 50.0)]
    assert set(verdicts(*few).values()) == {"noise"}


def test_only_the_same_is_compared() -> None:
    old = report(
        [contestant("m"), contestant("gone")], [row(0, STEADY, STEADY), row(1, STEADY, STEADY)]
    )
    new = report([contestant("m")], [row(0, STEADY, STEADY, Case(16, 4))])
    assert compare(old, new) == []
    assert unmatched(old, new) == [
        "only in the old report: m on cpu, threads 1, prompt 8, new 4, batch 1",
        "only in the old report: gone on cpu, threads 1, prompt 8, new 4, batch 1",
        "only in the new report: m on cpu, threads 1, prompt 16, new 4, batch 1",
    ]


def test_rows_are_found_wherever_their_contestant_stands() -> None:
    old = report([contestant("a"), contestant("b")], [row(1, STEADY, [50.0] * 5)])
    new = report([contestant("b"), contestant("a")], [row(0, STEADY, [100.0] * 5)])
    (*_, change) = compare(old, new)
    assert (change.old, change.new, change.verdict) == (50.0, 100.0, "better")


def test_the_table_holds_both_medians() -> None:
    made = compare_table(compare(decode_of(STEADY), decode_of([v * 0.8 for v in STEADY])))
    assert made.rows[2] == (
        *("m on cpu, prompt 8", "decode tok/s", "100", "80.0", "-20.0%", "0.008", "3.0%", "worse"),
    )
    assert len(made.header) == len(made.rows[0])
