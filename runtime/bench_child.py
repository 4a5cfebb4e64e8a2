"""Load time and memory of a contestant, in a process of its own: one process would mix those of several.

The parent loads nothing before the last child has ended: a mapped file that both held would count half.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from onnxlm.errors import OnnxlmError
from onnxlm.runtime.bench import Contestant, reason
from onnxlm.runtime.memory import read_memory


class ChildError(OnnxlmError):
    """A contestant could not be loaded or run in a process of its own."""


@dataclass(frozen=True)
class Footprint:
    """What one process measured; bytes are None where the platform does not tell.

    Attributes:
        load_s: Seconds to load the model, the files in the system's cache.
        peak_rss_bytes: Most memory resident at once, over loading and the run.
        pss_bytes: Memory behind the run, shared pages split among the processes that share them.
        bare_pss_bytes: The same before loading: Python and its libraries.
        note: What is missing and why.
    """

    load_s: float
    peak_rss_bytes: int | None
    pss_bytes: int | None
    bare_pss_bytes: int | None
    note: str


def measure_footprint(
    contestant: Contestant, ids: Sequence[int], new_tokens: int, loads: int
) -> Footprint:
    """Footprint in new processes, the last of which runs a prompt and its steps.

    Args:
        contestant: Not prepared yet; it is pickled.
        ids: The prompt.
        new_tokens: Tokens to generate, the one behind the prompt included.
        loads: How many loads the median is taken of; one before them fills the caches.

    Raises:
        ChildError: A child failed; says why.
    """
    _in_child(contestant, (), 0)
    only_loaded = [_in_child(contestant, (), 0) for _ in range(loads - 1)]
    full = _in_child(contestant, ids, new_tokens)
    load_s = median([full.load_s, *(child.load_s for child in only_loaded)])
    return Footprint(**{**asdict(full), "load_s": load_s})


def _in_child(contestant: Contestant, ids: Sequence[int], new_tokens: int) -> Footprint:
    # The same places to import from: the contestant's class may come from anywhere.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name],
        input=pickle.dumps((contestant, list(ids), new_tokens)),
        capture_output=True,
        check=False,
        env=environment,
    )
    last = done.stdout.decode("utf-8", "replace").strip().rpartition("\n")[2]
    try:
        answer = json.loads(last)
    except json.JSONDecodeError:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        why = _ending(done.returncode)
        raise ChildError(f"{why}: {said}" if said else why) from None
    if "failure" in answer:
        raise ChildError(answer["failure"])
    return Footprint(**answer)


def _ending(code: int) -> str:
    if code == -getattr(signal, "SIGKILL", 0):  # Windows has no such signal
        return "its process was killed, as a system without free memory does"
    return f"its process ended with code {code}"


def _measure(contestant: Contestant, ids: Sequence[int], new_tokens: int) -> Footprint:
    bare = read_memory()
    start = time.perf_counter()
    contestant.prepare()
    load_s = time.perf_counter() - start
    if ids:
        contestant.prefill(ids)
        for _ in range(new_tokens - 1):
            contestant.step()
    memory = read_memory()
    return Footprint(load_s, memory.peak_rss_bytes, memory.pss_bytes, bare.pss_bytes, memory.note)


def main() -> None:
    """Serve one request of `_in_child`: a pickle on standard input, a line of JSON on standard output."""
    try:
        contestant, ids, new_tokens = pickle.load(sys.stdin.buffer)
        print(json.dumps(asdict(_measure(contestant, ids, new_tokens))))
    except Exception as error:  # the parent shows it in the contestant's row
        print(json.dumps({"failure": reason(error)}))


if __name__ == "__main__":
    main()
