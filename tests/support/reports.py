"""Reports of benchmarks that nobody measured, for what shows and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxlm.runtime.bench import Case, Plan, Sample
from onnxlm.runtime.bench_figures import Spread, round_figures, speed
from onnxlm.runtime.bench_footprint import Footprint
from onnxlm.runtime.bench_report import Contestant, Curve, Label, Rates, Report, Row
from onnxlm.runtime.machine import Machine

MACHINE = Machine("Some CPU", ("avx2",), 2, 8_000_000_000, "Linux", "3.12.1", {"numpy": "2.4"})
FOOTPRINT = Footprint(0.25, 0.5, 300_000_000, 200_000_000, 50_000_000, "")
CASE = Case(8, 4)


def contestant(model: str, **label: Any) -> Contestant:
    """A package on the CPU, unless `label` says otherwise."""
    fields = {"model": model, "provider": "cpu", "ort_name": None, "precision": "int8"}
    made = Label(**{**fields, "threads": 1, **label})
    return Contestant(made, "CPUExecutionProvider", {"onnxruntime": "1.32.0"}, FOOTPRINT)


def row(
    who: int, prefill: Sequence[float], decode: Sequence[float], case: Case = CASE, **more: Any
) -> Row:
    """Rounds with these tokens a second."""
    samples = [
        Sample(case.prompt_tokens * case.batch / p, (case.batch / d,) * 3)
        for p, d in zip(prefill, decode, strict=True)
    ]
    return Row(
        contestant=who,
        case=case,
        repeats=len(samples),
        failure=None,
        speed=speed(samples, case.prompt_tokens, case.batch) if samples else None,
        rounds=tuple(round_figures(s, case.prompt_tokens, case.batch) for s in samples),
        **more,
    )


def report(
    contestants: Sequence[Contestant],
    rows: Sequence[Row],
    curves: Sequence[Curve] = (),
    read_rate: float = 2e10,
    **more: Any,
) -> Report:
    """A report of these rows, on a machine that reads so many bytes a second."""
    cases = dict.fromkeys(r.case for r in (*rows, *curves))
    fields: dict[str, Any] = {
        "machine": MACHINE,
        "created": "2026-01-01T00:00:00+00:00",
        "plan": Plan(tuple(cases), 5),
        "rates": (Rates(1, flat(read_rate), flat(1e11), flat(4e11)),),
        "foreign_load_cores": 0.0,
        "energy_note": "",
        "interrupted": False,
        "contestants": tuple(contestants),
        "rows": tuple(rows),
        "curves": tuple(curves),
    }
    return Report(**(fields | more))


def flat(value: float) -> Spread:
    """A figure that was the same in every round."""
    return Spread(value, value, value)
