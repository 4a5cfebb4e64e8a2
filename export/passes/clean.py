"""Fold the tracer's small shape arithmetic, merge equal subexpressions, drop what nothing reads."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import fold_constants

from onnxlm.graphs.edit import drop_unused

_SMALL = 64  # elements; weights are never folded, they keep their torch names


def apply(model: ir.Model) -> int:
    """Returns the number of nodes removed."""
    before = len(model.graph)
    fold_constants(
        model,
        input_size_limit=_SMALL,
        output_size_limit=_SMALL,
        should_fold=lambda node: False if node.op_type == "Transpose" else None,
    )
    for rule in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(size_limit=_SMALL),
        common.CommonSubexpressionEliminationPass(),
        common.IdentityEliminationPass(),
    ):
        rule(model)
    drop_unused(model)
    return before - len(model.graph)
