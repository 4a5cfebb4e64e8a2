"""Merging several linear layers that read one input: their rows in one weight, their biases in one vector."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxlm.graphs.edit import MICROSOFT, add_tensor, lazy_tensor, new_node
from onnxlm.graphs.linear import Linear, Projection

# Metadata key of a merged initializer: [[parameter, first row, end row], ...].
PARTS = "onnxlm.parts"


def can_merge(parts: Sequence[Projection | None]) -> list[Projection] | None:
    """The parts, when all are layers in torch layout over one value and each alone reads its weight.

    A weight with a second reader stays where it is, so that it is stored once.
    """
    present = [part for part in parts if part is not None]
    if len(present) != len(parts) or len({part.linear.x for part in present}) != 1:
        return None
    if any(part.linear.transposed or not part.linear.owns_weight for part in present):
        return None
    # One product that is read twice is no pair of layers.
    return present if len({part.linear.weight for part in present}) == len(present) else None


def merge(graph: ir.Graph, parts: Sequence[Projection], name: str, before: ir.Node) -> ir.Value:
    """One product [..., sum of N] (and one sum, if a part has a bias) with the rows of every part, in order.

    Args:
        graph: Where nodes and initializers go.
        parts: From `can_merge`.
        name: Name of the merged layer; its parameters are `<name>.weight` and `<name>.bias`.
        before: The node that the new ones are put in front of.
    """
    linears = [part.linear for part in parts]
    weight = _merged_weight(graph, linears, f"{name}.weight")
    product = new_node(
        "FusedMatMul", [linears[0].x, weight], domain=MICROSOFT, attributes={"transB": 1}
    )
    nodes = [product]
    if any(part.bias is not None for part in parts):
        bias = _merged_bias(graph, parts, f"{name}.bias")
        product.outputs[0].name = f"{name}.product"
        nodes.append(new_node("Add", [product.outputs[0], bias]))
    graph.insert_before(before, nodes)
    output = nodes[-1].outputs[0]
    output.name = f"{name}.output"
    output.type = parts[0].y.type
    return output


def layer_stem(parts: Sequence[Projection]) -> str:
    """The parameter name up to the layer's own: `layers.0.mlp.` of `layers.0.mlp.up_proj.weight`."""
    block = parts[0].linear.name.split(".")[:-2]
    return "".join(f"{part}." for part in block)


def _merged_weight(graph: ir.Graph, linears: Sequence[Linear], name: str) -> ir.Value:
    tensors = [_tensor(linear.weight) for linear in linears]
    shape = (sum(linear.shape[0] for linear in linears), linears[0].shape[1])
    merged = lazy_tensor(
        name,
        tensors[0].dtype,
        shape,
        lambda: np.concatenate([tensor.numpy() for tensor in tensors], axis=0),
    )
    value = add_tensor(graph, merged)
    rows = _rows([linear.shape[0] for linear in linears])
    parts = [[linear.name, *row] for linear, row in zip(linears, rows, strict=True)]
    value.metadata_props[PARTS] = json.dumps(parts)
    return value


def _merged_bias(graph: ir.Graph, parts: Sequence[Projection], name: str) -> ir.Value:
    """The biases in order; zeros where a part has none (Whisper's keys)."""
    sizes = [part.linear.shape[0] for part in parts]
    given = [
        (p.bias, row) for p, row in zip(parts, _rows(sizes), strict=True) if p.bias is not None
    ]
    tensors = [(_tensor(bias), row) for bias, row in given]

    def make() -> NDArray[Any]:
        merged: NDArray[Any] = np.zeros(sum(sizes), dtype=tensors[0][0].dtype.numpy())
        for tensor, (start, end) in tensors:
            merged[start:end] = tensor.numpy()
        return merged

    value = add_tensor(graph, lazy_tensor(name, tensors[0][0].dtype, (sum(sizes),), make))
    value.metadata_props[PARTS] = json.dumps([[bias.name, *row] for bias, row in given])
    return value


def _rows(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first, end) row of every part."""
    ends = np.cumsum(sizes).tolist()
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    if value.const_value is None:
        raise ValueError(f"initializer {value.name} has no value")
    return value.const_value
