"""Load time, first run and memory of a contestant, each in a new process.

They are measured one contestant at a time, before the rounds: a mapped file that two held would count half.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from onnxlm.runtime.bench import Case, Rows, Sample
from onnxlm.runtime.bench_child import Child, ChildError, Spec
from onnxlm.strict_json import YOUNGER


class CaseError(ChildError):
    """The contestant was loaded and failed to run the case."""


@dataclass(frozen=True)
class Footprint:
    """What new processes measured; bytes are None where the platform does not tell.

    Attributes:
        load_s: Seconds to load the model, the files in the system's cache; median of some processes.
        first_run_s: Seconds from the prompt to the first token of the first run after a load.
        peak_rss_bytes: Most memory resident at once, over loading and the run.
        pss_bytes: Memory behind the run, shared pages split among the processes that share them.
        bare_pss_bytes: The same before loading: Python and its libraries.
        note: What is missing and why.
        device_bytes: Of a device's memory, what came to be in use from before loading to behind the run.
    """

    load_s: float
    first_run_s: float
    peak_rss_bytes: int | None
    pss_bytes: int | None
    bare_pss_bytes: int | None
    note: str
    device_bytes: int | None = field(default=None, metadata={YOUNGER: True})


def measure_footprint(spec: Spec, rows: Rows, case: Case, loads: int) -> Footprint:
    """Footprint in new processes, the last of which runs a case.

    Args:
        spec: The contestant.
        rows: Token ids of the case.
        case: What the last process runs.
        loads: How many loads the median is taken of; one before them fills the caches.

    Raises:
        CaseError: The model was loaded, and the case failed; says why.
        ChildError: A process failed before that.
    """
    _load_alone(spec)
    times = [_load_alone(spec) for _ in range(loads - 1)]
    child = Child(spec)
    try:
        bare = child.memory()
        times.append(child.load().load_s)
        first = _run(child, rows, case)
        memory = child.memory()
    except BaseException:
        child.stop(at_once=True)
        raise
    child.stop()
    return Footprint(
        load_s=median(times),
        first_run_s=first.prefill_s,
        peak_rss_bytes=memory.peak_rss_bytes,
        pss_bytes=memory.pss_bytes,
        bare_pss_bytes=bare.pss_bytes,
        note=memory.note,
        device_bytes=_risen(bare.device_bytes, memory.device_bytes),
    )


def _risen(before: int | None, behind: int | None) -> int | None:
    return None if before is None or behind is None else behind - before


def _run(child: Child, rows: Rows, case: Case) -> Sample:
    try:
        return child.run(rows, case)
    except ChildError as error:
        raise CaseError(str(error)) from error


def _load_alone(spec: Spec) -> float:
    child = Child(spec)
    try:
        load_s = child.load().load_s
    except BaseException:
        child.stop(at_once=True)
        raise
    child.stop()
    return load_s
