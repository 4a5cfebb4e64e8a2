"""The factor of attention scores, as the operators have it.

ONNX Runtime's product of one row with a transposed matrix reads that as it lies, but only without a factor.
With one, attention transposes the keys for each query head at each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxlm.graphs.edit import MICROSOFT, is_op

# By operator: which input is [B, Hkv, T, D].
_KEYS = {("Attention", ""): 1, ("GroupQueryAttention", MICROSOFT): 3}


@dataclass(frozen=True)
class Scores:
    """How a node scores its keys.

    Attributes:
        scale: Factor of the scores; positive, not 1.
        width: Of a head, D.
    """

    scale: float
    width: int


def scored(node: ir.Node) -> Scores | None:
    """Of an attention node in fp32 whose scores have a factor; None of any other."""
    index = next((index for op, index in _KEYS.items() if is_op(node, *op)), None)
    keys = None if index is None else node.inputs[index]
    if keys is None or keys.shape is None or len(keys.shape) != 4:
        return None
    width = keys.shape[3]
    if keys.dtype != ir.DataType.FLOAT or not isinstance(width, int):
        return None
    given = node.attributes["scale"].as_float() if "scale" in node.attributes else 0.0
    scale = given or width**-0.5
    return None if scale <= 0 or scale == 1 else Scores(scale, width)


def unscaled(node: ir.Node) -> None:
    """Take the factor away; 0 would mean one over the root of the width."""
    node.attributes["scale"] = ir.AttrFloat32("scale", 1.0)
