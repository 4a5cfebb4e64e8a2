"""What goes wrong in a run costs no more than itself: the machine's rates, one case, the rounds left."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from typing import Any

import pytest
from support.contestants import entry, spec
from support.packages import sample_manifest
from support.reports import contestant, report, row

from onnxlm.runtime import bench_run, bench_worker
from onnxlm.runtime.bench import Case, Plan, Sample
from onnxlm.runtime.bench_child import ChildError
from onnxlm.runtime.bench_footprint import CaseError, Footprint, measure_footprint
from onnxlm.runtime.bench_package import cache_refusal
from onnxlm.runtime.bench_run import _Machine, run_benchmark
from onnxlm.runtime.bench_tables import remarks, summary

FOOTPRINT = Footprint(0.25, 0.5, 300_000_000, 200_000_000, 50_000_000, "")
DIED = "its process was killed, as a system without free memory does"


@pytest.fixture
def no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Machine, "open", lambda self, threads: None)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_without_the_machine_s_rates_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, rounds = _Machine.measure, [0]

    def dying(self: _Machine, counts: bool) -> None:
        rounds[0] += 1
        if rounds[0] == 3:
            for child in self.children.values():
                os.kill(child._process.pid, signal.SIGKILL)
        measure(self, counts)

    monkeypatch.setattr(_Machine, "measure", dying)
    found = run_benchmark([entry("a")], Plan((Case(8, 3),), repeats=3), loads=1)
    assert [(r.repeats, r.failure) for r in found.rows] == [(3, None)]
    assert found.rates == ()
    note = f"the machine's own rates with 1 threads were not measured: {DIED}"
    assert found.warnings == (note,)
    assert note in found.notes()


def test_rates_that_cannot_even_begin_cost_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_child(of: Any) -> None:
        raise ChildError("no more processes")

    machine = _Machine()
    monkeypatch.setattr(bench_run, "Child", no_child)
    machine.open([1, 2])
    machine.measure(counts=True)
    assert machine.rates() == ()
    assert [line.rpartition(": ")[2] for line in machine.warnings] == ["no more processes"] * 2


@pytest.mark.usefixtures("no_rates")
def test_a_case_without_room_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def footprint(of: Any, rows: Any, case: Case, loads: int) -> Footprint:
        asked.append(case.batch)
        if case.batch > 2:
            raise CaseError("no room")
        return FOOTPRINT

    monkeypatch.setattr(bench_run, "measure_footprint", footprint)
    cases = tuple(Case(8, 3, batch) for batch in (1, 4, 2, 3))
    found = run_benchmark([entry("a")], Plan(cases, repeats=1), loads=1)
    assert asked == [4, 3, 2]
    assert [(r.case.batch, r.failure) for r in found.rows] == [
        *((1, None), (4, "no room")),
        *((2, None), (3, "no room")),
    ]
    assert found.contestants[0].footprint == FOOTPRINT


@pytest.mark.usefixtures("no_rates")
def test_a_model_that_does_not_load_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def footprint(of: Any, rows: Any, case: Case, loads: int) -> Footprint:
        asked.append(case.batch)
        raise ChildError("does not load")

    monkeypatch.setattr(bench_run, "measure_footprint", footprint)
    plan = Plan((Case(8, 3), Case(8, 3, 2)), repeats=1)
    found = run_benchmark([entry("a")], plan, loads=1)
    assert asked == [2]
    assert [r.failure for r in found.rows] == ["does not load"] * 2


def test_a_footprint_tells_a_case_from_a_load() -> None:
    with pytest.raises(CaseError, match="out of room"):
        measure_footprint(spec("a", fails_at=1), [[1]], Case(1, 1), loads=1)
    with pytest.raises(ChildError, match="no such device") as raised:
        measure_footprint(spec("a", fails_to_load="no such device"), [[1]], Case(1, 1), loads=1)
    assert not isinstance(raised.value, CaseError)


def test_a_cache_larger_than_the_machine_is_refused_before_its_rows_are_made() -> None:
    states = sample_manifest().states
    on_cpu = cache_refusal(states, "cpu")
    assert on_cpu(Case(8, 4)) is None
    assert "keys and values need" in (on_cpu(Case(8, 4, 10**12)) or "")
    assert cache_refusal(states, "cuda")(Case(8, 4, 10**12)) is None


def test_rounds_that_were_done_are_told_without_those_that_failed_on_their_own() -> None:
    rows = [row(0, [1.0] * 3, [1.0] * 3), row(1, [1.0] * 4, [1.0] * 4)]
    bad = dataclasses.replace(row(2, [], []), failure="no such device")
    who = [contestant(name) for name in "abc"]
    found = report(who, [*rows, bad], interrupted=True)
    assert found.rounds_done == 3
    assert "interrupted: 3 of 5 rounds were run to the end" in found.notes()
    assert summary(found).startswith("Some CPU; 3 rounds: ")
    early = dataclasses.replace(bad, failure="interrupted before its turn")
    assert report(who, [*rows, early], interrupted=True).rounds_done == 0
    assert report(who, [*rows, bad]).rounds_done == 5
    assert remarks(found) == ["not run: c on cpu, prompt 8: no such device"]


def test_energy_is_that_of_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of others go to sleep before the counters are read."""
    order: list[str] = []
    monkeypatch.setattr(bench_worker, "settle", lambda: order.append("settle"))
    worker = bench_worker._Worker(
        {"target": "support.contestants:FakeContestant", "fields": {"name": "a"}, "imports": []}
    )

    def time_run(*rest: Any) -> Sample:
        order.append("run")
        return Sample(1.0, ())

    class Meter:
        def start(self) -> str:
            order.append("start")
            return "then"

        def joules_since(self, start: str) -> float:
            order.append("stop")
            return 2.0

    monkeypatch.setattr(bench_worker, "time_run", time_run)
    monkeypatch.setattr(worker, "_meter", Meter())
    case = {"prompt_tokens": 1, "new_tokens": 1}
    assert worker.run({"rows": [[1]], "case": case})["energy_j"] == 2.0
    assert order == ["settle", "start", "run", "stop"]
