"""A run of the benchmark: load and memory of each contestant, then the speed of all, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median

from onnxlm.progress import Progress, silent
from onnxlm.runtime.bench import Case, Plan, Rounds, Rows, Sample, Track, reason
from onnxlm.runtime.bench_child import Child, Loaded, Spec
from onnxlm.runtime.bench_figures import Spread, curve, round_figures, speed
from onnxlm.runtime.bench_footprint import CaseError, Footprint, measure_footprint
from onnxlm.runtime.bench_report import INTERRUPTED, Contestant, Curve, Label, Rates, Report, Row
from onnxlm.runtime.energy import EnergyMeter
from onnxlm.runtime.graph_cost import Work
from onnxlm.runtime.machine import describe_machine

# What a package runs on where the machine's own rates bound it.
_BOUNDED = "CPUExecutionProvider"


@dataclass
class Entry:
    """A contestant in the run.

    Attributes:
        label: What is known of it.
        spec: What runs, in a process of its own.
        rows: Token ids of (length, batch).
        context_length: Most positions.
        work: What (prefill, a decode step) of a case must do at the least; None where that is not known.
        refuse: Why a case cannot be run, where that is known before; None when nothing is against it.
        failure: Why nothing of it is run; None when nothing is against it.
        loaded: What its process said, once it is loaded.
        footprint: Load time and memory, once measured.
        child: Its process in the rounds.
    """

    label: Label
    spec: Spec
    rows: Callable[[int, int], Rows]
    context_length: int
    work: Callable[[Case], tuple[Work, Work]] | None = None
    refuse: Callable[[Case], str | None] = lambda case: None
    failure: str | None = None
    loaded: Loaded | None = None
    footprint: Footprint | None = None
    child: Child | None = None

    def rows_of(self, case: Case) -> Rows:
        """Token ids that a case runs."""
        return self.rows(max((case.prompt_tokens, *case.context_lengths)), case.batch)


@dataclass
class _Machine:
    """The machine's own rates, measured at the beginning of each round.

    Contestants are measured without them too: what goes wrong here costs the rates alone.
    """

    children: dict[int, Child] = field(default_factory=dict)
    found: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def open(self, threads: Sequence[int]) -> None:
        for count in threads:
            spec = Spec("onnxlm.runtime.roofline:Roofline", {"threads": count})
            try:
                self.children[count] = Child(spec)
                self.children[count].load()
                self.found[count] = []
            except Exception as error:
                self._drop(count, error)

    def measure(self, counts: bool) -> None:
        for threads, child in list(self.children.items()):
            try:
                rates = child.rates()
            except Exception as error:
                self._drop(threads, error)
                continue
            if counts:
                self.found[threads].append(rates)

    def _drop(self, threads: int, error: Exception) -> None:
        child = self.children.pop(threads, None)
        if child is not None:
            child.stop(at_once=True)
        self.found.pop(threads, None)
        self.warnings.append(
            f"the machine's own rates with {threads} threads were not measured: {reason(error)}"
        )

    def rates(self) -> tuple[Rates, ...]:
        return tuple(
            Rates(threads, **{key: Spread.of([rates[key] for rates in found]) for key in found[0]})
            for threads, found in self.found.items()
            if found
        )


def run_benchmark(
    entries: Sequence[Entry],
    plan: Plan,
    *,
    loads: int = 3,
    progress: Progress = silent,
) -> Report:
    """Measure; Ctrl-C at any point leaves what was measured until then.

    Args:
        entries: Who takes part, in the order in which they take turns.
        plan: What each of them runs.
        loads: Loads whose median is the load time.
        progress: Told of the stages.
    """
    by_name = {str(i): entry for i, entry in enumerate(entries)}
    machine = _Machine()
    rounds = Rounds(plan, by_name, _measure, machine.measure)
    for track in rounds.tracks:
        track.failure = _against(track, by_name[track.name])
    interrupted = True
    try:
        _measure_footprints(by_name, rounds.tracks, loads, progress)
        _load(by_name, progress)
        ready = [entry for entry in entries if entry.failure is None]
        machine.open(sorted({entry.label.threads for entry in ready}))
        for track in rounds.tracks:
            track.failure = track.failure or by_name[track.name].failure
        rounds.run(progress)
        interrupted = rounds.interrupted
    except KeyboardInterrupt:
        pass
    finally:
        children = [entry.child for entry in entries if entry.child is not None]
        for child in (*children, *machine.children.values()):
            child.stop(at_once=interrupted)
    foreign = [cores for child in children for cores in child.foreign_load]
    return _report(plan, by_name, rounds.tracks, (machine, foreign), interrupted)


def _report(
    plan: Plan,
    by_name: Mapping[str, Entry],
    tracks: Sequence[Track],
    measured: tuple[_Machine, Sequence[float]],
    interrupted: bool,
) -> Report:
    """What the run came to; `measured` are the machine and the load of others in each run."""
    machine, foreign = measured
    rates = machine.rates()
    pairs = [(track, by_name[track.name]) for track in tracks]
    return Report(
        machine=describe_machine(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=plan,
        rates=rates,
        foreign_load_cores=median(foreign) if foreign else None,
        energy_note=EnergyMeter().note,
        interrupted=interrupted,
        contestants=tuple(_contestant(entry) for entry in by_name.values()),
        rows=tuple(
            _row(track, entry, rates, interrupted)
            for track, entry in pairs
            if not track.case.context_lengths
        ),
        curves=tuple(
            _curve(track, entry, interrupted)
            for track, entry in pairs
            if track.case.context_lengths
        ),
        warnings=tuple(machine.warnings),
    )


def _measure(entry: Entry, case: Case) -> Sample:
    assert entry.child is not None
    return entry.child.run(entry.rows_of(case), case)


def _against(track: Track, entry: Entry) -> str | None:
    """What is known to be against a case before anything is loaded."""
    if entry.failure is not None:
        return None
    wanted = track.case.positions
    if wanted > entry.context_length:
        return f"prompt and new tokens are {wanted}, the context has {entry.context_length}"
    return entry.refuse(track.case)


def _measure_footprints(
    entries: Mapping[str, Entry], tracks: Sequence[Track], loads: int, progress: Progress
) -> None:
    """Each entry on the case that needs most of those that run; one that does not load is not run at all."""
    ready: dict[str, list[Track]] = {}
    for track in tracks:
        if track.failure is None and entries[track.name].failure is None:
            ready.setdefault(track.name, []).append(track)
    for i, (name, own) in enumerate(ready.items()):
        progress("load time and memory", i, len(ready))
        own.sort(key=lambda track: track.case.batch * track.case.positions, reverse=True)
        _measure_footprint(entries[name], own, loads)
    progress("load time and memory", len(ready), len(ready))


def _measure_footprint(entry: Entry, tracks: Sequence[Track], loads: int) -> None:
    """On the first of these tracks that runs; the ones before it have failed."""
    for track in tracks:
        case = track.case
        try:
            entry.footprint = measure_footprint(entry.spec, entry.rows_of(case), case, loads)
            return
        except (
            CaseError,
            MemoryError,
        ) as error:  # a smaller case may have room where this had none
            track.failure = reason(error)
        except Exception as error:  # its rows say so
            entry.failure = reason(error)
            return


def _load(entries: Mapping[str, Entry], progress: Progress) -> None:
    ready = [entry for entry in entries.values() if entry.footprint is not None]
    for i, entry in enumerate(ready):
        progress("load", i, len(ready))
        try:
            entry.child = Child(entry.spec)
            entry.loaded = entry.child.load()
        except Exception as error:  # its rows say so
            entry.failure = reason(error)
    progress("load", len(ready), len(ready))


def _contestant(entry: Entry) -> Contestant:
    loaded = entry.loaded
    return Contestant(
        label=entry.label,
        runs_on=loaded.runs_on if loaded else None,
        libraries=loaded.libraries if loaded else {},
        footprint=entry.footprint,
        fallback=loaded.fallback if loaded else None,
        nodes=loaded.nodes if loaded else None,
    )


def _failure(track: Track, entry: Entry, interrupted: bool) -> str | None:
    failure = track.failure or entry.failure
    if interrupted and not track.samples:
        return failure or INTERRUPTED
    return failure


def _row(track: Track, entry: Entry, rates: Sequence[Rates], interrupted: bool) -> Row:
    case, samples = track.case, track.samples
    prefill, decode = _shares(track, entry, rates)
    return Row(
        contestant=int(track.name),
        case=case,
        repeats=len(samples),
        failure=_failure(track, entry, interrupted),
        speed=speed(samples, case.prompt_tokens, case.batch) if samples else None,
        rounds=tuple(round_figures(s, case.prompt_tokens, case.batch) for s in samples),
        prefill_of_roofline=prefill,
        decode_of_roofline=decode,
    )


def _curve(track: Track, entry: Entry, interrupted: bool) -> Curve:
    return Curve(
        contestant=int(track.name),
        case=track.case,
        repeats=len(track.samples),
        failure=_failure(track, entry, interrupted),
        points=curve(track.samples, track.case) if track.samples else (),
    )


def _shares(
    track: Track, entry: Entry, rates: Sequence[Rates]
) -> tuple[float | None, float | None]:
    """Shares of the roofline that prefill and a decode step reach: medians by the rounds' best rates."""
    known = [rate for rate in rates if rate.threads == entry.label.threads]
    bounded = entry.loaded is not None and entry.loaded.runs_on == _BOUNDED
    if not (known and track.samples and bounded and entry.work):
        return None, None
    rate = known[0]
    # Kernels of quantized weights multiply bytes; the others multiply floats.
    integer = entry.label.precision.startswith("int")
    flops_per_s = (rate.int8_ops_per_s if integer else rate.fp32_flops_per_s).high
    prefill, step = (
        work.least_s(rate.read_bytes_per_s.high, flops_per_s) for work in entry.work(track.case)
    )
    steps = [median(sample.step_s) for sample in track.samples if sample.step_s]
    share = prefill / median(sample.prefill_s for sample in track.samples)
    return share, step / median(steps) if steps else None
