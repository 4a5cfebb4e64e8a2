"""Memory and load time of a package's sessions: opened from its own files, and from packed, mapped ones.

Every figure is taken in a process of its own; the ways alternate, and medians are shown. PSS is what a
process holds once pages that it shares with others are split among them. "over bare" leaves out what the same
process held before it opened a session: Python, numpy and ONNX Runtime. Prompts come from the bundled text,
since it counts how many rows of the embedding table are touched; without a tokenizer they are random.

    python benchmarks/memory.py packages/int8 packages/int4
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from onnxlm import io_spec
from onnxlm.package import Package, open_package
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.memory import read_memory
from onnxlm.runtime.prepacked import PreparedGraphs, open_files, own_files, prepare
from onnxlm.runtime.session import SessionConfig
from onnxlm.runtime.sessions import Sessions
from onnxlm.runtime.tokenizer import Tokenizer

WAYS = ("own files", "packed")


@dataclass(frozen=True)
class Figures:
    """What one process measured.

    Attributes:
        files: "own files" or "packed": what was really opened.
        reason: Why that is not what was asked for; None when it is.
        load_s: Seconds until both sessions were open.
        load_cpu_s: Processor seconds of that, all threads together.
        prefill_ms: The prompt, the second time.
        decode_ms: Median step.
        bare_pss: Bytes before the first session.
        loaded_pss: Bytes with both sessions open.
        pss: Bytes after prompt and steps.
        weight_bytes: Size of the package's weight file.
        kv_bytes: The cache as allocated.
        logits: Hash over the logits of prompt and steps.
    """

    files: str
    reason: str | None
    load_s: float
    load_cpu_s: float
    prefill_ms: float
    decode_ms: float
    bare_pss: int | None
    loaded_pss: int | None
    pss: int | None
    weight_bytes: int
    kv_bytes: int
    logits: str


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("packages", nargs="+", metavar="PACKAGE")
    add("--threads", type=int, default=2)
    add("--prompt-tokens", type=int, default=128)
    add("--new-tokens", type=int, default=64)
    add("--rounds", type=int, default=5)
    add("--way", choices=WAYS, help=argparse.SUPPRESS)  # what a child process measures
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace) -> Figures:
    """Open, run and weigh one package in this process."""
    package = open_package(args.packages[0])
    config = SessionConfig(threads=args.threads)
    bare = read_memory().pss_bytes
    prepared = PreparedGraphs(own_files(package), cached=False)
    if args.way == "packed":
        prepared = prepare(package, config)
    wall, processor = time.perf_counter(), time.process_time()
    opened = open_files(prepared, config)
    load_s, load_cpu_s = time.perf_counter() - wall, time.process_time() - processor
    loaded = read_memory().pss_bytes
    manifest = package.manifest
    sessions = Sessions(
        opened[io_spec.PREFILL],
        opened[io_spec.DECODE],
        manifest.states,
        manifest.vocab_size,
        manifest.context_length,
    )
    prefill_ms, decode_ms, logits, kv_bytes = run(sessions, json.load(sys.stdin), args.new_tokens)
    return Figures(
        files=WAYS[prepared.cached],
        reason=prepared.reason,
        load_s=load_s,
        load_cpu_s=load_cpu_s,
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
        bare_pss=bare,
        loaded_pss=loaded,
        pss=read_memory().pss_bytes,
        weight_bytes=manifest.weights.bytes,
        kv_bytes=kv_bytes,
        logits=logits,
    )


def run(sessions: Sessions, ids: list[int], new_tokens: int) -> tuple[float, float, str, int]:
    """A prompt twice and steps behind it: (prompt ms, median step ms, hash of logits, bytes of cache)."""
    seen = hashlib.sha256()
    batch = Batch(sessions, 1)
    seen.update(batch.prefill_logits([ids]).tobytes())
    batch.rewind(0)
    start = time.perf_counter()
    logits = batch.prefill_logits([ids])
    prefill_s = time.perf_counter() - start
    steps = []
    for _ in range(new_tokens):
        batch.set_tokens(logits.argmax(axis=-1))
        start = time.perf_counter()
        logits = batch.decode_logits()
        steps.append(time.perf_counter() - start)
        seen.update(logits.tobytes())
    kv_bytes = sum(buffer.tensor_size_in_bytes() for buffer in batch.cache.buffers.values())
    return prefill_s * 1e3, statistics.median(steps) * 1e3, seen.hexdigest()[:16], kv_bytes


def prompt(package: Package, tokens: int) -> list[int]:
    """Token ids of the bundled text, as often as needed."""
    if not package.has("tokenizer.json"):
        vocab_size = package.manifest.vocab_size
        return [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, tokens)]
    text = resources.files("onnxlm.data").joinpath("evaluation.txt").read_text("utf-8")
    ids = Tokenizer.from_folder(package.path, package.manifest.vocab_size).encode(text)
    return (ids * (tokens // len(ids) + 1))[:tokens]


def measure_apart(args: argparse.Namespace, package: Package, way: str) -> Figures:
    """`measure` in a new process."""
    command = [sys.executable, __file__, str(package.path), "--way", way]
    command += [f"--threads={args.threads}", f"--new-tokens={args.new_tokens}"]
    ids = json.dumps(prompt(package, args.prompt_tokens))
    done = subprocess.run(command, input=ids, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{package.path}: {done.stderr.strip()}")
    return Figures(**json.loads(done.stdout))


def median(runs: Sequence[Figures], name: str) -> float | None:
    """Median of a figure; None where it was not measured."""
    values = [getattr(figures, name) for figures in runs]
    return None if None in values else statistics.median(values)


def cells(runs: Sequence[Figures]) -> list[str]:
    """One row of the table."""
    held = runs[0].weight_bytes + runs[0].kv_bytes
    bare, loaded, pss = (median(runs, name) for name in ("bare_pss", "loaded_pss", "pss"))
    row = [f"{median(runs, name):.3f}" for name in ("load_s", "load_cpu_s")]
    row += [f"{median(runs, name):.1f}" for name in ("prefill_ms", "decode_ms")]
    row += ["-" if value is None else f"{value / 1e6:.0f}" for value in (bare, loaded, pss)]
    if bare is None or pss is None:
        return [*row, "-", "-"]
    return [*row, f"{pss / held:.2f}", f"{(pss - bare) / held:.2f}"]


HEAD = (
    *("files", "load s", "load cpu s", "prefill ms", "decode ms"),
    *("bare MB", "loaded MB", "PSS MB", "PSS / held", "over bare / held"),
)


def show(package: Package, runs: dict[str, list[Figures]]) -> None:
    first = next(iter(runs.values()))[0]
    print(f"\n{package.path}: {package.manifest.precision}, ", end="")
    print(f"weights {first.weight_bytes / 1e6:.0f} MB + KV {first.kv_bytes / 1e6:.0f} MB = held")
    table = [HEAD, *([way, *cells(figures)] for way, figures in runs.items())]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    results = {figures.logits for way in runs.values() for figures in way}
    print("logits: " + ("the same bit for bit" if len(results) == 1 else "DIFFERENT"))
    reasons = {figures.reason for way in runs.values() for figures in way} - {None}
    print("".join(f"packed files were not used: {reason}\n" for reason in reasons), end="")
    if first.pss is None:
        print(read_memory().note)


def main() -> None:
    args = parse()
    if args.way:
        print(json.dumps(dataclasses.asdict(measure(args))))
        return
    results = {}
    for path in args.packages:
        package = open_package(path)
        prepare(package, SessionConfig(threads=args.threads))  # the build is not what is measured
        runs: dict[str, list[Figures]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                runs[way].append(measure_apart(args, package, way))
        show(package, runs)
        results[path] = {
            way: [dataclasses.asdict(figures) for figures in one] for way, one in runs.items()
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
