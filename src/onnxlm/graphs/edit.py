"""Small helpers to read and rewrite onnx-ir graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

MICROSOFT = "com.microsoft"


def is_op(node: ir.Node | None, op_type: str, domain: str = "") -> bool:
    """Whether `node` is this operator."""
    return node is not None and node.op_type == op_type and node.domain == domain


def producer(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that makes `value`, if it is this operator."""
    node = None if value is None else value.producer()
    return node if is_op(node, op_type, domain) else None


def only_user(value: ir.Value) -> ir.Node | None:
    """The one node that reads `value`; None when several do or when it is a graph output."""
    users = {node for node, _ in value.uses()}
    return None if value.is_graph_output() or len(users) != 1 else users.pop()


def new_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value] | int = 1,
    domain: str = "",
    attributes: Mapping[str, Any] | None = None,
) -> ir.Node:
    """A node with plain Python attributes."""
    made = {"num_outputs": outputs} if isinstance(outputs, int) else {"outputs": outputs}
    attrs = [ir.convenience.convert_attribute(k, v) for k, v in (attributes or {}).items()]
    return ir.Node(domain, op_type, inputs, attrs, **made)


def replace(
    graph: ir.Graph, old: Sequence[ir.Node], new: Sequence[ir.Node], last: int = -1
) -> None:
    """Put the nodes `new` where `old[last]` stands; they take over `old[last]`'s outputs one by one.

    Values keep their names and shapes; the rest of `old` is removed too.
    """
    anchor = old[last]
    for node in new:
        graph.insert_before(anchor, node)
    for before, after in zip(anchor.outputs, new[-1].outputs, strict=False):
        move(graph, before, after)
    graph.remove(list(old), safe=True)


def move(graph: ir.Graph, before: ir.Value, after: ir.Value) -> None:
    """Let every reader of `before`, graph outputs included, read `after`, under the same name."""
    after.name, after.shape, after.type = before.name, before.shape, before.type
    before.name = f"{before.name}.replaced"
    ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)


def add_constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Initializer `name`; the existing one when the graph has it already."""
    if name in graph.initializers:
        return graph.initializers[name]
    return add_tensor(graph, ir.tensor(array, name=name))


def add_tensor(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Register a tensor as the initializer of its name."""
    value = ir.Value(
        name=tensor.name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def lazy_tensor(
    name: str,
    dtype: ir.DataType,
    shape: Sequence[int],
    make: Callable[[], NDArray[Any]],
) -> ir.LazyTensor:
    """A tensor that is computed when it is written, so that a merge never holds two copies of a model."""
    return ir.LazyTensor(
        lambda: ir.tensor(np.ascontiguousarray(make()), name=name),
        dtype=dtype,
        shape=ir.Shape(shape),
        name=name,
    )


def drop_unused(model: ir.Model, keep: Iterable[str] = ()) -> None:
    """Remove nodes that no output needs, and initializers that no node reads."""
    RemoveUnusedNodesPass()(model)
    initializers = model.graph.initializers
    for name in [n for n, v in initializers.items() if not v.uses() and n not in set(keep)]:
        if not initializers[name].is_graph_output():
            del initializers[name]


def use_domain(model: ir.Model, domain: str, version: int = 1) -> None:
    """Declare that the graph uses operators of `domain`."""
    model.graph.opset_imports.setdefault(domain, version)
