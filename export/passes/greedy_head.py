"""Adds the output `next_tokens`, the arg-max of the last kept logits: greedy decoding copies one id a row."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxlm import io_spec
from onnxlm.graphs.edit import add_constant, new_node


def apply(model: ir.Model) -> int:
    """Returns 1, or 0 when the graph has the output already."""
    graph = model.graph
    if any(value.name == io_spec.NEXT_TOKENS for value in graph.outputs):
        return 0
    logits = next(v for v in graph.outputs if v.name == io_spec.LOGITS)
    row = logits if logits.shape is not None and logits.shape[1] == 1 else _last_row(graph, logits)
    best = new_node("ArgMax", [row], attributes={"axis": -1, "keepdims": 0})
    graph.append(best)
    tokens = best.outputs[0]
    tokens.name = io_spec.NEXT_TOKENS
    tokens.shape = ir.Shape([io_spec.BATCH, 1])
    tokens.type = ir.TensorType(ir.DataType.INT64)
    graph.outputs.append(tokens)
    return 1


def _last_row(graph: ir.Graph, logits: ir.Value) -> ir.Value:
    """[B, kept, V] -> [B, 1, V]."""
    last = new_node(
        "Slice",
        [
            logits,
            add_constant(graph, "index_minus_1", np.array([-1], dtype=np.int64)),
            add_constant(graph, "index_end", np.array([np.iinfo(np.int64).max], dtype=np.int64)),
            add_constant(graph, "axis_1", np.array([1], dtype=np.int64)),
        ],
    )
    graph.append(last)
    last.outputs[0].name = "last_logits.row"
    return last.outputs[0]
