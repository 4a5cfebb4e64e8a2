"""Attention with rotary positions: the factor of the scores moves into the tables of cosines and sines.

A rotation that also multiplies by sqrt(scale) gives queries and keys whose scores need no factor (`_scores`
says why that pays). The cache then holds keys times sqrt(scale).

Measured on one thread of a Xeon (Sapphire Rapids), a step behind 128, 512 and 2,048 tokens takes 0.59, 0.53
and 0.65 of the operator's time (9 heads on 3 of width 64), 0.47, 0.56 and 0.58 (32 on 8 of 128). Calls of
more tokens take what they took.

Only where all of a head turns: what a narrower table leaves alone would not be multiplied. fp16 is left as it
is, where the rounding of the root would be that of all scores.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxlm.export.passes._scores import Scores, scored, unscaled
from onnxlm.graphs.edit import MICROSOFT, add_constant, drop_unused, is_op

_PAST_KEY, _COS, _SIN = 3, 7, 8


def apply(model: ir.Model) -> int:
    """Returns the number of attention nodes whose scores need no factor any more."""
    count = 0
    for node in list(model.graph):
        scores = scored(node)
        if scores is None or not _turns_whole(node, scores) or not _owns_keys(node):
            continue
        for index in (_COS, _SIN):
            table = node.inputs[index]
            assert table is not None
            node.replace_input_with(index, _times_root(model.graph, table, scores.scale))
        unscaled(node)
        count += 1
    if count:
        drop_unused(model)
    return count


def _turns_whole(node: ir.Node, scores: Scores) -> bool:
    """Whether the operator turns all of a head, by tables that are constants."""
    if not is_op(node, "GroupQueryAttention", MICROSOFT) or len(node.inputs) <= _SIN:
        return False
    tables = [node.inputs[index] for index in (_COS, _SIN)]
    constants = [None if table is None else table.const_value for table in tables]
    return all(
        constant is not None
        and constant.dtype == ir.DataType.FLOAT
        and constant.shape.numpy()[1] * 2 == scores.width
        for constant in constants
    )


def _owns_keys(node: ir.Node) -> bool:
    """Whether nobody else reads the keys that it keeps."""
    past, present = node.inputs[_PAST_KEY], node.outputs[1]
    return past is not None and len(past.uses()) == 1 and not present.uses()


def _times_root(graph: ir.Graph, table: ir.Value, scale: float) -> ir.Value:
    constant = table.const_value
    assert constant is not None
    values = constant.numpy().astype(np.float64) * scale**0.5
    return add_constant(graph, f"{table.name}.times_root_{scale:.9g}", values.astype(np.float32))
