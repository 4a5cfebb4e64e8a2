"""Compare packages of onnxlm with llama.cpp and onnxruntime-genai: speed, memory and quality in one table.

Every contestant lives in a process of its own, with its own interpreter. Rounds are interleaved: in each,
every contestant runs once, so that a machine that gets slower or busier hits all alike. Quality is each
contestant's own logits on one text against the eager fp32 model's, with the same token ids.

    python benchmarks/peers.py --source model.gguf --package int8=packages/int8 \\
        --llama q8_0=q8_0.gguf --genai genai_int4=genai_int4 \\
        --python llama=.peers/llama/bin/python --python genai=.peers/genai/bin/python \\
        --against int8=q8_0 --json results.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers_report import Row, print_ratios, print_rows, read_quality, save
from quality import Quality, compare
from worker_process import Spec, Worker, WorkerError

from onnxlm.runtime.bench import Plan, Rounds, Sample
from onnxlm.runtime.bench_figures import speed

REFERENCE = "eager fp32"


@dataclass(frozen=True)
class Texts:
    """Token ids: of the evaluation text, and of prompts by length."""

    evaluation: list[int]
    prompts: dict[int, list[int]]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--source", required=True, help="checkpoint of the reference model (GGUF file or folder)")
    for kind, what in (
        ("package", "a package folder of onnxlm"),
        ("llama", "a GGUF file for llama.cpp"),
        ("genai", "a folder of onnxruntime-genai's model builder"),
    ):
        add(f"--{kind}", action="append", default=[], metavar="NAME=PATH", help=what)
    add("--python", action="append", default=[], metavar="KIND=PATH", help="interpreter for a kind")
    add("--eager", action="store_true", help="time the eager fp32 model too")
    add("--against", action="append", default=[], metavar="OURS=PEER", help="print the ratios")
    add("--threads", type=int, default=2)
    add("--prompt-tokens", default="128,1024", help="lengths, separated by commas")
    add("--new-tokens", type=int, default=128)
    add("--rounds", type=int, default=5)
    add("--quality-tokens", type=int, default=1024, help="0 leaves quality out")
    add("--decode-quality", action="store_true", help="quality of single steps too")
    add("--quality-from", type=Path, metavar="JSON", help="take quality from an earlier result")
    add("--only-quality", action="store_true", help="no speed")
    add("--json", type=Path, help="file for the results and the machine")
    return parser.parse_args(arguments)


def contestants(arguments: argparse.Namespace) -> list[Spec]:
    """What the command line names, the eager model first if it takes part."""
    pythons = dict(pair.split("=", 1) for pair in arguments.python)

    def spec(name: str, kind: str, path: str) -> Spec:
        return Spec(name, kind, pythons.get(kind, sys.executable), path, arguments.threads)

    named = [
        spec(*split_pair(pair, kind))
        for kind in ("package", "llama", "genai")
        for pair in getattr(arguments, kind)
    ]
    return [spec(REFERENCE, "eager", arguments.source)] * arguments.eager + named


def split_pair(pair: str, kind: str) -> tuple[str, str, str]:
    """(name, kind, path) of a NAME=PATH option."""
    name, separator, path = pair.partition("=")
    if not separator:
        raise SystemExit(f"--{kind} {pair}: wants NAME=PATH")
    return name, kind, path


def token_ids(source: str, lengths: Sequence[int], evaluation: int) -> Texts:
    """The bundled evaluation text in the source's tokens; prompts repeat it as often as they need."""
    from importlib.resources import files

    from tokenizers import Tokenizer

    from onnxlm.models.checkpoint import read

    text = (files("onnxlm.data") / "evaluation.txt").read_text(encoding="utf-8")
    tokenizer_file = read(source).tokenizer_files["tokenizer.json"]
    ids = Tokenizer.from_str(tokenizer_file.decode("utf-8")).encode(text).ids
    if evaluation > len(ids):
        raise SystemExit(f"--quality-tokens {evaluation}: the text has {len(ids)}")
    return Texts(ids[:evaluation], {n: (ids * (n // len(ids) + 1))[:n] for n in lengths})


def saved_logits(worker: Worker, ids: list[int], by: str, folder: Path) -> Iterator[np.ndarray]:
    """Chunks of a worker's logits, read one at a time."""
    folder.mkdir(exist_ok=True)
    for file in worker.ask(do="logits", ids=ids, by=by, out=str(folder))["files"]:
        yield np.load(file)


def measure_quality(
    workers: Sequence[Worker], reference: Worker, ids: list[int], decode: bool
) -> dict[str, dict[str, Quality]]:
    """Quality by contestant, of prompts and, if asked for, of single steps."""
    results: dict[str, dict[str, Quality]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        truth = Path(scratch) / "reference"
        truth.mkdir()
        files = reference.ask(do="logits", ids=ids, by="prefill", out=str(truth))["files"]
        for worker in workers:
            for by in ("prefill", "decode") if decode else ("prefill",):
                print(f"quality: {worker.spec.name} by {by}", file=sys.stderr)
                found = saved_logits(worker, ids, by, Path(scratch) / "model")
                quality = compare((np.load(file) for file in files), found, ids)
                results.setdefault(worker.spec.name, {})[by] = quality
    return results


def measure_speed(workers: dict[str, Worker], texts: Texts, plan: Plan) -> Rounds[Worker]:
    """Interleaved rounds."""

    def measure(worker: Worker, prompt_tokens: int) -> Sample:
        return worker.run(texts.prompts[prompt_tokens], plan.new_tokens)

    def progress(stage: str, done: int, total: int) -> None:
        print(f"\r{stage} {done}/{total}", end="", file=sys.stderr, flush=True)

    rounds = Rounds(plan, workers, measure)
    rounds.run(progress)
    print(file=sys.stderr)
    return rounds


def rows(
    workers: dict[str, Worker],
    rounds: Rounds[Worker] | None,
    quality: dict[str, dict[str, Quality]],
) -> list[Row]:
    """One row a contestant and prompt length; one a contestant when only quality was asked for."""
    result = []
    for name, worker in workers.items():
        memory = worker.memory()
        common = {
            "name": name,
            "version": worker.ready["version"],
            "bytes": worker.ready["bytes"],
            "load_s": worker.ready["load_s"],
            "memory": memory,
            "quality": quality.get(name, {}),
        }
        tracks = [t for t in rounds.tracks if t.name == name] if rounds is not None else []
        if rounds is None:
            result.append(Row(**common, prompt_tokens=None, speed=None))
        for track in tracks:
            figures = speed(track.samples, track.prompt_tokens) if track.samples else None
            row = Row(
                **common,
                prompt_tokens=track.prompt_tokens,
                speed=figures,
                failure=track.failure,
                rounds=len(track.samples),
                foreign_load=float(np.median(worker.foreign_load)) if worker.foreign_load else None,
            )
            result.append(row)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    lengths = tuple(int(part) for part in options.prompt_tokens.split(","))
    texts = token_ids(options.source, lengths, options.quality_tokens)
    workers = {spec.name: Worker(spec) for spec in contestants(options)}
    reference = Worker(Spec(REFERENCE, "eager", sys.executable, options.source, options.threads))
    quality: dict[str, dict[str, Quality]] = {}
    rounds = None
    try:
        for worker in workers.values():
            print(f"load: {worker.spec.name}", file=sys.stderr)
            worker.start()
        if not options.only_quality:
            plan = Plan(lengths, options.new_tokens, options.rounds)
            rounds = measure_speed(workers, texts, plan)
        result = rows(workers, rounds, quality)
        if options.quality_from:
            quality = read_quality(options.quality_from)
        elif options.quality_tokens and not (rounds and rounds.interrupted):
            reference.start()
            others = [w for w in workers.values() if w.spec.name != REFERENCE]
            quality = measure_quality(others, reference, texts.evaluation, options.decode_quality)
        result = [dataclasses.replace(row, quality=quality.get(row.name, {})) for row in result]
    except WorkerError as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        for worker in (*workers.values(), reference):
            worker.stop()
    print_rows(result)
    print_ratios(result, [tuple(pair.split("=", 1)) for pair in options.against])
    if options.json:
        save(options.json, result, vars(options))


if __name__ == "__main__":
    main()
