"""Q, K and V products that feed one GroupQueryAttention -> one product with packed rows.

One matrix product instead of three: at one token a step the operator's own overhead is the cost.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxlm.export.passes._merge import can_merge, layer_stem, merge
from onnxlm.graphs.edit import MICROSOFT, drop_unused, is_op, use_domain
from onnxlm.graphs.linear import projection


def apply(model: ir.Model) -> int:
    """Returns the number of attention nodes that now read packed QKV."""
    count = 0
    for node in list(model.graph):
        if not is_op(node, "GroupQueryAttention", MICROSOFT):
            continue
        parts = can_merge([projection(value) for value in node.inputs[:3]])
        if parts is None:
            continue
        packed = merge(model.graph, parts, f"{layer_stem(parts)}qkv_proj", node)
        node.replace_input_with(0, packed)
        node.replace_input_with(1, None)
        node.replace_input_with(2, None)
        count += 1
    if count:
        use_domain(model, MICROSOFT)
        drop_unused(model)
    return count
