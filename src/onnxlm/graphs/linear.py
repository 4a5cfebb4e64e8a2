"""Matrix products with a stored weight, in whichever of their spellings a graph has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from onnxlm.graphs.edit import MICROSOFT, is_op, only_user, producer


@dataclass(frozen=True)
class Linear:
    """y = x @ W^T with W stored once.

    Attributes:
        node: The MatMul or FusedMatMul node.
        weight: Its initializer.
        transposed: The initializer is [K, N] (MatMul's layout) instead of torch's [N, K].
        path: Nodes between the initializer and the product (a Transpose of a tied table), then `node`.
    """

    node: ir.Node
    weight: ir.Value
    transposed: bool
    path: tuple[ir.Node, ...]

    @property
    def x(self) -> ir.Value:
        """The input [..., K]."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def y(self) -> ir.Value:
        """The output [..., N]."""
        return self.node.outputs[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        assert self.weight.shape is not None
        a, b = self.weight.shape.numpy()
        return (b, a) if self.transposed else (a, b)

    @property
    def owns_weight(self) -> bool:
        """Whether nothing but this product reads the weight."""
        on_the_way = (self.weight, *(node.outputs[0] for node in self.path[:-1]))
        return all(only_user(v) is n for v, n in zip(on_the_way, self.path, strict=True))

    @property
    def name(self) -> str:
        """The weight's name."""
        assert self.weight.name is not None
        return self.weight.name


def as_linear(node: ir.Node | None) -> Linear | None:
    """Read `node` as a product with a stored 2-D weight; None when it is something else."""
    if is_op(node, "MatMul"):
        assert node is not None
        weight = node.inputs[1]
        if _is_stored_matrix(weight):
            assert weight is not None
            return Linear(node, weight, True, (node,))
        turn = producer(weight, "Transpose")
        stored = None if turn is None else turn.inputs[0]
        if turn is not None and _is_stored_matrix(stored):
            assert stored is not None
            # Of a matrix there is one other permutation than the one that changes nothing.
            if "perm" not in turn.attributes or list(turn.attributes["perm"].as_ints()) == [1, 0]:
                return Linear(node, stored, False, (turn, node))
        return None
    if is_op(node, "FusedMatMul", MICROSOFT):
        assert node is not None
        weight = node.inputs[1]
        if _is_stored_matrix(weight) and _is_plain_product(node):
            assert weight is not None
            flag = node.attributes.get("transB")
            return Linear(node, weight, not (flag is not None and flag.as_int()), (node,))
    return None


def linears(graph: ir.Graph) -> Iterator[Linear]:
    """Every product with a stored weight, in graph order."""
    for node in list(graph):
        linear = as_linear(node)
        if linear is not None:
            yield linear


def made_by_linear(value: ir.Value | None) -> Linear | None:
    """The linear that makes `value` when nothing else reads `value`."""
    if value is None or value.producer() is None or only_user(value) is None:
        return None
    return as_linear(value.producer())


@dataclass(frozen=True)
class Projection:
    """A linear layer with or without a bias.

    Attributes:
        linear: The product.
        bias: The initializer [N] added to it, or None.
        y: What the layer gives: the sum, or the product.
    """

    linear: Linear
    bias: ir.Value | None
    y: ir.Value


def projection(value: ir.Value | None) -> Projection | None:
    """The linear layer that makes `value` when nothing else reads `value`."""
    if value is None or only_user(value) is None:
        return None
    linear = made_by_linear(value)
    if linear is not None:
        return Projection(linear, None, value)
    add = producer(value, "Add")
    if add is None:
        return None
    for product, bias in (add.inputs, reversed(add.inputs)):
        linear = made_by_linear(product)
        if linear is not None and bias is not None and _is_bias(bias, linear.shape[0]):
            return Projection(linear, bias, value)
    return None


def _is_bias(value: ir.Value, size: int) -> bool:
    if not value.is_initializer() or value.is_graph_input() or value.const_value is None:
        return False
    return tuple(value.const_value.shape) == (size,)


def _is_stored_matrix(value: ir.Value | None) -> bool:
    """Whether `value` is a 2-D initializer that no caller can override."""
    if value is None or not value.is_initializer() or value.is_graph_input():
        return False
    return value.shape is not None and len(value.shape) == 2


def _is_plain_product(fused: ir.Node) -> bool:
    """Whether a FusedMatMul does nothing but (perhaps) transpose its second input."""
    attributes = fused.attributes
    turned = ("transA", "transBatchA", "transBatchB")
    if any(name in attributes and attributes[name].as_int() for name in turned):
        return False
    return "alpha" not in attributes or attributes["alpha"].as_float() == 1.0
