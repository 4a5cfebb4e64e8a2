"""Q, K and V products that feed one GroupQueryAttention -> one product with packed rows.

One matrix product instead of three: at one token a step the operator's own overhead is the cost.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxlm.export.passes._merge import merge_rows, same_input
from onnxlm.graphs.edit import MICROSOFT, drop_unused, is_op, new_node
from onnxlm.graphs.linear import made_by_linear


def apply(model: ir.Model) -> int:
    """Returns the number of attention nodes that now read packed QKV."""
    count = 0
    for node in list(model.graph):
        if not is_op(node, "GroupQueryAttention", MICROSOFT) or node.inputs[1] is None:
            continue
        parts = same_input([made_by_linear(value) for value in node.inputs[:3]])
        if parts is None:
            continue
        stem = parts[0].name.removesuffix("q_proj.weight")
        weight = merge_rows(model.graph, parts, f"{stem}qkv_proj.weight")
        packed = new_node(
            "FusedMatMul", [parts[0].x, weight], domain=MICROSOFT, attributes={"transB": 1}
        )
        model.graph.insert_before(parts[0].node, packed)
        packed.outputs[0].name = f"{stem}qkv_proj.output"
        packed.outputs[0].type = parts[0].y.type
        node.replace_input_with(0, packed.outputs[0])
        node.replace_input_with(1, None)
        node.replace_input_with(2, None)
        count += 1
    drop_unused(model)
    return count
