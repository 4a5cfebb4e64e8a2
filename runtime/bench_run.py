"""A run of the benchmark: load time and memory of each contestant, then the speed of all, interleaved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from onnxlm.progress import Progress, silent
from onnxlm.runtime.bench import Contestant, Plan, Rounds, Sample, Track, reason, time_run
from onnxlm.runtime.bench_child import Footprint, measure_footprint
from onnxlm.runtime.bench_figures import speed
from onnxlm.runtime.bench_report import Label, Report, Row
from onnxlm.runtime.foreign_load import ForeignLoad
from onnxlm.runtime.machine import describe_machine


@dataclass
class Entry:
    """A contestant in the run.

    Attributes:
        label: What is known of it.
        contestant: What runs.
        prompts: Token ids by prompt length.
        context_length: Most positions.
        failure: Why nothing of it is run; None when nothing is against it.
        runs_on: What it really runs on, once it is loaded.
        footprint: Load time and memory, once measured.
    """

    label: Label
    contestant: Contestant
    prompts: Mapping[int, Sequence[int]]
    context_length: int
    failure: str | None = None
    runs_on: str | None = None
    footprint: Footprint | None = None
    foreign_load: list[float] = field(default_factory=list)


def run_benchmark(
    entries: Sequence[Entry],
    plan: Plan,
    threads: int,
    *,
    loads: int = 3,
    progress: Progress = silent,
) -> Report:
    """Measure; Ctrl-C at any point leaves what was measured until then.

    Args:
        entries: Who takes part, in the order in which they take turns.
        plan: What each of them runs.
        threads: Threads inside an operator, for the report.
        loads: Loads whose median is the load time.
        progress: Told of the stages.
    """

    def measure(entry: Entry, prompt_tokens: int) -> Sample:
        load = ForeignLoad()
        sample = time_run(entry.contestant, entry.prompts[prompt_tokens], plan.new_tokens)
        cores = load.cores()
        if cores is not None:
            entry.foreign_load.append(cores)
        return sample

    by_name = {str(i): entry for i, entry in enumerate(entries)}
    rounds = Rounds(plan, by_name, measure)
    for track in rounds.tracks:
        track.failure = _too_long(track, by_name[track.name], plan)
    interrupted = False
    try:
        _measure_footprints(by_name, rounds.tracks, plan, loads, progress)
        _prepare(by_name, progress)
    except KeyboardInterrupt:
        interrupted = True
    for track in rounds.tracks:
        track.failure = track.failure or by_name[track.name].failure
    if not interrupted:
        rounds.run(progress)
        interrupted = rounds.interrupted
    foreign = [cores for entry in entries for cores in entry.foreign_load]
    return Report(
        machine=describe_machine(),
        threads=threads,
        plan=plan,
        foreign_load_cores=median(foreign) if foreign else None,
        interrupted=interrupted,
        rows=tuple(_row(track, by_name[track.name], interrupted) for track in rounds.tracks),
    )


def _too_long(track: Track, entry: Entry, plan: Plan) -> str | None:
    wanted = track.prompt_tokens + plan.new_tokens
    if entry.failure is None and wanted > entry.context_length:
        return f"prompt and new tokens are {wanted}, the context has {entry.context_length}"
    return None


def _measure_footprints(
    entries: Mapping[str, Entry],
    tracks: Sequence[Track],
    plan: Plan,
    loads: int,
    progress: Progress,
) -> None:
    """Each entry with the longest prompt that fits; one that fails is not run at all."""
    lengths: dict[str, int] = {}
    for track in tracks:
        if track.failure is None and entries[track.name].failure is None:
            lengths[track.name] = max(track.prompt_tokens, lengths.get(track.name, 0))
    for i, (name, length) in enumerate(lengths.items()):
        progress("load time and memory", i, len(lengths))
        entry = entries[name]
        try:
            entry.footprint = measure_footprint(
                entry.contestant, entry.prompts[length], plan.new_tokens, loads
            )
        except Exception as error:  # its rows say so
            entry.failure = reason(error)


def _prepare(entries: Mapping[str, Entry], progress: Progress) -> None:
    ready = [entry for entry in entries.values() if entry.footprint is not None]
    for i, entry in enumerate(ready):
        progress("load", i, len(ready))
        try:
            entry.runs_on = entry.contestant.prepare()
        except Exception as error:  # its rows say so
            entry.failure = reason(error)


def _row(track: Track, entry: Entry, interrupted: bool) -> Row:
    failure = track.failure
    if interrupted and not track.samples:
        failure = failure or "interrupted before its turn"
    return Row(
        label=entry.label,
        prompt_tokens=track.prompt_tokens,
        repeats=len(track.samples),
        failure=failure,
        runs_on=entry.runs_on,
        footprint=entry.footprint,
        speed=speed(track.samples, track.prompt_tokens) if track.samples else None,
    )
