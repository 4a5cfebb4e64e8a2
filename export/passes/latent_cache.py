"""A cache that is key and value at once: its second present becomes an output too.

GroupQueryAttention writes keys and values into two buffers. Where both pasts are one input, a runtime binds
one buffer to the two presents, and nothing is held twice.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxlm import io_spec
from onnxlm.graphs.edit import MICROSOFT, is_op

_PAST_KEY, _PAST_VALUE = 3, 4


def apply(model: ir.Model) -> int:
    """Returns the number of attention nodes whose caches are one."""
    count = 0
    for node in model.graph:
        if not is_op(node, "GroupQueryAttention", MICROSOFT):
            continue
        past = node.inputs[_PAST_KEY]
        if past is None or past is not node.inputs[_PAST_VALUE]:
            continue
        present, twin = node.outputs[1], node.outputs[2]
        if twin.is_graph_output():
            continue
        twin.name = io_spec.twin_of(io_spec.present_of(past.name or ""))
        twin.shape, twin.type = present.shape, present.type
        model.graph.outputs.append(twin)
        count += 1
    return count
