"""Logits of each row's last `num_logits_to_keep` real tokens: no prompt x vocabulary tensor is made.

The new input is an optional scalar (default 1, at least 1). Where a row has fewer new columns than asked for,
the first kept rows repeat its first column. Gather indices are [batch_size, kept].
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxlm import io_spec
from onnxlm.graphs.edit import add_constant, new_node
from onnxlm.graphs.linear import linears


def apply(model: ir.Model) -> int:
    """Returns 1, or 0 when the graph has the input already."""
    graph = model.graph
    if any(value.name == io_spec.LOGITS_TO_KEEP for value in graph.inputs):
        return 0
    logits = next(v for v in graph.outputs if v.name == io_spec.LOGITS)
    head = next(linear for linear in linears(graph) if _feeds(linear.y, logits))
    hidden = head.x
    anchor = head.path[0]

    keep = ir.Value(
        name=io_spec.LOGITS_TO_KEEP,
        shape=ir.Shape([]),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.tensor(np.array(1, dtype=np.int64), name=io_spec.LOGITS_TO_KEEP),
    )
    graph.inputs.append(keep)
    graph.register_initializer(keep)

    def constant(name: str, value: object) -> ir.Value:
        return add_constant(graph, name, np.array(value, dtype=np.int64))

    def emit(op: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        node = new_node(op, inputs, attributes=attributes)
        graph.insert_before(anchor, node)
        node.outputs[0].name = f"last_logits.{op.lower()}_{len(graph)}"
        return node.outputs[0]

    zero, one = constant("int64_0", 0), constant("int64_1", 1)
    axis = constant("axis_1", [1])
    ids, mask = (_input(graph, name) for name in (io_spec.INPUT_IDS, io_spec.ATTENTION_MASK))
    total, new = emit("Shape", mask, start=1, end=2), emit("Shape", ids, start=1, end=2)
    new_mask = emit("Slice", mask, emit("Sub", total, new), total, axis)
    # The last 1 of each row, not the number of ones: a row padded on the left ends at its last column.
    columns = emit("Range", zero, emit("Squeeze", new), one)
    last = emit("ReduceMax", emit("Mul", new_mask, columns), axis, keepdims=1)  # [B, 1]
    offsets = emit("Sub", emit("Range", one, emit("Add", keep, one), one), keep)  # 1 - kept .. 0
    positions = emit("Max", emit("Add", last, offsets), zero)  # [B, kept]
    indices = emit("Unsqueeze", positions, constant("axis_2", [2]))
    # GatherElements would want indices as wide as the hidden size; GatherND with batch_dims takes rows.
    rows = emit("GatherND", hidden, indices, batch_dims=1)  # [B, kept, H]
    rows.type = hidden.type
    head.node.replace_input_with(0, rows)
    assert logits.shape is not None
    logits.shape = ir.Shape([io_spec.BATCH, io_spec.LOGITS_TO_KEEP, logits.shape[-1]])
    return 1


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def _feeds(value: ir.Value, output: ir.Value) -> bool:
    """Whether `value` is `output` or reaches it through single-input nodes."""
    current: ir.Value | None = output
    while current is not None and current is not value:
        node = current.producer()
        current = None if node is None else node.inputs[0]
        if node is not None and node.op_type in ("MatMul", "FusedMatMul") and current is not value:
            return node.outputs[0] is value
    return current is value
