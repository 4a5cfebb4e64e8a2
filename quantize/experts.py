"""Experts of com.microsoft::MoE in blocks of small codes, com.microsoft::QMoE.

Legend: E experts, N inner size, K hidden size, B blocks a row.

What is stored for a weight `w` [E, rows, columns]:
    w.q4, w.q8          uint8 [E, rows, columns * bits / 8], low bits first
    w.scale             [E, rows, B], of the activations' type; blocks are symmetric

Routers stay in full precision: they are small, and what they decide is discrete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxlm.graphs.edit import MICROSOFT, is_op
from onnxlm.quantize.blocks import pack_matmul, round_to_nearest
from onnxlm.quantize.fused import ACCURACY_LEVEL
from onnxlm.quantize.given import fitting
from onnxlm.quantize.graph_edit import GraphEdit
from onnxlm.quantize.structure import name_of
from onnxlm.quantized_tensor import QuantizedTensor, alike

# Layers that choose experts, or that say how much of an expert counts.
_ROUTING = re.compile(r"\.(router|shared_expert_gate)\.")
_EXPERTS = re.compile(r"\.experts\.(gate_up|down)$")
# Inputs of MoE.
_X, _LOGITS, _GATE_UP, _GATE_UP_BIAS, _DOWN, _DOWN_BIAS = range(6)
_ROUTER_WEIGHTS = 14
# The kernel takes blocks of 16 columns and more, by powers of two.
_SMALLEST_BLOCK = 16


def is_routing(name: str) -> bool:
    """Whether a weight of this name belongs to a router, and keeps its precision."""
    return _ROUTING.search(name) is not None


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer, as a graph has them.

    Attributes:
        node: The MoE node.
        gate_up: Initializer [E, 2 N, K].
        down: Initializer [E, K, N].
    """

    node: ir.Node
    gate_up: ir.Value
    down: ir.Value

    @property
    def names(self) -> tuple[str, str]:
        """Of the two weights."""
        return name_of(self.gate_up), name_of(self.down)

    def block_size(self, largest: int) -> int | None:
        """The largest block, `largest` at most, that the kernel takes for both weights; None for none."""
        columns = [_shape(weight)[2] for weight in (self.gate_up, self.down)]
        size = largest
        while size >= _SMALLEST_BLOCK:
            if not any(width % size for width in columns):
                return size
            size //= 2
        return None

    def takes(self, tensor: QuantizedTensor) -> bool:
        """Whether the kernel reads codes of this form, for both weights."""
        size = tensor.block_size
        power_of_two = size & (size - 1) == 0
        return tensor.offset is None and power_of_two and self.block_size(size) == size


def expert_layers(graph: ir.Graph) -> Iterator[ExpertLayer]:
    """Every layer whose experts are stored, in graph order."""
    for node in list(graph):
        if is_op(node, "MoE", MICROSOFT):
            gate_up, down = node.inputs[_GATE_UP], node.inputs[_DOWN]
            if gate_up is not None and down is not None and gate_up.is_initializer():
                yield ExpertLayer(node, gate_up, down)


def given_experts(
    graph: ir.Graph, given: Mapping[str, QuantizedTensor]
) -> dict[str, QuantizedTensor]:
    """Codes of a checkpoint that QMoE holds as they are: those of both weights of a layer, or neither's.

    Args:
        graph: The graph.
        given: Codes [E * rows, columns], among others, by the name of the weight.

    Raises:
        QuantizationError: Codes are of another shape than their weight.
    """
    codes: dict[str, QuantizedTensor] = {}
    for layer in expert_layers(graph):
        if given.keys() >= set(layer.names):
            own = [
                fitting(name, given[name], _matrix_shape(weight))
                for name, weight in zip(layer.names, (layer.gate_up, layer.down), strict=True)
            ]
            same = alike(own)
            if same is not None and all(layer.takes(tensor) for tensor in same):
                codes |= zip(layer.names, same, strict=True)
    return codes


def expert_codes(
    graph: ir.Graph, bits: int, largest_block: int, given: Mapping[str, QuantizedTensor]
) -> dict[str, QuantizedTensor]:
    """Codes for the experts of every layer whose widths the kernel takes.

    What is not given goes to the nearest code: activations of an expert that few tokens reach say too little
    to make up for errors by.

    Args:
        graph: The graph.
        bits: 4 or 8.
        largest_block: Most columns that share a scale.
        given: See `given_experts`.

    Returns:
        Codes [E * rows, columns] by the name of the weight.
    """
    codes = dict(given)
    for layer in expert_layers(graph):
        if given.keys() >= set(layer.names):
            continue
        size = layer.block_size(largest_block)
        for weight in (layer.gate_up, layer.down) if size else ():
            assert weight.const_value is not None
            assert size is not None
            stored = np.asarray(weight.const_value.numpy(), dtype=np.float32)
            matrix = stored.reshape(-1, stored.shape[2])
            codes[name_of(weight)] = round_to_nearest(matrix, bits, size)
    return codes


def rewrite_experts(edit: GraphEdit, graph: ir.Graph, codes: Mapping[str, QuantizedTensor]) -> None:
    """Replace the MoE nodes whose weights have codes.

    Args:
        edit: Edits of the graph.
        graph: The graph, changed in place; the weights stay, unread.
        codes: By the name of the weight.
    """
    for layer in expert_layers(graph):
        if codes.keys() >= set(layer.names):
            _replace(edit, layer, [codes[name] for name in layer.names])


def _replace(edit: GraphEdit, layer: ExpertLayer, codes: list[QuantizedTensor]) -> None:
    node = layer.node
    given = [*node.inputs, *[None] * (_DOWN_BIAS + 1 - len(node.inputs))]
    stored = [
        _stored(edit, weight, tensor)
        for weight, tensor in zip((layer.gate_up, layer.down), codes, strict=True)
    ]
    inputs = [*given[:_GATE_UP], *stored[0], given[_GATE_UP_BIAS], *stored[1], given[_DOWN_BIAS]]
    attributes = {name: value.value for name, value in node.attributes.items()}
    if not attributes["normalize_routing_weights"]:
        # MoE takes shares of a softmax over all experts; QMoE's own goes over the chosen ones.
        shares = edit.before(node, "Softmax", [given[_LOGITS]], axis=-1)
        inputs += [*[None] * (_ROUTER_WEIGHTS - len(inputs)), shares]
    y = edit.before(
        node,
        "QMoE",
        inputs,
        MICROSOFT,
        **attributes,
        expert_weight_bits=codes[0].bits,
        block_size=codes[0].block_size,
        accuracy_level=ACCURACY_LEVEL,
        weights_prepacked=0,
    )
    edit.replace(node, y)


def _stored(
    edit: GraphEdit, weight: ir.Value, tensor: QuantizedTensor
) -> tuple[ir.Value, ir.Value]:
    """Codes and scales of one weight."""
    name, (count, rows, columns) = name_of(weight), _shape(weight)
    shape = (count, rows, columns * tensor.bits // 8)

    def packed() -> NDArray[np.uint8]:
        return pack_matmul(tensor).reshape(shape)

    codes = edit.store(f"{name}.q{tensor.bits}", shape, ir.DataType.UINT8, packed)
    scale = edit.floats(f"{name}.scale", tensor.scale.reshape(count, rows, -1))
    return codes, scale


def _matrix_shape(weight: ir.Value) -> tuple[int, int]:
    """Of all experts' rows under one another."""
    count, rows, columns = _shape(weight)
    return count * rows, columns


def _shape(weight: ir.Value) -> tuple[int, ...]:
    assert weight.shape is not None
    shape: tuple[int, ...] = weight.shape.numpy()
    return shape


def describe_experts(
    codes: Mapping[str, QuantizedTensor], parameters: Iterable[str]
) -> dict[str, str]:
    """What became of the experts, for the manifest; nothing for a model without.

    Args:
        codes: Codes of experts, by weight.
        parameters: Names of the model's parameters.
    """
    weights = {name for name in parameters if _EXPERTS.search(name)}
    kinds = {f"{item.bits} bits in blocks of {item.block_size}" for item in codes.values()}
    if weights - codes.keys():
        kinds.add("fp32")
    return {"experts": ", ".join(sorted(kinds))} if weights else {}
