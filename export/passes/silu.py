"""x * Sigmoid(x) -> QuickGelu(x, alpha=1), ONNX Runtime's one-node SiLU."""

from __future__ import annotations

import onnx_ir as ir

from onnxlm.graphs.edit import MICROSOFT, is_op, new_node, only_user, producer, replace, use_domain


def apply(model: ir.Model) -> int:
    """Returns the number of activations fused."""
    count = 0
    for node in list(model.graph):
        if not is_op(node, "Mul"):
            continue
        for x, gate in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
            sigmoid = producer(gate, "Sigmoid")
            if sigmoid is None or gate is None or sigmoid.inputs[0] is not x:
                continue
            if only_user(gate) is not node:
                continue
            fused = new_node("QuickGelu", [x], domain=MICROSOFT, attributes={"alpha": 1.0})
            replace(model.graph, [sigmoid, node], [fused])
            count += 1
            break
    if count:
        use_domain(model, MICROSOFT)
    return count
