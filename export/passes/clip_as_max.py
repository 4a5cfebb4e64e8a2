"""Clip with a least value and no largest -> Max.

OpenVINO 2025.4 takes the missing largest value of 64-bit integers for a number that does not fit them, and
gives 0 for everything: all tokens would be at position 0.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxlm.graphs.edit import is_op, new_node, replace


def apply(model: ir.Model) -> int:
    """Returns the number of nodes replaced."""
    count = 0
    for node in list(model.graph):
        if not is_op(node, "Clip") or len(node.inputs) < 2 or node.inputs[1] is None:
            continue
        if any(value is not None for value in node.inputs[2:]):
            continue
        replace(model.graph, [node], [new_node("Max", list(node.inputs[:2]))])
        count += 1
    return count
