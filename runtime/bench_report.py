"""Results of a benchmark: everything known of each contestant, and the JSON file that holds it.

The fields of these classes are the file's; `docs/benchmarking.md` describes them. A change of them is a new
version of `SCHEMA`. Files of an earlier version are read where what is new may be missing (`YOUNGER`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from onnxlm import strict_json
from onnxlm.errors import InputError, PackageError
from onnxlm.runtime.bench import Case, Plan
from onnxlm.runtime.bench_figures import Point, Round, Speed, Spread
from onnxlm.runtime.bench_footprint import Footprint
from onnxlm.runtime.machine import Machine

SCHEMA = "onnxlm.bench/3"
_READ = (SCHEMA, "onnxlm.bench/2")
# Why a row has no figures though nothing failed.
INTERRUPTED = "interrupted before its turn"
# From here on others disturb the figures.
BUSY_CORES = 0.2
_T = TypeVar("_T")


def _younger(default: _T) -> _T:
    """A field that files of the version before have not."""
    return field(default=default, metadata={strict_json.YOUNGER: True})


@dataclass(frozen=True)
class Label:
    """What is known of a contestant before it runs.

    Attributes:
        model: A package's folder, or what a baseline is.
        provider: The execution provider asked for, or a baseline's library.
        ort_name: ONNX Runtime's name of that provider; None for a baseline.
        precision: Of the weights.
        threads: Threads inside an operator.
        file_bytes: Size of graphs and weights; None for a baseline.
        quality: "kl" and "top1" against the full-precision model, as the manifest has them.
        baseline: Packages are compared with it.
        source: What the package was made from, or what a baseline loads: the two are compared where that is
            the same.
        options: Of the session, where they were given: kv_budget, device_id, gpu_mem_limit, graph_capture.
    """

    model: str
    provider: str
    ort_name: str | None
    precision: str
    threads: int
    file_bytes: int | None = None
    quality: Mapping[str, float] = field(default_factory=dict)
    baseline: bool = False
    source: str | None = _younger(None)
    options: Mapping[str, Any] | None = _younger(None)


@dataclass(frozen=True)
class Contestant:
    """One contestant, and what was measured of it before the rounds.

    Attributes:
        label: Who.
        runs_on: ONNX Runtime's name of the provider that really ran, or a baseline's library.
        libraries: Versions of Python and of the libraries in its process.
        footprint: Load time, first run and memory, on the case that needs most of those that run.
        fallback: Why it did not, or not wholly, run on the provider asked for; None when it did.
        nodes: Graph -> provider -> operator -> nodes, by ONNX Runtime's names; None where it does not tell,
            as on the CPU alone.
    """

    label: Label
    runs_on: str | None
    libraries: Mapping[str, str]
    footprint: Footprint | None
    fallback: str | None = _younger(None)
    nodes: Mapping[str, Mapping[str, Mapping[str, int]]] | None = _younger(None)

    @property
    def provider(self) -> str:
        """The provider asked for, and the one that ran where that is another."""
        wanted = self.label.ort_name
        if wanted is None or self.runs_on is None or wanted == self.runs_on:
            return f"{self.label.provider}{'' if self.fallback is None else ' (partly on CPU)'}"
        return f"{self.label.provider} (ran on {self.runs_on.removesuffix('ExecutionProvider')})"


@dataclass(frozen=True)
class Row:
    """Figures of one contestant on one case; None is what was not measured.

    Attributes:
        contestant: Its place among the report's contestants.
        case: What ran.
        repeats: Rounds that the figures are of.
        failure: Why it was not run, or not to the end.
        speed: The figures.
        rounds: Those of each round.
        prefill_of_roofline: The least time of the prefill's weights and products at the machine's best rates,
            by the median time that it took.
        decode_of_roofline: The same of a decode step, its cache included.
    """

    contestant: int
    case: Case
    repeats: int
    failure: str | None
    speed: Speed | None
    rounds: tuple[Round, ...] = ()
    prefill_of_roofline: float | None = None
    decode_of_roofline: float | None = None


@dataclass(frozen=True)
class Curve:
    """Decode speed of one contestant by the length of its context.

    Attributes:
        contestant: Its place among the report's contestants.
        case: What ran.
        repeats: Rounds that the figures are of.
        failure: Why it was not run, or not to the end.
        points: One a context length; none without a round.
    """

    contestant: int
    case: Case
    repeats: int
    failure: str | None
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Rates:
    """What the machine did with so many threads, in the same rounds.

    Attributes:
        threads: Threads.
        read_bytes_per_s: Reading memory.
        fp32_flops_per_s: Multiplying float32 matrices, by ONNX Runtime's kernel.
        int8_ops_per_s: Multiplying matrices of bytes, by ONNX Runtime's kernel.
    """

    threads: int
    read_bytes_per_s: Spread
    fp32_flops_per_s: Spread
    int8_ops_per_s: Spread


@dataclass(frozen=True)
class Report:
    """A run.

    Attributes:
        machine: What it ran on.
        created: When, as ISO 8601 in UTC.
        plan: What each contestant ran.
        rates: The machine's own, by number of threads.
        foreign_load_cores: Cores that other processes used during a run, median; None where the system
            does not tell.
        energy_note: Why energy was not measured; empty when it was.
        interrupted: It was stopped; rows hold what was done.
        contestants: In the order in which they took turns.
        rows: By contestant, then by case.
        curves: By contestant, then by case.
        warnings: What went wrong beside the contestants, a line each.
        schema: Name and version of this form.
    """

    machine: Machine
    created: str
    plan: Plan
    rates: tuple[Rates, ...]
    foreign_load_cores: float | None
    energy_note: str
    interrupted: bool
    contestants: tuple[Contestant, ...]
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    warnings: tuple[str, ...] = _younger(())
    schema: str = SCHEMA

    def to_json(self) -> str:
        """The whole report."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def results(self) -> tuple[Row | Curve, ...]:
        """Rows and curves."""
        return (*self.rows, *self.curves)

    def who(self, row: Row | Curve) -> Contestant:
        """The contestant of a row."""
        return self.contestants[row.contestant]

    @property
    def rounds_done(self) -> int:
        """Rounds that were run to the end; what failed on its own does not count."""
        if not self.interrupted:
            return self.plan.repeats
        whole = [row.repeats for row in self.results if row.failure in (None, INTERRUPTED)]
        return min(whole or [row.repeats for row in self.results], default=0)

    def notes(self) -> list[str]:
        """What to know of all figures."""
        footprints = [c.footprint for c in self.contestants if c.footprint is not None]
        lines = sorted({footprint.note for footprint in footprints if footprint.note})
        if self.interrupted:
            done = f"{self.rounds_done} of {self.plan.repeats} rounds"
            lines.append(f"interrupted: {done} were run to the end")
        lines += self.warnings
        if self.energy_note:
            lines.append(self.energy_note)
        if self.foreign_load_cores is not None and self.foreign_load_cores >= BUSY_CORES:
            lines.append(
                f"other processes kept {self.foreign_load_cores:.1f} cores busy meanwhile: "
                "the figures are lower than those of an idle machine"
            )
        return lines


def read_report(file: Path) -> Report:
    """The report that `onnxlm bench --json` wrote.

    Raises:
        InputError: The file cannot be read, is no such report, or is one of another version.
    """
    again = f"make it anew with onnxlm bench --json, which writes {SCHEMA}"
    try:
        value: dict[str, Any] = strict_json.load_object(file)
    except PackageError as error:
        raise InputError(str(error)) from error
    if value.get("schema") not in _READ:
        found = value.get("schema", "no field 'schema'")
        raise InputError(f"{file}: is no report of a benchmark", found=found, fix=again)
    try:
        report = strict_json.decode(Report, value, str(file))
    except PackageError as error:
        raise InputError(f"{str(error).partition(';')[0]}", fix=again) from error
    for row in report.results:
        if not 0 <= row.contestant < len(report.contestants):
            raise InputError(f"{file}: a row has no contestant", found=row.contestant, fix=again)
    return report
