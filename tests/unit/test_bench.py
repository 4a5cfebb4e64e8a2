"""Rounds of the benchmark: whose turn it is, what counts, and the figures by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from support.contestants import FakeContestant

from onnxlm.errors import InputError
from onnxlm.runtime import bench
from onnxlm.runtime.bench import Plan, Rounds, Sample, reason, time_run
from onnxlm.runtime.bench_figures import Spread, speed


def test_contestants_take_turns_in_every_round() -> None:
    turns: list[tuple[str, int]] = []

    def measure(contestant: str, prompt_tokens: int) -> Sample:
        turns.append((contestant, prompt_tokens))
        return Sample(float(len(turns)), ())

    plan = Plan(prompt_tokens=(16, 8), new_tokens=4, repeats=2, warm_up=1)
    tracks = Rounds(plan, {"a": "A", "b": "B", "c": "C"}, measure).run()
    one_round = [("A", 16), ("B", 16), ("C", 16), ("A", 8), ("B", 8), ("C", 8)]
    assert turns == one_round * 3
    assert [(t.name, t.prompt_tokens) for t in tracks] == [
        *(("a", 16), ("a", 8)),
        *(("b", 16), ("b", 8)),
        *(("c", 16), ("c", 8)),
    ]
    # The first round of six turns warms up: B's prompt of 16 is turn 8 and turn 14.
    assert [sample.prefill_s for sample in tracks[2].samples] == [8.0, 14.0]


def test_progress_counts_turns() -> None:
    told: list[tuple[str, int, int]] = []
    plan = Plan((8,), new_tokens=1, repeats=1, warm_up=1)
    rounds = Rounds(plan, {"a": 0, "b": 0}, lambda contestant, n: Sample(1.0, ()))
    rounds.run(lambda *what: told.append(what))
    assert told == [("measure", done, 4) for done in range(5)]


def test_a_failure_is_its_own_row_alone() -> None:
    def measure(contestant: str, prompt_tokens: int) -> Sample:
        calls.append(contestant)
        if contestant == "B" and len(calls) > 4:
            raise RuntimeError("no\n  memory")
        return Sample(1.0, ())

    calls: list[str] = []
    plan = Plan((8,), new_tokens=1, repeats=3, warm_up=1)
    a, b = Rounds(plan, {"a": "A", "b": "B"}, measure).run()
    assert (len(a.samples), a.failure) == (3, None)
    assert (len(b.samples), b.failure) == (1, "RuntimeError: no memory")
    assert calls == ["A", "B", "A", "B", "A", "B", "A"]  # not asked again


def test_an_interrupt_keeps_what_is_done() -> None:
    def measure(contestant: str, prompt_tokens: int) -> Sample:
        calls.append(contestant)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return Sample(1.0, ())

    calls: list[str] = []
    rounds = Rounds(Plan((8,), new_tokens=1, repeats=9, warm_up=1), {"a": "A", "b": "B"}, measure)
    a, b = rounds.run()
    assert rounds.interrupted
    assert (len(a.samples), len(b.samples), b.failure) == (2, 1, None)
    assert len(calls) == 6


def test_a_run_is_timed_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    pauses: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=pauses.append)
    monkeypatch.setattr(bench, "time", clock)

    class Slow(FakeContestant):
        def prefill(self, ids: object) -> None:
            now[0] += 0.5

        def step(self) -> None:
            now[0] += 0.25 * (1 + len(self.log))
            self.log.append(("", "", 0))

    sample = time_run(Slow("slow"), [1, 2, 3], new_tokens=4)
    assert sample == Sample(0.5, (0.25, 0.5, 0.75))
    assert pauses == [bench.SETTLE_S]


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


def test_p95_by_hand() -> None:
    # 20 steps of 1 to 20 ms: 0.95 of the way from the first to the last is 18.05, between the 19th and 20th.
    steps = [i / 1000 for i in range(1, 21)]
    found = speed([Sample(1.0, tuple(steps[:7])), Sample(1.0, tuple(steps[7:]))], 8)
    assert found.decode_p95_ms == pytest.approx(19.05)


def test_odd_and_even_medians() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0, 1.0, 2.0, 3.0]) == Spread(2.5, 1.0, 4.0)


def test_one_new_token_has_no_steps() -> None:
    found = speed([Sample(0.5, ())], prompt_tokens=8)
    assert (found.decode_tokens_per_s, found.decode_p95_ms) == (None, None)
    assert math.isclose(found.prefill_tokens_per_s.median, 16.0)


def test_reasons_are_one_line() -> None:
    assert reason(InputError("too long", fix="cut it")) == "too long; cut it"
    assert reason(ValueError("two\nlines")) == "ValueError: two lines"
