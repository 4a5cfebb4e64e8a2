"""Fold the tracer's small shape arithmetic, merge equal subexpressions, drop what nothing reads."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants

from onnxlm.graphs.edit import drop_unused

# Elements. Weights of any size are left alone: they keep their torch names.
_SMALL = 64


def apply(model: ir.Model) -> int:
    """Returns the number of nodes removed."""
    before = len(model.graph)
    weights = set(model.graph.initializers.values())

    def reads_weight(node: ir.Node) -> bool | None:
        return False if any(value in weights for value in node.inputs) else None

    fold_constants(
        model, input_size_limit=_SMALL, output_size_limit=_SMALL, should_fold=reads_weight
    )
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _merge_equal(model.graph, keep=weights)
    common.CommonSubexpressionEliminationPass()(model)
    common.IdentityEliminationPass()(model)
    drop_unused(model)
    return before - len(model.graph)


def _merge_equal(graph: ir.Graph, keep: set[ir.Value]) -> None:
    """Let equal lifted constants be one initializer; two weights that happen to be equal stay two."""
    first: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if value in keep or tensor is None:
            continue
        key = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())
        known = first.setdefault(key, value)
        if known is not value:
            ir.convenience.replace_all_uses_with(value, known)
            del graph.initializers[name]
