"""A whole benchmark with contestants that compute nothing: processes, footprints, interrupts, the file."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.contestants import entry, spec

from onnxlm.errors import InputError
from onnxlm.runtime import bench_run
from onnxlm.runtime.bench import Case, Plan, Sample
from onnxlm.runtime.bench_child import Child, ChildError, Spec
from onnxlm.runtime.bench_footprint import Footprint, measure_footprint
from onnxlm.runtime.bench_report import Rates, Report, read_report
from onnxlm.runtime.bench_run import Entry, run_benchmark
from onnxlm.runtime.graph_cost import Work

CASE = Case(8, 3)
PLAN = Plan((CASE,), repeats=2)
FOOTPRINT = Footprint(0.25, 0.5, 300_000_000, 200_000_000, 50_000_000, "")
RATES = {"read_bytes_per_s": 1e10, "fp32_flops_per_s": 1e11, "int8_ops_per_s": 4e11}


@pytest.fixture(autouse=True)
def no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of known rates."""

    def measure(self: Any, counts: bool) -> None:
        if counts:
            self.found.setdefault(1, []).append(RATES)

    monkeypatch.setattr(bench_run._Machine, "open", lambda self, threads: None)
    monkeypatch.setattr(bench_run._Machine, "measure", measure)


@pytest.fixture
def no_footprints(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Spec, Case, int]]:
    """Footprints that cost nothing, and what they were asked for."""
    asked: list[tuple[Spec, Case, int]] = []

    def footprint(of: Spec, rows: list[list[int]], case: Case, loads: int) -> Footprint:
        assert len(rows) == case.batch
        asked.append((of, case, loads))
        return FOOTPRINT

    monkeypatch.setattr(bench_run, "measure_footprint", footprint)
    return asked


def run(*entries: Entry, plan: Plan = PLAN) -> Report:
    return run_benchmark(entries, plan, loads=1)


def test_a_run_with_processes_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    report = run(*(entry(name, log=str(log)) for name in "ab"), plan=Plan((Case(8, 3, 2),), 2))
    lines = log.read_text(encoding="utf-8").splitlines()
    # A load that fills the caches, and one that is measured with its run; then the rounds in turn.
    footprint = ["prepare", "prepare", "prefill 8 8", "step", "step"]
    before = [f"{name} {what}" for name in "ab" for what in footprint]
    one_round = [f"{name} {what}" for name in "ab" for what in ("prefill 8 8", "step", "step")]
    assert lines == [*before, "a prepare", "b prepare", *one_round * 3]
    for who, row in zip(report.contestants, report.rows, strict=True):
        assert (row.repeats, row.failure, who.runs_on) == (2, None, "FakeProvider")
        assert row.speed is not None
        assert len(row.rounds) == 2
        assert who.libraries.keys() >= {"onnxlm", "onnxruntime", "numpy"}
        assert who.footprint is not None
        assert who.footprint.load_s >= 0
        assert who.footprint.first_run_s >= 0
        if sys.platform == "linux":
            assert (who.footprint.peak_rss_bytes or 0) > 10_000_000
            assert (who.footprint.pss_bytes or 0) >= 1_000_000
    assert report.rates[0].read_bytes_per_s.median == 1e10


def test_the_case_that_needs_most_is_the_footprint_s(
    no_footprints: list[tuple[Spec, Case, int]],
) -> None:
    plan = Plan((Case(8, 3, 2), Case(62, 3), Case(32, 3), Case(8, 4, 4)), repeats=1)
    report = run(entry("a"), plan=plan)
    assert [(case, loads) for _, case, loads in no_footprints] == [(Case(8, 4, 4), 1)]
    assert [row.failure for row in report.rows] == [
        None,
        "prompt and new tokens are 65, the context has 64",
        None,
        None,
    ]


def test_a_curve_is_no_row(no_footprints: object) -> None:
    plan = Plan((CASE, Case(4, 2, context_lengths=(4, 16))), repeats=2)
    report = run(entry("a"), plan=plan)
    assert len(report.rows) == 1
    (curve,) = report.curves
    assert (curve.contestant, curve.repeats) == (0, 2)
    assert [point.context_length for point in curve.points] == [4, 16]


def test_what_cannot_run_is_a_row_that_says_why(tmp_path: Path) -> None:
    missing = entry("missing")
    missing.failure = "the wheel has no FakeProvider"
    report = run(entry("bad", fails_to_load="no such device"), missing, entry("good"))
    found = [(report.who(r).label.model, r.failure, r.speed is None) for r in report.rows]
    assert found == [
        ("bad", "no such device", True),
        ("missing", "the wheel has no FakeProvider", True),
        ("good", None, False),
    ]


def test_a_child_that_dies_is_a_reason() -> None:
    with pytest.raises(ChildError, match=r"^its process ended with code 3$"):
        measure_footprint(spec("a", dies=-3), [[1]], Case(1, 1), loads=1)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_a_killed_child_points_at_memory() -> None:
    with pytest.raises(
        ChildError, match=r"^its process was killed, as a system without free memory"
    ):
        measure_footprint(spec("a", dies=int(signal.SIGKILL)), [[1]], Case(1, 1), loads=1)


def test_an_interpreter_that_is_not_there_or_lacks_libraries(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=r"^/nowhere/python cannot be started: No such file"):
        Child(Spec("x:Y", python="/nowhere/python"))
    bare = Spec("support.contestants:FakeContestant", {"name": "a"}, imports=("no_such_library",))
    child = Child(bare)
    with pytest.raises(ChildError, match=r"ModuleNotFoundError: No module named 'no_such_library'"):
        child.load()
    child.stop()


def test_a_failure_after_some_rounds_keeps_their_figures(no_footprints: object) -> None:
    report = run(entry("a", fails_at=3), plan=Plan((Case(8, 2),), repeats=5))
    (row,) = report.rows
    assert (row.repeats, row.failure) == (1, "RuntimeError: out of room")
    assert row.speed is not None


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the user press Ctrl-C in the n-th run."""

    def at(number: int) -> None:
        run_child, calls = Child.run, [0]

        def counted(self: Child, *what: Any) -> Sample:
            calls[0] += 1
            if calls[0] == number:
                raise KeyboardInterrupt
            return run_child(self, *what)

        monkeypatch.setattr(Child, "run", counted)

    return at


def test_an_interrupt_in_a_round_keeps_rows(
    no_footprints: object, interrupt: Callable[[int], None]
) -> None:
    interrupt(6)
    report = run(entry("a"), entry("b"), plan=Plan((CASE,), repeats=5))
    assert report.interrupted
    assert [(row.repeats, row.failure) for row in report.rows] == [(2, None), (1, None)]


def test_an_interrupt_before_the_rounds_gives_rows_too(interrupt: Callable[[int], None]) -> None:
    interrupt(2)  # the footprint of b
    report = run(entry("a"), entry("b"))
    assert report.interrupted
    assert [row.failure for row in report.rows] == ["interrupted before its turn"] * 2
    assert f"interrupted: 0 of {report.plan.repeats} rounds were run to the end" in report.notes()
    footprints = [who.footprint for who in report.contestants]
    assert footprints[0] is not None
    assert footprints[1] is None


def test_shares_of_the_roofline_by_hand(
    no_footprints: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "_BOUNDED", "FakeProvider")
    monkeypatch.setattr(Child, "run", lambda self, rows, case: Sample(0.25, (0.1, 0.05, 0.04)))
    known = entry("a")
    # At 10 GB/s and 400 G operations a second: 0.1 s to read against 0.05 s to multiply; 0.02 s to read.
    known.work = lambda case: (Work(10**9, 2 * 10**10), Work(2 * 10**8, 10**6))
    (row,) = run(known).rows
    assert row.prefill_of_roofline == pytest.approx(0.4)
    assert row.decode_of_roofline == pytest.approx(0.4)  # 0.02 by 0.05


def test_a_report_comes_back_from_its_file(no_footprints: object, tmp_path: Path) -> None:
    plan = Plan((CASE, Case(4, 2, context_lengths=(4, 16))), repeats=2)
    report = run(entry("a"), entry("b", fails_to_load="no"), plan=plan)
    file = tmp_path / "bench.json"
    file.write_text(report.to_json(), encoding="utf-8")
    assert read_report(file) == report


def test_the_file_has_the_fields_of_its_version(no_footprints: object) -> None:
    value = json.loads(run(entry("a")).to_json())
    assert value["schema"] == "onnxlm.bench/3"
    assert set(value) == {
        *("schema", "machine", "created", "plan", "rates", "foreign_load_cores", "energy_note"),
        *("interrupted", "contestants", "rows", "curves", "warnings"),
    }
    assert set(value["machine"]) == {
        *("cpu", "cpu_flags", "cores", "memory_bytes", "os", "python", "libraries"),
    }
    case = {"prompt_tokens": 8, "new_tokens": 3, "batch": 1, "context_lengths": []}
    assert value["plan"] == {"cases": [case], "repeats": 2, "warm_up": 1}
    (who,), (row,) = value["contestants"], value["rows"]
    assert set(who) == {"label", "runs_on", "libraries", "footprint", "fallback", "nodes"}
    assert set(row) == {
        *("contestant", "case", "repeats", "failure", "speed", "rounds"),
        *("prefill_of_roofline", "decode_of_roofline"),
    }
    assert set(row["speed"]) == {
        *("ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s", "energy_j_per_token"),
        *("decode_p50_ms", "decode_p95_ms", "decode_p99_ms"),
    }
    assert set(value["rates"][0]) == set(Rates.__dataclass_fields__)
    assert who["label"]["quality"] == {"kl": 0.0123, "top1": 0.95}
    assert who["footprint"]["pss_bytes"] == 200_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "is no report of a benchmark; found no field 'schema'; make it anew"),
        ('{"schema": "onnxlm.bench/1"}', "is no report of a benchmark; found onnxlm.bench/1; make"),
        ('{"schema": "onnxlm.bench/3"}', "field 'machine' is missing; make it anew"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as raised:
        read_report(file)
    assert message in str(raised.value)
    assert str(file) in str(raised.value)
