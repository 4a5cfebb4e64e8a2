"""Time of choosing a token: each rule over a wide vocabulary, and the loop around a package's decode step.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --package packages/int8 --threads 2 --json results.json

Logits are normal numbers times 2, fp32, one row unless `--rows` says otherwise. The loop's time is that of a
step in `token_steps` less that of the same step's `run_with_iobinding`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from record import Record, parser

from onnxlm.runtime import load
from onnxlm.runtime.choosing import TokenChooser
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.sampling_params import SamplingParams
from onnxlm.runtime.stopping import RowLimits, RowStops
from onnxlm.runtime.token_loop import Timings, token_steps

RULES: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_k 1000, top_p 0.9": {"top_k": 1000, "top_p": 0.9},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, typical_p 0.9": {"top_k": 50, "typical_p": 0.9},
    "typical_p 0.9": {"typical_p": 0.9},
    "repetition_penalty, greedy": {"do_sample": False, "repetition_penalty": 1.1},
    "presence_penalty, top_k, top_p": {"presence_penalty": 0.5, "top_k": 50, "top_p": 0.9},
    "no_repeat_ngram_size 3, greedy": {"do_sample": False, "no_repeat_ngram_size": 3},
    "logprobs 5, greedy": {"do_sample": False, "logprobs": 5},
}


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """The median time of one call, after a warm-up."""
    times = []
    for repeat in range(repeats + 5):
        began = time.perf_counter()
        call()
        if repeat >= 5:
            times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def rules(record: Record, vocabulary: int, rows: int, held: int, repeats: int) -> dict[str, float]:
    """Milliseconds a row of each rule."""
    generator = np.random.default_rng(0)
    logits = (generator.normal(size=(rows, vocabulary)) * 2).astype(np.float32)
    prompt = generator.integers(0, vocabulary, held).tolist()
    live = np.ones(rows, dtype=np.bool_)
    found = {}
    for name, fields in RULES.items():
        params = SamplingParams(**({"do_sample": True, "temperature": 0.8, "seed": 1} | fields))
        chooser = TokenChooser([params] * rows, [prompt] * rows, [()] * rows, vocabulary)
        spent = median_ms(lambda chooser=chooser: chooser.choose(logits, live), repeats) / rows
        found[name] = spent
        record.add(rule=name, vocabulary=vocabulary, ms_a_row=spent)
    return found


class Timed:
    """A session that takes the time of its runs."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.times: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, *rest: Any) -> None:
        began = time.perf_counter()
        self._session.run_with_iobinding(binding, *rest)
        self.times.append(time.perf_counter() - began)


@contextmanager
def timed(sessions: Any) -> Iterator[Timed]:
    """Sessions whose decode session takes the time."""
    inner, watch = sessions.decode, Timed(sessions.decode)
    object.__setattr__(sessions, "decode", watch)
    try:
        yield watch
    finally:
        object.__setattr__(sessions, "decode", inner)


def loop(record: Record, package: str, threads: int, steps: int) -> dict[str, float]:
    """What a step takes outside of ONNX Runtime, as a part of the time inside."""
    model = load(package, threads=threads)
    prompt, found = list(range(100, 116)), {}
    for name, fields in {
        "greedy": {},
        "top_k 50, top_p 0.9": {"do_sample": True, "top_k": 50, "top_p": 0.9, "seed": 1},
        "repetition_penalty": {"repetition_penalty": 1.1},
    }.items():
        with timed(model.sessions) as watch:
            chooser = TokenChooser(
                [SamplingParams(**fields)], [prompt], [()], model.sessions.vocab_size
            )
            timings = Timings()
            stops = RowStops([RowLimits(room=steps + 1)])
            for _ in token_steps(Batch(model.sessions, 1), [prompt], chooser, stops, timings):
                pass
        runs = np.array(watch.times)
        outside = np.array(timings.steps_s) - runs
        found[name] = float(np.median(outside / runs))
        record.add(
            loop=name,
            step_ms=float(np.median(timings.steps_s)) * 1e3,
            outside_us=float(np.median(outside)) * 1e6,
            share=found[name],
        )
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--vocabulary", type=int, default=150_000)
    options.add_argument("--rows", type=int, default=1)
    options.add_argument("--held", type=int, default=1000, help="tokens that penalties look at")
    options.add_argument("--repeats", type=int, default=200)
    options.add_argument("--package", help="measure the loop around this package too")
    options.add_argument("--steps", type=int, default=200)
    args = options.parse_args()
    record = Record(args, "onnxlm.sampling/1")
    spent = rules(record, args.vocabulary, args.rows, args.held, args.repeats)
    both = "top_k 50, top_p 0.9"
    aims = {f"ms a row of {both}": (spent[both], "<=", 1.0)}
    if args.package:
        shares = loop(record, args.package, args.threads, args.steps)
        aims["share of a greedy step outside of the run"] = (shares["greedy"], "<=", 0.03)
    record.finish(aims)


if __name__ == "__main__":
    main()
