"""A whole benchmark with contestants that compute nothing: rows, footprints in children, interrupts, JSON."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence

import pytest
from support.contestants import FakeContestant, Turn, entry

from onnxlm.runtime import bench_run
from onnxlm.runtime.bench import Plan
from onnxlm.runtime.bench_child import ChildError, Footprint, measure_footprint
from onnxlm.runtime.bench_figures import Speed, Spread
from onnxlm.runtime.bench_report import HEADER, Label, Report, Row
from onnxlm.runtime.bench_run import Entry, run_benchmark

PLAN = Plan(prompt_tokens=(8,), new_tokens=3, repeats=2)
FOOTPRINT = Footprint(0.25, 300_000_000, 200_000_000, 50_000_000, "")


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, int, int, int]]:
    """Footprints that cost nothing, and what they were asked for."""
    asked: list[tuple[object, int, int, int]] = []

    def footprint(contestant: object, ids: Sequence[int], new: int, loads: int) -> Footprint:
        asked.append((contestant, len(ids), new, loads))
        return FOOTPRINT

    monkeypatch.setattr(bench_run, "measure_footprint", footprint)
    return asked


def run(*entries: Entry, plan: Plan = PLAN) -> Report:
    return run_benchmark(entries, plan, threads=1, loads=1)


def test_a_run_with_children_of_its_own() -> None:
    log: list[Turn] = []
    fakes = [FakeContestant("a", log), FakeContestant("b", log)]
    report = run(*map(entry, fakes))
    one_run = ["prefill", "step", "step"]
    assert [what for name, what, _ in log if name == "a"] == ["prepare", *one_run * 3]
    # Both are loaded before either runs, and then they take turns.
    assert [name for name, what, _ in log if what != "step"] == [*"ab", *"ab" * 3]
    for row in report.rows:
        assert (row.repeats, row.failure, row.runs_on) == (2, None, "FakeProvider")
        assert row.speed is not None
        assert row.footprint is not None
        assert row.footprint.load_s >= 0
        if sys.platform == "linux":
            assert (row.footprint.peak_rss_bytes or 0) > 10_000_000
            assert (row.footprint.pss_bytes or 0) >= 1_000_000


def test_the_longest_prompt_that_fits_is_the_footprint_s(
    no_children: list[tuple[object, int, int, int]],
) -> None:
    fake = FakeContestant("a")
    plan = Plan((8, 62, 32), new_tokens=3, repeats=1)
    report = run(entry(fake, (8, 62, 32)), plan=plan)
    assert no_children == [(fake, 32, 3, 1)]
    assert [row.failure for row in report.rows] == [
        None,
        "prompt and new tokens are 65, the context has 64",
        None,
    ]


def test_what_cannot_run_is_a_row_that_says_why() -> None:
    good, bad = FakeContestant("good"), FakeContestant("bad", fails_to_load="no such device")
    missing = entry(FakeContestant("missing"))
    missing.failure = "the wheel has no FakeProvider"
    report = run(entry(bad), missing, entry(good))
    found = [(row.label.model, row.failure, row.speed is None) for row in report.rows]
    assert found == [
        ("bad", "no such device", True),
        ("missing", "the wheel has no FakeProvider", True),
        ("good", None, False),
    ]
    assert report.remarks() == [
        "not run: bad on fake, prompt 8: no such device",
        "not run: missing on fake, prompt 8: the wheel has no FakeProvider",
    ]
    assert report.rows[0].cells()[:9] == (
        *("bad", "fake", "int8", "8", "0.0123", "0.950", "-", "not run", "-"),
    )


def test_a_child_that_dies_is_a_reason() -> None:
    with pytest.raises(ChildError, match=r"^its process ended with code 3$"):
        measure_footprint(FakeContestant("a", dies=-3), [1], 1, loads=1)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_a_killed_child_points_at_memory() -> None:
    with pytest.raises(
        ChildError, match=r"^its process was killed, as a system without free memory"
    ):
        measure_footprint(FakeContestant("a", dies=signal.SIGKILL), [1], 1, loads=1)


def test_a_failure_after_some_rounds_keeps_their_figures(no_children: object) -> None:
    fake = FakeContestant("a", fails_at=3)
    report = run(entry(fake), plan=Plan((8,), 2, repeats=5))
    (row,) = report.rows
    assert (row.repeats, row.failure) == (1, "RuntimeError: out of room")
    assert row.speed is not None
    assert report.remarks() == [
        "stopped after 1 rounds: a on fake, prompt 8: RuntimeError: out of room"
    ]


def test_an_interrupt_in_a_round_keeps_rows(no_children: object) -> None:
    fakes = [FakeContestant("a"), FakeContestant("b", interrupts_at=3)]
    report = run(*map(entry, fakes), plan=Plan((8,), 2, repeats=5))
    assert report.interrupted
    assert [(row.repeats, row.failure) for row in report.rows] == [(2, None), (1, None)]


def test_an_interrupt_before_the_rounds_gives_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def footprint(contestant: FakeContestant, *rest: object) -> Footprint:
        if contestant.name == "b":
            raise KeyboardInterrupt
        return FOOTPRINT

    monkeypatch.setattr(bench_run, "measure_footprint", footprint)
    report = run(entry(FakeContestant("a")), entry(FakeContestant("b")))
    assert report.interrupted
    found = [(row.footprint, row.failure) for row in report.rows]
    assert found == [
        (FOOTPRINT, "interrupted before its turn"),
        (None, "interrupted before its turn"),
    ]


def test_json_has_the_fields_of_its_version(no_children: object) -> None:
    value = json.loads(run(entry(FakeContestant("a"))).to_json())
    assert value["schema"] == "onnxlm.bench/1"
    assert set(value) == {
        *("schema", "machine", "threads", "plan", "foreign_load_cores", "interrupted", "rows"),
    }
    assert set(value["machine"]) == {
        *("cpu", "cpu_flags", "cores", "memory_bytes", "os", "python", "libraries"),
    }
    assert value["machine"]["libraries"].keys() >= {"onnxlm", "onnxruntime", "numpy"}
    assert value["plan"] == {"prompt_tokens": [8], "new_tokens": 3, "repeats": 2, "warm_up": 1}
    (row,) = value["rows"]
    assert set(row) == {
        *("label", "prompt_tokens", "repeats", "failure", "runs_on", "footprint", "speed"),
    }
    assert row["label"]["quality"] == {"kl": 0.0123, "top1": 0.95}
    assert set(row["speed"]) == {
        *("ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s", "decode_p95_ms"),
    }
    assert set(row["speed"]["ttft_ms"]) == {"median", "low", "high"}
    assert row["footprint"]["pss_bytes"] == 200_000_000


def report_of(*rows: Row, foreign: float | None = None) -> Report:
    machine = run_benchmark([], PLAN, 1).machine
    return Report(machine, 1, PLAN, foreign, False, rows)


def row_of(model: str, prefill: float, decode: float, **label: object) -> Row:
    fields = {"model": model, "provider": "cpu", "ort_name": None, "precision": "int8", **label}
    figures = Speed(
        ttft_ms=Spread(100.4, 99.0, 120.0),
        prefill_tokens_per_s=Spread(prefill, prefill, prefill),
        decode_tokens_per_s=Spread(decode, decode, decode),
        decode_p95_ms=8.25,
    )
    return Row(Label(**fields), 8, 5, None, "CPUExecutionProvider", FOOTPRINT, figures)


def test_a_row_holds_everything_at_once() -> None:
    row = row_of("m", 812.0, 131.4, file_bytes=152_400_000, quality={"kl": 0.0027, "top1": 0.965})
    cells = dict(zip(HEADER, row.cells(), strict=True))
    assert cells == {
        "model": "m",
        "provider": "cpu",
        "precision": "int8",
        "prompt": "8",
        "KL": "0.0027",
        "top-1": "0.965",
        "load s": "0.25",
        "TTFT ms": "100 (99-120)",
        "prefill tok/s": "812 (812-812)",
        "decode tok/s": "131 (131-131)",
        "p95 ms": "8.2",
        "peak RSS MB": "300",
        "PSS MB": "200",
        "file MB": "152",
    }


def test_another_provider_than_asked_for_is_named() -> None:
    row = row_of("m", 1.0, 1.0, provider="cuda", ort_name="CUDAExecutionProvider")
    assert row.cells()[1] == "cuda (ran on CPU)"
    assert row_of("m", 1.0, 1.0, ort_name="CPUExecutionProvider").cells()[1] == "cpu"


def test_ratios_to_the_baseline() -> None:
    base = row_of("eager", 200.0, 20.0, provider="torch", baseline=True)
    lines = report_of(row_of("m", 300.0, 90.0), base).ratios()
    assert lines == ["m on cpu by eager, prompt 8: prefill 1.5x, decode 4.5x"]


def test_a_busy_machine_is_said() -> None:
    assert report_of(foreign=0.1).notes() == []
    assert report_of(foreign=1.26).notes() == [
        "other processes kept 1.3 cores busy meanwhile: the figures are lower than those of an idle machine"
    ]
