"""A package as a contestant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from onnxlm import io_spec
from onnxlm.io_spec import StateSpec
from onnxlm.manifest import Manifest
from onnxlm.package import Package
from onnxlm.runtime.bench import Case, Rows
from onnxlm.runtime.engine import Batch, prompt_calls
from onnxlm.runtime.graph_cost import Work, node_costs, work_of
from onnxlm.runtime.graph_reader import read_graph
from onnxlm.runtime.machine import describe_machine
from onnxlm.runtime.model import LanguageModel, load
from onnxlm.runtime.providers import find_provider
from onnxlm.runtime.session import assigned_nodes
from onnxlm.runtime.state_buffers import bytes_at
from onnxlm.runtime.tokenizer import Tokenizer

_RANDOM_TOKENS = 4096


@dataclass
class PackageContestant:
    """A package on an execution provider; greedy, and an end-of-text token ends nothing.

    Attributes:
        path: The package's folder.
        provider: Execution provider.
        threads: Threads inside an operator; 0 is all cores.
        allow_fallback: Run on the CPU where the provider cannot.
        options: More of what `onnxlm.runtime.load` takes: kv_budget, device_id, gpu_mem_limit, graph_capture.
    """

    path: str
    provider: str = "cpu"
    threads: int = 0
    allow_fallback: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    _model: LanguageModel | None = None
    _batch: Batch | None = None

    def prepare(self) -> str:
        """Open the sessions; the provider that the decode session really has."""
        self._model = load(
            self.path,
            self.provider,
            threads=self.threads,
            allow_fallback=self.allow_fallback,
            **self.options,
        )
        active: list[str] = self._model.sessions.decode.get_providers()
        return active[0]

    def device_used(self) -> int | None:
        """Bytes of its device's memory that are in use; None where that cannot be asked."""
        number = int(self.options.get("device_id", 0))
        return find_provider(self.provider).device_used(number)

    def placement(self) -> dict[str, Any]:
        """Fields of `Loaded`: why it runs elsewhere than asked for, and which provider got which nodes."""
        model = self._running_model()
        sessions = model.sessions
        graphs = {io_spec.PREFILL: sessions.prefill, io_spec.DECODE: sessions.decode}
        nodes = {name: assigned_nodes(session) for name, session in graphs.items()}
        known = all(found is not None for found in nodes.values())
        return {"fallback": model.fallback, "nodes": nodes if known else None}

    def prefill(self, rows: Rows) -> None:
        """Run prompts in a new batch."""
        self._batch = Batch(self._running_model().sessions, len(rows))
        self.extend(rows)

    def extend(self, rows: Rows) -> None:
        """Run tokens behind those of the batch."""
        batch = self._running()
        batch.set_tokens(batch.prefill_tokens(rows))

    def step(self) -> None:
        """One greedy step."""
        self._running().decode_tokens()

    def _running_model(self) -> LanguageModel:
        if self._model is None:
            raise RuntimeError("used without prepare()")
        return self._model

    def _running(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("a step without prefill()")
        return self._batch


def sample_text() -> str:
    """The bundled text that prompts are cut from."""
    return (files("onnxlm.data") / "evaluation.txt").read_text(encoding="utf-8")


def prompt_rows(package: Path, vocab_size: int, length: int, batch: int) -> list[list[int]]:
    """Rows of `length` tokens: the bundled text, again and again, in the package's own tokens.

    Each row begins elsewhere in the text, so that no two rows of a batch are the same. Without a tokenizer
    the tokens are random.
    """
    tokenizer = Tokenizer.of_package(package, vocab_size)
    if tokenizer.has_text:
        ids = tokenizer.encode(sample_text())
    else:
        ids = np.random.default_rng(0).integers(0, vocab_size, _RANDOM_TOKENS).tolist()
    starts = [row * len(ids) // batch for row in range(batch)]
    longest = ids * ((length + len(ids)) // len(ids) + 1)
    return [longest[start : start + length] for start in starts]


def package_work(package: Package) -> Callable[[Case], tuple[Work, Work]]:
    """What prefill and a decode step in the middle of a case must do at the least.

    Weights are read once a call, of which a long prompt takes several, and a step reads the whole cache;
    attention's products are not counted.

    Raises:
        PackageError: A graph is no ONNX model.
    """
    costs = {
        name: node_costs(read_graph(package.graph_path(name))) for name in package.manifest.graphs
    }
    states = package.manifest.states

    def work(case: Case) -> tuple[Work, Work]:
        prefill = work_of(costs[io_spec.PREFILL], case.batch, case.prompt_tokens)
        calls = prompt_calls(case.batch, case.prompt_tokens)
        step = work_of(costs[io_spec.DECODE], case.batch, 1)
        cached = bytes_at(states, case.batch, case.prompt_tokens + case.new_tokens // 2)
        return Work(prefill.bytes * calls, prefill.flops), Work(step.bytes + cached, step.flops)

    return work


def cache_refusal(states: Sequence[StateSpec], device: str) -> Callable[[Case], str | None]:
    """What is against a case before its rows are even made: more keys and values than the machine has memory.

    Args:
        states: Of the package.
        device: Where its buffers lie; only of the processor's memory is it known how much there is.
    """
    memory = describe_machine().memory_bytes if device == "cpu" else None

    def refuse(case: Case) -> str | None:
        needed = bytes_at(states, case.batch, case.positions)
        if memory is None or needed <= memory:
            return None
        return f"keys and values need {needed:,} bytes, the machine has {memory:,}"

    return refuse


def file_bytes(manifest: Manifest) -> int:
    """Size of the graphs and their weights, without tokenizer and configs."""
    names = {graph.file for graph in manifest.graphs.values()} | {manifest.weights.file}
    return sum(manifest.files[name].bytes for name in names)


def worst_quality(manifest: Manifest) -> dict[str, float]:
    """KL and top-1 of prefill or decode, whichever is worse; empty where the manifest has none."""
    worse = {"kl": max, "top1": min}
    result = {}
    for figure, choose in worse.items():
        found = [v for key, v in manifest.quality.items() if key.rpartition("_")[2] == figure]
        if found:
            result[figure] = choose(found)
    return result
