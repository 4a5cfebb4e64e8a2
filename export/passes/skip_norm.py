"""RMSNormalization(a + b) -> SkipSimplifiedLayerNormalization, which also returns the sum."""

from __future__ import annotations

import onnx_ir as ir

from onnxlm.graphs.edit import MICROSOFT, is_op, move, new_node, producer, use_domain


def apply(model: ir.Model) -> int:
    """Returns the number of norms fused with the residual addition before them."""
    count = 0
    for node in list(model.graph):
        if not is_op(node, "RMSNormalization"):
            continue
        total = node.inputs[0]
        add = producer(total, "Add")
        if add is None or total is None or not _is_residual(add) or not _is_plain_norm(node):
            continue
        # The operator's default epsilon is 1e-12: the norm's own must be given.
        fused = new_node(
            "SkipSimplifiedLayerNormalization",
            [add.inputs[0], add.inputs[1], node.inputs[1]],
            4,
            MICROSOFT,
            {"epsilon": _epsilon(node)},
        )
        model.graph.insert_before(add, fused)
        move(model.graph, total, fused.outputs[3])
        move(model.graph, node.outputs[0], fused.outputs[0])
        fused.outputs[1].name, fused.outputs[2].name = "", ""
        model.graph.remove([node, add], safe=True)
        count += 1
    if count:
        use_domain(model, MICROSOFT)
    return count


def _is_residual(add: ir.Node) -> bool:
    """Whether two activations [B, S, H] of equal shape are added (and not a bias or a mask)."""
    shapes = [value.shape for value in add.inputs if value is not None]
    if any(shape is None or len(shape) != 3 for shape in shapes):
        return False
    return shapes[0] == shapes[1]


def _is_plain_norm(norm: ir.Node) -> bool:
    """Whether the norm is what the fused operator does: last axis, sums in fp32, a stored scale."""
    scale = norm.inputs[1]
    if scale is None or not scale.is_initializer() or scale.shape is None or len(scale.shape) != 1:
        return False
    axis, stash = norm.attributes.get("axis"), norm.attributes.get("stash_type")
    return (axis is None or axis.as_int() in (-1, 2)) and (stash is None or stash.as_int() == 1)


def _epsilon(norm: ir.Node) -> float:
    given = norm.attributes.get("epsilon")
    return 1e-5 if given is None else given.as_float()
