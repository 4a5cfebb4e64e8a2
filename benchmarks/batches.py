"""Tokens a second of all rows together, by batch size and by the graph that runs a step.

    python benchmarks/batches.py packages/int8 packages/int8-rows --json results.json

A step of a batch may run in the decode graph, or in the prefill graph with one new token a row: the two
differ where a package holds other weights for prefill (`onnxlm export --prefill-rows`), whose integer
products gain more from rows than blocks do. Batches take turns, a round each; a figure is the median of
all steps, a ratio the median of the rounds' own ratios to batch 1 of the same package in the decode
graph.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from record import Record, parser

from onnxlm.runtime import LanguageModel, load
from onnxlm.runtime.bench_package import prompt_rows
from onnxlm.runtime.engine import Batch

AIM = 2.0


class Steps:
    """A batch behind its prompts, stepped in one of the two graphs."""

    def __init__(self, model: LanguageModel, rows: list[list[int]], graph: str) -> None:
        self._batch = Batch(model.sessions, len(rows))
        self._start = len(rows[0])
        self._tokens = self._batch.prefill_tokens(rows)
        self._graph = graph
        self.rows = len(rows)

    def run(self, steps: int) -> list[float]:
        """Seconds of each step behind the prompts."""
        batch = self._batch
        batch.rewind(self._start)
        batch.set_tokens(self._tokens)
        tokens, times = self._tokens, []
        for _ in range(steps):
            began = time.perf_counter()
            if self._graph == "decode":
                tokens = batch.decode_tokens()
            else:
                tokens = batch.prefill_tokens(tokens[:, None].tolist())
            times.append(time.perf_counter() - began)
        return times[1:]  # the first may bind


def main() -> None:
    options = parser(__doc__)
    options.add_argument("packages", nargs="+", metavar="PACKAGE", type=Path)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options.add_argument("--prompt-tokens", type=int, default=64)
    options.add_argument("--steps", type=int, default=16, help="of each batch and round")
    options.add_argument("--rounds", type=int, default=7)
    args = options.parse_args()
    record = Record(args, "onnxlm.batches/1")
    contestants: dict[tuple[str, str, int], Steps] = {}
    for path in args.packages:
        model = load(path, threads=args.threads)
        for batch in args.batches:
            size = model.sessions.vocab_size
            rows = prompt_rows(path, size, args.prompt_tokens, batch)
            for graph in ("decode", "prefill"):
                contestants[path.name, graph, batch] = Steps(model, rows, graph)
    times: dict[tuple[str, str, int], list[list[float]]] = {key: [] for key in contestants}
    for turn in range(args.rounds + 1):
        keys = list(contestants) if turn % 2 else list(reversed(contestants))
        for key in keys:
            made = contestants[key].run(args.steps)
            if turn:  # the first round warms up
                times[key].append(made)
    best: dict[str, float] = {}
    for (name, graph, batch), rounds in times.items():
        base = times[name, "decode", args.batches[0]]
        ratios = [
            batch * statistics.median(one) / args.batches[0] / statistics.median(many)
            for one, many in zip(base, rounds, strict=True)
        ]
        step = statistics.median(second for each in rounds for second in each)
        ratio = statistics.median(ratios)
        record.add(
            package=name,
            graph=graph,
            batch=batch,
            step_ms=step * 1e3,
            tokens_per_s=batch / step,
            ratio=ratio,
            lowest_ratio=min(ratios),
            highest_ratio=max(ratios),
        )
        if batch == 8:
            best[f"{name}, {graph} graph, batch 8 to batch 1"] = ratio
    record.finish({name: (ratio, ">=", AIM) for name, ratio in best.items()})


if __name__ == "__main__":
    main()
