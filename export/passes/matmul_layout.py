"""x @ Transpose(W) -> x @ W^T stored as [K, N]: no Transpose is left for a runtime to run or to fold.

A weight with a second reader (a table tied to the LM head) keeps its Transpose: it is stored once.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxlm.graphs.edit import add_tensor, drop_unused, lazy_tensor, new_node, replace
from onnxlm.graphs.linear import Linear, linears


def apply(model: ir.Model) -> int:
    """Returns the number of weights stored transposed."""
    count = 0
    for linear in linears(model.graph):
        if linear.transposed or not linear.owns_weight:
            continue
        turned = _turned(model.graph, linear)
        replace(model.graph, [linear.node], [new_node("MatMul", [linear.x, turned])])
        count += 1
    drop_unused(model)
    return count


def _turned(graph: ir.Graph, linear: Linear) -> ir.Value:
    tensor = linear.weight.const_value
    if tensor is None:
        raise ValueError(f"{linear.name} has no value")
    source = tensor
    rows, columns = linear.shape
    name = linear.name
    linear.weight.name = f"{name}.torch"
    turned = lazy_tensor(name, source.dtype, (columns, rows), lambda: source.numpy().T)
    return add_tensor(graph, turned)
