"""Exactly one new token a row, past required: what only longer chunks need is taken out."""

from __future__ import annotations

import onnx_ir as ir

from onnxlm import io_spec
from onnxlm.graphs.edit import MICROSOFT, drop_unused, is_op

_QUERY_SEQLENS = 16


def apply(model: ir.Model) -> int:
    """Returns the number of attention nodes simplified."""
    count = 0
    for value in [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]:
        if value.shape is not None:
            value.shape = ir.Shape([1 if str(d) == io_spec.SEQUENCE else d for d in value.shape])
    for node in model.graph:
        if is_op(node, "GroupQueryAttention", MICROSOFT) and len(node.inputs) > _QUERY_SEQLENS:
            node.replace_input_with(_QUERY_SEQLENS, None)
            node.resize_inputs(_QUERY_SEQLENS)
            count += 1
    drop_unused(model)
    return count
