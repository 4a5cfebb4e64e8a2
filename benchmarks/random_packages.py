"""Packages of random weights, for benchmarks of what a shape of model costs, and times of their steps."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from onnxlm.export import export
from onnxlm.models.checkpoint.own_module import from_module
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.package import Package, open_package
from onnxlm.quantize import quantize
from onnxlm.runtime import LanguageModel, load
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.foreign_load import ForeignLoad
from onnxlm.runtime.machine import describe_machine

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = len(BYTES)


def tokenizer_files() -> dict[str, bytes]:
    """A tokenizer of single bytes: calibration wants to read a text."""
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return {"tokenizer.json": tokenizer.to_str().encode()}


def make(
    folder: Path, name: str, build: Callable[[], DecoderLM], precisions: tuple[str, ...]
) -> dict[str, Package]:
    """Packages of one random model by precision, fp32 the first of them; those that lie there are kept."""
    found: dict[str, Package] = {}
    for precision in precisions:
        path = folder / f"{name}-{precision}"
        if not path.exists():
            print(f"make {path}", flush=True)
            if precision == "fp32":
                torch.manual_seed(0)
                source = from_module(build(), name=name, tokenizer_files=tokenizer_files())
                export(source, path)
            else:
                quantize(found["fp32"], path, scheme=precision)
        found[precision] = open_package(path)
    return found


class Stepper:
    """One row behind a cache of a given length, stepped over the same random tokens again and again.

    With `one_token` all of these tokens are one, so that every step chooses much the same experts.
    """

    def __init__(
        self, package: Package, threads: int, cached: int, steps: int, one_token: bool = False
    ) -> None:
        self.model: LanguageModel = load(package.path, threads=threads)
        self.batch = Batch(self.model.sessions, 1)
        self.cached = cached
        # Room for all steps; what a cached column holds does not matter to the time.
        self.batch.cache.grow(cached + steps + 1, 1)
        generator = np.random.default_rng(0)
        self.tokens = generator.integers(0, 1 if one_token else VOCABULARY, (steps, 1))
        self.run()

    def run(self) -> float:
        """Median seconds of a step."""
        self.batch.cache.rewind(np.array([self.cached], dtype=np.int64))
        times = []
        for token in self.tokens:
            self.batch.set_tokens(token)
            began = time.perf_counter()
            self.batch.decode_tokens()
            times.append(time.perf_counter() - began)
        return float(np.median(times))


def rounds_of(steppers: Mapping[str, Stepper], rounds: int) -> tuple[dict[str, list[float]], float]:
    """Every stepper's time in every round, in changing order, and the cores that others used meanwhile."""
    times: dict[str, list[float]] = {name: [] for name in steppers}
    load = ForeignLoad()
    for turn in range(rounds):
        names = list(steppers) if turn % 2 else list(reversed(steppers))
        for name in names:
            times[name].append(steppers[name].run())
    return times, load.cores() or 0.0


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
    """The median of the rounds' own ratios."""
    return float(np.median(np.array(times[name]) / np.array(times[base])))


def save(path: Path | None, schema: str, options: Mapping[str, Any], rows: list[Any]) -> None:
    """Print a JSON line, or write it with the machine to `path`."""
    result = {
        "schema": schema,
        "machine": dataclasses.asdict(describe_machine()),
        "options": dict(options),
        "rows": rows,
    }
    if path is None:
        print(json.dumps(result))
    else:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
