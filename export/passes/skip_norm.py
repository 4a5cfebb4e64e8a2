"""RMSNormalization(a + b) -> SkipSimplifiedLayerNormalization, which also returns the sum."""

from __future__ import annotations

import onnx_ir as ir

from onnxlm.graphs.edit import MICROSOFT, is_op, move, new_node, producer, use_domain


def apply(model: ir.Model) -> int:
    """Returns the number of norms fused with the residual addition before them."""
    count = 0
    for node in list(model.graph):
        if not is_op(node, "RMSNormalization"):
            continue
        total = node.inputs[0]
        add = producer(total, "Add")
        if add is None or total is None or total.is_graph_output():
            continue
        # The operator's default epsilon is 1e-12: the norm's own must be given.
        fused = new_node(
            "SkipSimplifiedLayerNormalization",
            [add.inputs[0], add.inputs[1], node.inputs[1]],
            4,
            MICROSOFT,
            {"epsilon": node.attributes["epsilon"].as_float()},
        )
        model.graph.insert_before(add, fused)
        move(model.graph, total, fused.outputs[3])
        move(model.graph, node.outputs[0], fused.outputs[0])
        fused.outputs[1].name, fused.outputs[2].name = "", ""
        model.graph.remove([node, add], safe=True)
        count += 1
    if count:
        use_domain(model, MICROSOFT)
    return count
