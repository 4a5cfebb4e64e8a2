"""What a graph's linear layers read, and where a per-channel scale of that input can be folded.

Legend: K channels of an input, H query heads, Hkv key-value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxlm.graphs.edit import MICROSOFT, is_op
from onnxlm.graphs.linear import Linear, as_linear, linears

_NORMS = {
    ("", "RMSNormalization"): 1,
    ("", "SimplifiedLayerNormalization"): 1,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): 2,
}


@dataclass(frozen=True)
class NormWeight:
    """The input is a norm's output: its weight [K] takes the scale."""

    name: str


@dataclass(frozen=True)
class WeightRows:
    """The input's channels are rows of another linear, up to factors that do not depend on them.

    Attributes:
        name: The other linear's weight.
        start: First of its rows.
        end: End of its rows.
        heads: (H, Hkv, D) when one row serves the channels of a group of query heads.
    """

    name: str
    start: int
    end: int
    heads: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class LinearInput:
    """One value that linear layers read.

    Attributes:
        value: The value [..., K].
        linears: Every linear that reads it.
        origin: Where its channels can be scaled; None where they cannot, or not known.
    """

    value: ir.Value
    linears: tuple[Linear, ...]
    origin: NormWeight | WeightRows | None

    @property
    def name(self) -> str:
        """The value's name."""
        assert self.value.name is not None
        return self.value.name


def linear_inputs(graph: ir.Graph) -> list[LinearInput]:
    """Every distinct input of the graph's linears, in graph order."""
    readers: dict[ir.Value, list[Linear]] = {}
    for linear in linears(graph):
        readers.setdefault(linear.x, []).append(linear)
    return [
        LinearInput(value, tuple(found), _origin(value, found)) for value, found in readers.items()
    ]


def is_table(linear: Linear) -> bool:
    """Whether the weight is also read by something else: an embedding tied to the head."""
    return len({node for node, _ in linear.weight.uses()}) > 1


def _origin(value: ir.Value, readers: list[Linear]) -> NormWeight | WeightRows | None:
    nodes = {linear.node for linear in readers}
    if any(node not in nodes for node, _ in value.uses()) or value.is_graph_output():
        return None
    if any(is_table(linear) for linear in readers):
        return None  # scaling its columns would scale the embedding
    node = value.producer()
    if node is None:
        return None
    weight_at = _NORMS.get((node.domain, node.op_type))
    if weight_at is not None and value is node.outputs[0]:
        weight = node.inputs[weight_at]
        return NormWeight(weight.name) if weight is not None and weight.name else None
    if is_op(node, "GroupQueryAttention", MICROSOFT):
        return _value_rows(node)
    if is_op(node, "Mul"):
        return _up_rows(node)
    return None


def _value_rows(node: ir.Node) -> WeightRows | None:
    """Rows of the V projection: attention mixes positions, never the channels of a head."""
    heads = node.attributes["num_heads"].as_int()
    kv_heads = node.attributes["kv_num_heads"].as_int()
    packed, separate = node.inputs[0], node.inputs[2]
    source = separate if separate is not None else packed
    linear = None if source is None else as_linear(source.producer())
    if linear is None or linear.transposed:
        return None
    rows = linear.shape[0]
    width = rows // kv_heads if separate is not None else rows // (heads + 2 * kv_heads)
    return WeightRows(linear.name, rows - kv_heads * width, rows, (heads, kv_heads, width))


def _up_rows(node: ir.Node) -> WeightRows | None:
    """Rows of the up projection in act(gate) * up."""
    for act, plain in (node.inputs, reversed(node.inputs)):
        activation = None if act is None else act.producer()
        if activation is None or not is_op(activation, "QuickGelu", MICROSOFT) or plain is None:
            continue
        source = plain.producer()
        if source is not None and is_op(source, "Split"):
            merged = source.inputs[0]
            linear = None if merged is None else as_linear(merged.producer())
            if linear is None or linear.transposed or plain is not source.outputs[1]:
                return None
            return WeightRows(linear.name, linear.shape[0] // 2, linear.shape[0])
        linear = as_linear(source)
        if linear is not None and not linear.transposed:
            return WeightRows(linear.name, 0, linear.shape[0])
    return None
