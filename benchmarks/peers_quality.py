"""Quality of every contestant from its own logits, with the same token ids, against eager fp32 logits."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from worker_process import Worker, WorkerError

from onnxlm.models.checkpoint import read
from onnxlm.quality import Quality, QualityMeter


@dataclass(frozen=True)
class Texts:
    """Token ids of the bundled English text.

    Attributes:
        evaluation: What quality is measured on, and the one token behind it.
        prompts: By length; the text is repeated as often as it takes.
    """

    evaluation: list[int]
    prompts: dict[int, list[int]]


def read_texts(source: str, lengths: Sequence[int], evaluation: int) -> Texts:
    """The text in the tokens of a checkpoint."""
    text = (files("onnxlm.data") / "evaluation.txt").read_text(encoding="utf-8")
    tokenizer_file = read(source).tokenizer_files["tokenizer.json"]
    ids = Tokenizer.from_str(tokenizer_file.decode("utf-8")).encode(text).ids
    if evaluation >= len(ids):
        raise SystemExit(f"--quality-tokens {evaluation}: the text has {len(ids)}")
    return Texts(ids[: evaluation + 1], {n: (ids * (n // len(ids) + 1))[:n] for n in lengths})


def measure_quality(
    workers: Sequence[Worker], reference: Worker, ids: list[int], ways: Sequence[str]
) -> dict[str, dict[str, Quality]]:
    """Figures by contestant and way.

    Args:
        workers: Running contestants.
        reference: The running worker of the eager model.
        ids: A text and one token behind it.
        ways: "prefill", "decode" or both.
    """
    results: dict[str, dict[str, Quality]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        truth = _logits(reference, ids[:-1], "prefill", Path(scratch) / "reference")
        for worker in workers:
            for way in ways:
                print(f"quality: {worker.spec.name} by {way}", file=sys.stderr)
                try:
                    found = _logits(worker, ids[:-1], way, Path(scratch) / "contestant")
                except WorkerError as error:  # a library that keeps its logits
                    print(f"no quality: {error}", file=sys.stderr)
                    continue
                results.setdefault(worker.spec.name, {})[way] = _compare(truth, found, ids[1:])
    return results


def _logits(worker: Worker, ids: list[int], way: str, folder: Path) -> list[str]:
    """Files of logits, in the order of the text."""
    folder.mkdir(exist_ok=True)
    names: list[str] = worker.ask(do="logits", ids=ids, by=way, out=str(folder))["files"]
    return names


def _compare(truth: Sequence[str], found: Sequence[str], targets: Sequence[int]) -> Quality:
    meter, done = QualityMeter(), 0
    for expected, file in zip(truth, found, strict=True):
        reference = np.load(expected)
        end = done + len(reference)
        meter.add(reference, np.load(file), np.array(targets[done:end]))
        done = end
    return meter.result()
