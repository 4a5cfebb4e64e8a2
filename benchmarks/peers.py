"""Compare packages of onnxlm with other runtimes of the same weights: speed, memory and quality in one table.

Every contestant lives in a process of its own, with its own interpreter. Rounds are interleaved: in each,
every contestant runs once, so that a machine that gets slower or busier hits all alike. Quality is each
contestant's own logits on one text against the eager fp32 model's, with the same token ids. A contestant
that cannot be loaded or run is a row with the reason.

    python benchmarks/peers.py --source model.gguf --package int8=packages/int8 \\
        --llama q8_0=q8_0.gguf --genai genai_int4=genai_int4 \\
        --python llama=.peers/llama/bin/python --python genai=.peers/genai/bin/python \\
        --against int8=q8_0 --json results.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from peers_quality import Texts, measure_quality, read_texts
from peers_report import MEMORY, Row, print_ratios, print_rows, read_quality, save
from roofline import bytes_per_step
from worker_process import Spec, Worker, WorkerError

from onnxlm.quality import Quality
from onnxlm.runtime.bench import Case, Plan, Rounds, Sample

# Name -> whether the model goes through torch.compile.
TORCH = {"eager fp32": False, "torch.compile fp32": True}
KINDS = {
    "package": "a package folder of onnxlm",
    "llama": "a GGUF file for llama.cpp",
    "genai": "a folder of onnxruntime-genai's model builder",
    "optimum": "a folder of optimum-onnx's exporter",
    "openvino": "a folder of optimum-intel's exporter, for OpenVINO GenAI",
    "ctranslate2": "a folder of CTranslate2's converter",
}
# Whose folder or file `bytes_per_step` can read; of the others a step is taken to read the whole file.
KNOWN_FILES = ("package", "llama", "genai", "optimum")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--source", required=True, help="checkpoint of the reference model (GGUF file or folder)")
    for kind, what in KINDS.items():
        add(f"--{kind}", action="append", default=[], metavar="NAME=PATH", help=what)
    add("--python", action="append", default=[], metavar="KIND=PATH", help="interpreter for a kind")
    add("--eager", action="store_true", help="time the eager PyTorch model (fp32) too")
    add("--compile", action="store_true", help="and the one that went through torch.compile")
    add(
        "--left-out",
        action="append",
        default=[],
        metavar="NAME=REASON",
        help="a row without figures",
    )
    add("--roofline", action="store_true", help="read memory as a contestant of its own")
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


def contestants(options: argparse.Namespace) -> list[Spec]:
    """What the command line names, in the order in which they take turns."""
    pythons = dict(_pair("python", text) for text in options.python)
    named = [
        Spec(name, kind, pythons.get(kind, sys.executable), path, options.threads)
        for kind in KINDS
        for name, path in (_pair(kind, text) for text in getattr(options, kind))
    ]
    asked = {False: options.eager, True: options.compile}
    extra = [
        Spec(
            *(name, "eager", sys.executable, options.source, options.threads),
            flags=("--compile",) if compiled else (),
        )
        for name, compiled in TORCH.items()
        if asked[compiled]
    ]
    if options.roofline:
        extra.append(Spec(MEMORY, "memory_read", sys.executable, "-", options.threads))
    return named + extra


def _pair(option: str, text: str) -> tuple[str, str]:
    left, separator, right = text.partition("=")
    if not separator:
        raise SystemExit(f"--{option} {text}: wants two parts with = between them")
    return left, right


def load(specs: Sequence[Spec]) -> tuple[dict[str, Worker], list[Row]]:
    """Running workers by name, and a row for each that cannot be loaded.

    Raises:
        WorkerError: None can.
    """
    workers, refused = {}, []
    for spec in specs:
        print(f"load: {spec.name}", file=sys.stderr)
        worker = Worker(spec)
        try:
            worker.start()
            workers[spec.name] = worker
        except WorkerError as error:
            worker.stop()
            refused.append(Row.absent(spec.name, str(error).removeprefix(f"{spec.name}: ")))
            last = error
    if not workers and refused:
        raise last
    return workers, refused


def measure_speed(workers: Mapping[str, Worker], texts: Texts, plan: Plan) -> Rounds[Worker]:
    """Interleaved rounds."""

    def measure(worker: Worker, case: Case) -> Sample:
        return worker.run(texts.prompts[case.prompt_tokens], case.new_tokens)

    def progress(stage: str, done: int, total: int) -> None:
        print(f"\r{stage} {done}/{total}", end="", file=sys.stderr, flush=True)

    rounds = Rounds(plan, dict(workers), measure)
    rounds.run(progress)
    print(file=sys.stderr)
    return rounds


def read_per_step(worker: Worker) -> int:
    """Bytes of weights that a step of a contestant reads."""
    known = worker.spec.kind in KNOWN_FILES
    return bytes_per_step(worker.spec.path) if known else worker.ready["bytes"]


def make_rows(
    workers: Mapping[str, Worker], read: Mapping[str, int], rounds: Rounds[Worker] | None
) -> list[Row]:
    """One row a contestant and prompt length; one a contestant when speed was not asked for."""
    rows = []
    for name, worker in workers.items():
        row = Row(
            name=name,
            version=worker.ready["version"],
            bytes=worker.ready["bytes"],
            bytes_per_step=read[name],
            load_s=worker.ready["load_s"],
            memory=worker.memory(),
            foreign_load=float(np.median(worker.foreign_load)) if worker.foreign_load else None,
        )
        if rounds is None:
            rows.append(row)
            continue
        rows += [
            dataclasses.replace(
                row,
                prompt_tokens=track.case.prompt_tokens,
                samples=tuple(track.samples),
                failure=track.failure,
            )
            for track in rounds.tracks
            if track.name == name
        ]
    return rows


def find_quality(
    options: argparse.Namespace, workers: Mapping[str, Worker], texts: Texts
) -> dict[str, dict[str, Quality]]:
    """Figures by contestant, from an earlier result or measured."""
    if options.quality_from:
        return read_quality(options.quality_from)
    if not options.quality_tokens:
        return {}
    able = [worker for worker in workers.values() if worker.spec.kind in KINDS]
    ways = ("prefill", "decode") if options.decode_quality else ("prefill",)
    reference = Worker(Spec("reference", "eager", sys.executable, options.source, options.threads))
    try:
        reference.start()
        return measure_quality(able, reference, texts.evaluation, ways)
    finally:
        reference.stop()


def measure(options: argparse.Namespace, workers: Mapping[str, Worker], texts: Texts) -> list[Row]:
    """Speed, memory, quality: as the options want it."""
    rounds = None
    read = {name: read_per_step(worker) for name, worker in workers.items()}
    if not options.only_quality:
        cases = tuple(Case(length, options.new_tokens) for length in texts.prompts)
        rounds = measure_speed(workers, texts, Plan(cases, options.rounds))
    rows = make_rows(workers, read, rounds)  # memory before the quality run, which holds logits
    quality = {} if rounds and rounds.interrupted else find_quality(options, workers, texts)
    return [dataclasses.replace(row, quality=quality.get(row.name, {})) for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    lengths = tuple(int(part) for part in options.prompt_tokens.split(","))
    texts = read_texts(options.source, lengths, options.quality_tokens)
    left_out = [Row.absent(*_pair("left-out", text)) for text in options.left_out]
    workers: dict[str, Worker] = {}
    try:
        workers, refused = load(contestants(options))
        rows = [*measure(options, workers, texts), *refused, *left_out]
    except WorkerError as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        for worker in workers.values():
            worker.stop()
    print_rows(rows)
    print_ratios(rows, [_pair("against", text) for text in options.against])
    if options.json:
        save(options.json, rows, vars(options))


if __name__ == "__main__":
    main()
