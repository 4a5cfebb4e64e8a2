"""The ordered list of what happens to a traced program on its way to prefill and decode graphs."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxlm import io_spec
from onnxlm.export.lowerings import Lowering
from onnxlm.export.passes import run_passes

_COMMON = ("clean",)
_HEADS = {
    io_spec.PREFILL: ("last_logits", "greedy_head"),
    io_spec.DECODE: ("decode_step", "latent_step", "query_scale", "greedy_head"),
}


@dataclass(frozen=True)
class BuiltGraph:
    """A finished graph and how often each pass fired on it."""

    model: ir.Model
    fusions: dict[str, int]


def build_graphs(traced: ir.Model, lowering: Lowering) -> dict[str, BuiltGraph]:
    """Make the prefill and decode graphs of one traced program; weights are shared between them.

    Args:
        traced: From `tracing.trace`; changed in place.
        lowering: The lowering it was traced with.
    """
    shared = run_passes(traced, (*_COMMON, *lowering.passes))
    graphs: dict[str, BuiltGraph] = {}
    for name, passes in _HEADS.items():
        model = traced.clone()
        own = run_passes(model, passes)
        model.producer_name = "onnxlm"
        model.graph.name = name
        graphs[name] = BuiltGraph(model, shared | own)
    return graphs
