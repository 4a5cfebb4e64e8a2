"""silu(gate(x)) * up(x) -> one product with both layers' rows, then Split."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxlm.export.passes._merge import can_merge, layer_stem, merge
from onnxlm.graphs.edit import (
    MICROSOFT,
    add_constant,
    drop_unused,
    is_op,
    move,
    new_node,
    producer,
    use_domain,
)
from onnxlm.graphs.linear import Projection, projection


def apply(model: ir.Model) -> int:
    """Returns the number of feed-forward blocks merged."""
    count = 0
    for node in list(model.graph):
        pair = _gate_and_up(node)
        if pair is None:
            continue
        activation, parts = pair
        rows = [part.linear.shape[0] for part in parts]
        # In front of the activation: up's only reader, the Mul, comes later still.
        merged = merge(model.graph, parts, f"{layer_stem(parts)}gate_up_proj", activation)
        sizes = add_constant(
            model.graph, f"split_{rows[0]}_{rows[1]}", np.array(rows, dtype=np.int64)
        )
        split = new_node("Split", [merged, sizes], 2, attributes={"axis": -1})
        model.graph.insert_before(activation, split)
        for part, output in zip(parts, split.outputs, strict=True):
            move(model.graph, part.y, output)
        count += 1
    if count:
        use_domain(model, MICROSOFT)
        drop_unused(model)
    return count


def _gate_and_up(node: ir.Node) -> tuple[ir.Node, list[Projection]] | None:
    """(activation, [gate, up]) when `node` multiplies an activated layer with another of its input."""
    if not is_op(node, "Mul"):
        return None
    for act, plain in (node.inputs, reversed(node.inputs)):
        activation = producer(act, "QuickGelu", MICROSOFT)
        if activation is None:
            continue
        parts = can_merge([projection(activation.inputs[0]), projection(plain)])
        if parts is not None:
            return activation, parts
    return None
