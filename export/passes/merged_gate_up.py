"""act(x @ gate) * (x @ up) -> one product with both weights' rows, then Split."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxlm.export.passes._merge import merge_rows, same_input
from onnxlm.graphs.edit import MICROSOFT, add_constant, drop_unused, is_op, move, new_node
from onnxlm.graphs.linear import Linear, as_linear, made_by_linear


def apply(model: ir.Model) -> int:
    """Returns the number of feed-forward blocks merged."""
    count = 0
    for node in list(model.graph):
        pair = _gate_and_up(node)
        if pair is None:
            continue
        gate, up = pair
        stem = gate.name.removesuffix("gate_proj.weight")
        weight = merge_rows(model.graph, [gate, up], f"{stem}gate_up_proj.weight")
        product = new_node(
            "FusedMatMul", [gate.x, weight], domain=MICROSOFT, attributes={"transB": 1}
        )
        sizes = add_constant(
            model.graph,
            f"split_{gate.shape[0]}_{up.shape[0]}",
            np.array([gate.shape[0], up.shape[0]], dtype=np.int64),
        )
        split = new_node("Split", [product.outputs[0], sizes], 2, attributes={"axis": -1})
        first = gate.node
        model.graph.insert_before(first, [product, split])
        product.outputs[0].name = f"{stem}gate_up_proj.output"
        for old, new in zip((gate.y, up.y), split.outputs, strict=True):
            move(model.graph, old, new)
        count += 1
    drop_unused(model)
    return count


def _gate_and_up(node: ir.Node) -> tuple[Linear, Linear] | None:
    """(gate, up) when `node` multiplies an activation of one linear with another of the same input."""
    if not is_op(node, "Mul"):
        return None
    for act, plain in (node.inputs, reversed(node.inputs)):
        up = made_by_linear(plain)
        activation = None if act is None else act.producer()
        if up is None or activation is None or not is_op(activation, "QuickGelu", MICROSOFT):
            continue
        gate_value = activation.inputs[0]
        gate = None if gate_value is None else as_linear(gate_value.producer())
        pair = same_input([gate, up])
        if pair is not None:
            return pair[0], pair[1]
    return None
