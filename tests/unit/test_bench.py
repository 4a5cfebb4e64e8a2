"""Rounds of the benchmark: whose turn it is, what counts, and the figures by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from onnxlm.errors import InputError
from onnxlm.runtime import bench
from onnxlm.runtime.bench import Case, Plan, Rounds, Sample, reason, time_run
from onnxlm.runtime.bench_figures import Spread, curve, round_figures, speed


def test_contestants_take_turns_in_every_round() -> None:
    turns: list[tuple[str, int]] = []
    begun: list[bool] = []

    def measure(contestant: str, case: Case) -> Sample:
        turns.append((contestant, case.prompt_tokens))
        return Sample(float(len(turns)), ())

    plan = Plan((Case(16, 4), Case(8, 4)), repeats=2, warm_up=1)
    tracks = Rounds(plan, {"a": "A", "b": "B", "c": "C"}, measure, begun.append).run()
    one_round = [("A", 16), ("B", 16), ("C", 16), ("A", 8), ("B", 8), ("C", 8)]
    assert turns == one_round * 3
    assert begun == [False, True, True]
    assert [(t.name, t.case.prompt_tokens) for t in tracks] == [
        *(("a", 16), ("a", 8)),
        *(("b", 16), ("b", 8)),
        *(("c", 16), ("c", 8)),
    ]
    # The first round of six turns warms up: B's prompt of 16 is turn 8 and turn 14.
    assert [sample.prefill_s for sample in tracks[2].samples] == [8.0, 14.0]


def test_progress_counts_turns() -> None:
    told: list[tuple[str, int, int]] = []
    plan = Plan((Case(8, 1),), repeats=1, warm_up=1)
    rounds = Rounds(plan, {"a": 0, "b": 0}, lambda contestant, case: Sample(1.0, ()))
    rounds.run(lambda *what: told.append(what))
    assert told == [("measure", done, 4) for done in range(5)]


def test_a_failure_is_its_own_row_alone() -> None:
    def measure(contestant: str, case: Case) -> Sample:
        calls.append(contestant)
        if contestant == "B" and len(calls) > 4:
            raise RuntimeError("no\n  memory")
        return Sample(1.0, ())

    calls: list[str] = []
    plan = Plan((Case(8, 1),), repeats=3, warm_up=1)
    a, b = Rounds(plan, {"a": "A", "b": "B"}, measure).run()
    assert (len(a.samples), a.failure) == (3, None)
    assert (len(b.samples), b.failure) == (1, "RuntimeError: no memory")
    assert calls == ["A", "B", "A", "B", "A", "B", "A"]  # not asked again


def test_an_interrupt_keeps_what_is_done() -> None:
    def measure(contestant: str, case: Case) -> Sample:
        calls.append(contestant)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return Sample(1.0, ())

    calls: list[str] = []
    plan = Plan((Case(8, 1),), repeats=9, warm_up=1)
    rounds = Rounds(plan, {"a": "A", "b": "B"}, measure)
    a, b = rounds.run()
    assert rounds.interrupted
    assert (len(a.samples), len(b.samples), b.failure) == (2, 1, None)
    assert len(calls) == 6


class Clocked:
    """A contestant whose calls take known times: a prefill 0.5 s, the n-th step n quarters of a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cached: list[int] = []
        self.steps = 0

    def prepare(self) -> str:
        return "clock"

    def prefill(self, rows: Sequence[Sequence[int]]) -> None:
        self.now += 0.5
        self.cached = list(rows[0])

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        self.now += 7.0
        self.cached += rows[0]

    def step(self) -> None:
        self.steps += 1
        self.now += 0.25 * self.steps
        self.cached.append(-1)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    contestant = Clocked()
    clock = SimpleNamespace(perf_counter=lambda: contestant.now, sleep=lambda s: None)
    monkeypatch.setattr(bench, "time", clock)
    return contestant


def test_a_run_is_timed_by_the_step(clocked: Clocked) -> None:
    sample = time_run(clocked, [[1, 2, 3, 4]], Case(3, new_tokens=4))
    assert sample == Sample(0.5, (0.25, 0.5, 0.75))
    assert clocked.cached == [1, 2, 3, -1, -1, -1]  # no more of the row than the prompt


def test_a_curve_fills_the_cache_up_to_each_length(clocked: Clocked) -> None:
    row = list(range(20))
    sample = time_run(clocked, [row], Case(4, 2, context_lengths=(4, 8, 15)))
    # Two steps with 4, 8 and 15 tokens in the cache; what fills it up is not timed.
    assert sample.step_s == (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
    assert clocked.cached == [0, 1, 2, 3, -1, -1, 6, 7, -1, -1, 10, 11, 12, 13, 14, -1, -1]


def test_positions_that_a_case_needs() -> None:
    assert Case(100, 20).positions == 120
    assert Case(8, 16, context_lengths=(8, 64)).positions == 80


def test_figures_by_hand() -> None:
    samples = [
        Sample(0.5, (0.01, 0.03, 0.02)),  # median 20 ms
        Sample(0.25, (0.04, 0.02, 0.06)),  # median 40 ms
    ]
    found = speed(samples, prompt_tokens=128)
    assert found.ttft_ms == Spread(375.0, 250.0, 500.0)
    assert found.prefill_tokens_per_s == Spread(384.0, 256.0, 512.0)
    decode = found.decode_tokens_per_s
    assert decode is not None
    assert (decode.median, decode.low, decode.high) == pytest.approx((37.5, 25.0, 50.0))
    assert found.energy_j_per_token is None


def test_rows_of_a_batch_count_together() -> None:
    found = speed([Sample(0.5, (0.02, 0.02), energy_j=9.24)], prompt_tokens=8, batch=4)
    assert found.ttft_ms.median == 500.0
    assert found.prefill_tokens_per_s.median == 64.0  # 4 x 8 in half a second
    assert found.decode_tokens_per_s is not None
    assert found.decode_tokens_per_s.median == pytest.approx(200.0)  # 4 in 20 ms
    assert found.energy_j_per_token is not None
    # 4 rows of 8 prompt tokens and 3 new ones: 44.
    assert found.energy_j_per_token.median == pytest.approx(0.21)


def test_percentiles_by_hand() -> None:
    # 101 steps of 0 to 100 ms: the q-th percentile is q ms.
    steps = [i / 1000 for i in range(101)]
    found = speed([Sample(1.0, tuple(steps[:7])), Sample(1.0, tuple(steps[7:]))], 8)
    found_ms = (found.decode_p50_ms, found.decode_p95_ms, found.decode_p99_ms)
    assert found_ms == pytest.approx((50.0, 95.0, 99.0))


def test_points_of_a_curve_by_hand() -> None:
    case = Case(4, 2, batch=3, context_lengths=(4, 8))
    samples = [Sample(1.0, (0.01, 0.03, 0.1, 0.1)), Sample(1.0, (0.06, 0.06, 0.1, 0.1))]
    short, long = curve(samples, case)
    assert (short.context_length, long.context_length) == (4, 8)
    rate = short.decode_tokens_per_s  # 3 rows by 20 ms, and by 60 ms
    assert (rate.median, rate.low, rate.high) == pytest.approx((100.0, 50.0, 150.0))
    assert short.decode_p50_ms == pytest.approx(45.0)  # between 30 and 60
    assert long.decode_tokens_per_s.median == pytest.approx(30.0)


def test_odd_and_even_medians() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0, 1.0, 2.0, 3.0]) == Spread(2.5, 1.0, 4.0)


def test_one_new_token_has_no_steps() -> None:
    found = speed([Sample(0.5, ())], prompt_tokens=8)
    assert (found.decode_tokens_per_s, found.decode_p95_ms) == (None, None)
    assert math.isclose(found.prefill_tokens_per_s.median, 16.0)
    assert round_figures(Sample(0.5, ()), 8).decode_tokens_per_s is None


def test_reasons_are_one_line() -> None:
    assert reason(InputError("too long", fix="cut it")) == "too long; cut it"
    assert reason(ValueError("two\nlines")) == "ValueError: two lines"
