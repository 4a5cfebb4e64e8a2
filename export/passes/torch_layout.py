"""x @ Transpose(W) -> FusedMatMul(x, W, transB=1): the weight stays as torch has it, [N, K].

A tied table then serves Gather and the LM head from one tensor, and quantization reads rows.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxlm.graphs.edit import MICROSOFT, drop_unused, new_node, replace, use_domain
from onnxlm.graphs.linear import linears


def apply(model: ir.Model) -> int:
    """Returns the number of products rewritten."""
    count = 0
    for linear in linears(model.graph):
        if linear.transposed or len(linear.path) == 1:
            continue
        fused = new_node(
            "FusedMatMul", [linear.x, linear.weight], domain=MICROSOFT, attributes={"transB": 1}
        )
        replace(model.graph, [linear.node], [fused])
        count += 1
    if count:
        use_domain(model, MICROSOFT)
        drop_unused(model)
    return count
