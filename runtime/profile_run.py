"""Runs a package under ONNX Runtime's profiler."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import onnxruntime as ort

from onnxlm import io_spec
from onnxlm.errors import InputError
from onnxlm.package import Package
from onnxlm.progress import Progress, silent
from onnxlm.runtime.bench import Case, Rows, Sample, settle, time_run
from onnxlm.runtime.bench_package import prompt_rows
from onnxlm.runtime.cores import usable_cores
from onnxlm.runtime.engine import PREFILL_CHUNK, Batch
from onnxlm.runtime.graph_cost import NodeCost, node_costs
from onnxlm.runtime.graph_reader import read_graph
from onnxlm.runtime.machine import describe_machine
from onnxlm.runtime.model import load
from onnxlm.runtime.prepacked import PreparedGraphs, prepare
from onnxlm.runtime.profile_events import Calls, Cell, read_calls
from onnxlm.runtime.profile_report import Phase, Profile
from onnxlm.runtime.providers import require_provider
from onnxlm.runtime.roofline import Roofline
from onnxlm.runtime.session import SessionConfig, open_session
from onnxlm.runtime.sessions import Sessions

_BOUNDED = "CPUExecutionProvider"


@dataclass
class _Running:
    """Sessions as a contestant of a benchmark, each of whose prompts is one call."""

    sessions: Sessions
    batch: Batch | None = None

    def prepare(self) -> str:
        return str(self.sessions.decode.get_providers()[0])

    def prefill(self, rows: Rows) -> None:
        self.batch = Batch(self.sessions, len(rows))
        self.batch.progress = self._refuse
        self.extend(rows)

    def extend(self, rows: Rows) -> None:
        assert self.batch is not None
        self.batch.set_tokens(self.batch.prefill_tokens(rows))

    def step(self) -> None:
        assert self.batch is not None
        self.batch.decode_tokens()

    def _refuse(self, stage: str, done: int, total: int) -> None:
        """What several calls ran cannot be told apart: operators of one are as many as those of all."""
        assert self.batch is not None
        raise InputError(
            "--prompt-tokens",
            found=total,
            allowed=f"up to {done}, what one call of the prefill graph runs at a batch of {self.batch.rows}",
        )


class _Machine:
    """The machine's own rates beside the runs, where they bound what runs."""

    def __init__(self, config: SessionConfig, opened: Mapping[str, ort.InferenceSession]) -> None:
        self._found: list[dict[str, float]] = []
        self._roofline: Roofline | None = None
        if opened[io_spec.DECODE].get_providers()[0] == _BOUNDED:
            self._roofline = Roofline(config.threads or usable_cores())
            self._roofline.prepare()

    def measure(self) -> None:
        if self._roofline is not None:
            self._found.append(self._roofline.rates())

    def best(self) -> dict[str, float] | None:
        """The best of each: what disturbs a measurement only makes it slower."""
        if not self._found:
            return None
        return {key: max(rates[key] for rates in self._found) for key in self._found[0]}


def profile(
    package: Package,
    config: SessionConfig,
    case: Case,
    repeats: int,
    progress: Progress = silent,
    *,
    kv_budget: int | None = None,
) -> Profile:
    """Time by operator and layer of prompts and decode steps; a run before them is not counted.

    Args:
        package: An opened package.
        config: Provider and threads.
        case: Prompt, new tokens and batch; no more than one call's worth of prompt, at least two new tokens.
        repeats: Runs that count.
        progress: Told of the runs.
        kv_budget: Most bytes of keys and values, see `onnxlm.runtime.load`.

    Raises:
        InputError: The case does not fit the context or one call, or has no decode step.
        ProviderError: The provider is not known or not available.
    """
    if not config.allow_fallback:
        require_provider(config.provider)
    _check(package, case)
    rows = prompt_rows(package.path, package.manifest.vocab_size, case.prompt_tokens, case.batch)
    chosen = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    model = load(package.path, kv_budget=kv_budget, **chosen)
    plain = _Running(model.sessions)
    with tempfile.TemporaryDirectory(prefix="onnxlm-profile-") as folder:
        prepared = prepare(package, config)
        opened = _open(prepared, config, Path(folder))
        profiled = {name: opened[name] for name in (io_spec.PREFILL, io_spec.DECODE)}
        contestant = _Running(dataclasses.replace(model.sessions, **profiled))
        samples: list[Sample] = []
        bare: list[Sample] = []
        machine = _Machine(config, opened)
        for number in range(repeats + 1):
            progress("profile", number, repeats + 1)
            for runner, times in ((plain, bare), (contestant, samples)):
                settle()
                times.append(time_run(runner, rows, case))
            machine.measure()
        progress("profile", repeats + 1, repeats + 1)
        calls = _read(prepared, opened, case)
    return Profile(
        package=str(package.path),
        precision=package.manifest.precision,
        provider=contestant.prepare(),
        threads=config.threads or usable_cores(),
        batch=case.batch,
        prompt_tokens=case.prompt_tokens,
        new_tokens=case.new_tokens,
        repeats=repeats,
        machine=describe_machine(),
        fallback=model.fallback,
        phases=_phases(calls, samples[1:], bare[1:], machine.best(), package.manifest.precision),
    )


def _check(package: Package, case: Case) -> None:
    room = package.manifest.context_length
    if case.positions > room:
        raise InputError(
            "prompt and new tokens do not fit the context",
            found=case.positions,
            allowed=f"up to {room}",
        )
    if case.prompt_tokens > PREFILL_CHUNK:
        raise InputError(
            "--prompt-tokens",
            found=case.prompt_tokens,
            allowed=f"up to {PREFILL_CHUNK}, what one call of the prefill graph runs",
        )
    if case.new_tokens < 2:
        raise InputError(
            "--new-tokens", found=case.new_tokens, allowed="2 or more, of which the last are steps"
        )


def _open(
    prepared: PreparedGraphs, config: SessionConfig, folder: Path
) -> dict[str, ort.InferenceSession]:
    sessions = {}
    for name, path in prepared.paths.items():
        options = prepared.session_options(config)
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / name)
        sessions[name] = open_session(path, config, options)
    return sessions


def _read(
    prepared: PreparedGraphs, opened: Mapping[str, ort.InferenceSession], case: Case
) -> dict[str, Calls]:
    """What the profiles say, the first run left out."""
    calls = {}
    tokens = {io_spec.PREFILL: case.prompt_tokens, io_spec.DECODE: 1}
    skip = {io_spec.PREFILL: 1, io_spec.DECODE: case.new_tokens - 1}
    for name, session in opened.items():
        costs: Mapping[str, NodeCost] = node_costs(read_graph(prepared.paths[name]))
        file = Path(session.end_profiling())
        calls[name] = read_calls(file, costs, skip[name], case.batch, tokens[name])
    return calls


def _phases(
    calls: Mapping[str, Calls],
    samples: list[Sample],
    bare: list[Sample],
    rates: Mapping[str, float] | None,
    precision: str,
) -> tuple[Phase, ...]:
    rate = None
    if rates is not None:
        rate = rates["int8_ops_per_s" if precision.startswith("int") else "fp32_flops_per_s"]
    times = {
        io_spec.PREFILL: [[run.prefill_s for run in runs] for runs in (samples, bare)],
        io_spec.DECODE: [[s for run in runs for s in run.step_s] for runs in (samples, bare)],
    }
    phases = []
    for name, (wall, plain) in times.items():
        cells: tuple[Cell, ...] = calls[name].cells
        phases.append(
            Phase(
                name=name,
                calls=len(wall),
                wall_ms=1000 * fmean(wall),
                plain_ms=1000 * fmean(plain),
                session_ms=calls[name].session_ms,
                cells=cells,
                bytes_per_s=None if rates is None else rates["read_bytes_per_s"],
                flops_per_s=rate,
            )
        )
    return tuple(phases)
