"""Hot models exported once a test session, and their graphs run with ONNX Runtime.

Legend of shapes: B rows, S new tokens a row, P cached columns, T = P + S, V vocabulary size.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from onnxlm import io_spec
from onnxlm.export.lowerings import find_lowering
from onnxlm.export.pipeline import BuiltGraph, build_graphs
from onnxlm.export.tracing import trace
from onnxlm.graphs.weights_file import write_graphs
from onnxlm.models import load
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.registry import architecture_names, find_architecture
from support.hot import hot_model, oracle_logits, save_folder

DATA = "model.onnx_data"
# Of ONNX Runtime's optimizations; True is all, False none.
Level = ort.GraphOptimizationLevel | bool
# Folders that live as long as the session.
_ROOT = tempfile.TemporaryDirectory(prefix="onnxlm-exported-")


def variants(model_type: str) -> dict[str, dict[str, Any]]:
    """The family's configs that tests go through."""
    architecture = find_architecture(model_type)
    changes = {"tiny": {}, **architecture.variants}
    return {name: {**architecture.tiny, **change} for name, change in changes.items()}


CASES = [(family, variant) for family in architecture_names() for variant in variants(family)]


def oracle(family: str, variant: str = "tiny") -> PreTrainedModel:
    """The transformers model."""
    return _oracle(family, variant)


@functools.cache
def _oracle(family: str, variant: str) -> PreTrainedModel:
    return hot_model(variants(family)[variant])


def eager(family: str, variant: str = "tiny", dtype: torch.dtype = torch.float32) -> DecoderLM:
    """The project's model of the same weights."""
    return _eager(family, variant, dtype)


@functools.cache
def _eager(family: str, variant: str, dtype: torch.dtype) -> DecoderLM:
    folder = Path(tempfile.mkdtemp(dir=_ROOT.name))
    return load(save_folder(oracle(family, variant), folder), dtype)


@dataclass(frozen=True, eq=False)
class Exported:
    """One model as graphs on disk."""

    family: str
    variant: str
    lowering: str
    graphs: Mapping[str, BuiltGraph]
    folder: Path

    def oracle_logits(self, ids: Sequence[int]) -> Tensor:
        """float32 [len(ids), V] of transformers, one row run alone, at once."""
        return oracle_logits(oracle(self.family, self.variant), list(ids))

    def runner(self, optimized: bool = True) -> Runner:
        return _runner(self.folder, optimized)


@functools.cache
def _runner(folder: Path, optimized: bool) -> Runner:
    return Runner(folder, optimized)


def traced(
    family: str, variant: str, lowering: str, dtype: torch.dtype = torch.float32
) -> ir.Model:
    """The traced program, a fresh copy: passes work in place."""
    return _traced(family, variant, lowering, dtype).clone()


@functools.cache
def _traced(family: str, variant: str, lowering: str, dtype: torch.dtype) -> ir.Model:
    return trace(eager(family, variant, dtype), find_lowering(lowering))


def exported(
    family: str, variant: str, lowering: str, dtype: torch.dtype = torch.float32
) -> Exported:
    """Trace, run every pass, write: once a session."""
    return _exported(family, variant, lowering, dtype)


# A cache tells a default from the same value given: the public functions have the defaults, not these.
@functools.cache
def _exported(family: str, variant: str, lowering: str, dtype: torch.dtype) -> Exported:
    target = find_lowering(lowering)
    graphs = build_graphs(traced(family, variant, lowering, dtype), target)
    folder = Path(tempfile.mkdtemp(dir=_ROOT.name))
    write_graphs({f"{name}.onnx": graph.model for name, graph in graphs.items()}, folder, DATA)
    return Exported(family, variant, lowering, graphs, folder)


Past = dict[str, NDArray[Any]]


class Runner:
    """Prefill and decode sessions of one export, fed as any runtime would feed them."""

    def __init__(self, folder: Path, optimized: Level, log_severity: int = 3) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = log_severity
        options.intra_op_num_threads = 1
        if optimized is False:
            optimized = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if optimized is not True:
            options.graph_optimization_level = optimized
        self.prefill = ort.InferenceSession(str(folder / "prefill.onnx"), options)
        self.decode = ort.InferenceSession(str(folder / "decode.onnx"), options)
        self.states = {
            value.name: value
            for value in self.prefill.get_inputs()
            if value.name.startswith(io_spec.PAST_PREFIX)
        }

    def empty(self, rows: int = 1, columns: int = 0, fill: float = 0.0) -> Past:
        """Caches of so many columns that hold nothing yet."""
        past = {}
        for name, value in self.states.items():
            sizes = {io_spec.BATCH: rows, io_spec.PAST: columns, io_spec.WINDOW_PAST: columns}
            shape = [sizes.get(dim, dim) for dim in value.shape]
            dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[value.type]
            past[name] = np.full(shape, fill, dtype=dtype)
        return past

    def run(
        self,
        ids: Any,
        past: Past,
        mask: Any = None,
        keep: int | None = None,
    ) -> tuple[Tensor, Past]:
        """Run the prefill graph.

        Args:
            ids: [B, S].
            past: Caches.
            mask: [B, T]; all real, behind a past of the caches' width, when None.
            keep: `num_logits_to_keep`; not given when None.

        Returns:
            Logits [B, kept, V] and the present, named as the next past.
        """
        feeds = self._feeds(ids, past, mask)
        if keep is not None:
            feeds[io_spec.LOGITS_TO_KEEP] = np.array(keep, dtype=np.int64)
        return self._call(self.prefill, feeds)

    def step(self, tokens: Any, past: Past, mask: Any = None) -> tuple[Tensor, Past]:
        """Run the decode graph on one token a row, [B]; returns logits [B, 1, V] and the present."""
        return self._call(self.decode, self._feeds(np.asarray(tokens)[:, None], past, mask))

    def _feeds(self, ids: Any, past: Past, mask: Any) -> dict[str, NDArray[Any]]:
        ids = np.asarray(ids, dtype=np.int64)
        if mask is None:
            mask = np.ones((len(ids), next(iter(past.values())).shape[2] + ids.shape[1]))
        return {
            io_spec.INPUT_IDS: ids,
            io_spec.ATTENTION_MASK: np.asarray(mask, dtype=np.int64),
            **past,
        }

    def _call(
        self, session: ort.InferenceSession, feeds: dict[str, NDArray[Any]]
    ) -> tuple[Tensor, Past]:
        outputs = self._outputs(session, feeds)
        logits = torch.from_numpy(outputs[io_spec.LOGITS])
        best = torch.from_numpy(outputs[io_spec.NEXT_TOKENS])
        assert torch.equal(best, logits[:, -1:].argmax(-1)), "next_tokens is not the arg-max"
        return logits, {name: outputs[io_spec.present_of(name)] for name in self.states}

    def _outputs(
        self, session: ort.InferenceSession, feeds: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))
