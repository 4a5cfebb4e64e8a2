"""Caches of layers with a sliding window may lose tokens that no later query sees.

Where a runtime says how many of each row's first tokens are gone (input `num_evicted_tokens`), the operator
counts lengths without them, and takes the cache's own columns for the most that a row has. Rotary positions
are an input of their own, so keys stay as they were turned.

The operator has an attribute `sliding_window_cache` that moves a cache's content itself. It wants a buffer of
a whole window from the first token on, and drops tokens that a short rewind needs; on CUDA, by its own
description, a buffer of just the window.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxlm import io_spec
from onnxlm.graphs.edit import MICROSOFT, add_constant, is_op, new_node

_PAST_KEY, _LENGTHS, _TOTAL = 3, 5, 6


def apply(model: ir.Model) -> int:
    """Returns the number of attention nodes that may lack tokens."""
    graph = model.graph
    if any(value.name == io_spec.EVICTED for value in graph.inputs):
        return 0
    nodes = [node for node in graph if _is_windowed(node)]
    if not nodes:
        return 0
    lengths, total = (nodes[0].inputs[i] for i in (_LENGTHS, _TOTAL))
    if any((node.inputs[_LENGTHS], node.inputs[_TOTAL]) != (lengths, total) for node in nodes):
        raise ValueError("attention nodes that share a mask count its tokens several times")
    counts = _without_evicted(graph, nodes[0])
    for node in nodes:
        for index, value in zip((_LENGTHS, _TOTAL), counts, strict=True):
            node.replace_input_with(index, value)
    return len(nodes)


def _is_windowed(node: ir.Node) -> bool:
    if not is_op(node, "GroupQueryAttention", MICROSOFT):
        return False
    past = node.inputs[_PAST_KEY]
    return past is not None and past.shape is not None and str(past.shape[2]) == io_spec.WINDOW_PAST


def _without_evicted(graph: ir.Graph, anchor: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Lengths [B] and total of the anchor, of the tokens that its cache holds."""
    past, lengths, total = (anchor.inputs[i] for i in (_PAST_KEY, _LENGTHS, _TOTAL))
    evicted = ir.Value(
        name=io_spec.EVICTED,
        shape=ir.Shape(io_spec.EVICTED_AXES),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.tensor(np.zeros((1, 0), dtype=np.int64), name=io_spec.EVICTED),
    )
    graph.inputs.append(evicted)
    graph.register_initializer(evicted)

    def emit(op: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        node = new_node(op, inputs, attributes=attributes)
        graph.insert_before(anchor, node)
        node.outputs[0].name = f"window_cache.{op.lower()}_{len(graph)}"
        return node.outputs[0]

    def size(value: ir.Value | None, axis: int, to: ir.DataType) -> ir.Value:
        return emit(
            "Cast", emit("Squeeze", emit("Shape", value, start=axis, end=axis + 1)), to=to.value
        )

    axis = add_constant(graph, "axis_1", np.array([1], dtype=np.int64))
    gone = emit("ReduceSum", evicted, axis, keepdims=0)
    held = emit("Sub", lengths, emit("Cast", gone, to=ir.DataType.INT32.value))
    # From shapes alone, which stay on the processor: the operator reads its total there.
    given, columns = size(evicted, 1, ir.DataType.BOOL), size(past, 2, ir.DataType.INT32)
    return held, emit("Where", given, columns, total)
