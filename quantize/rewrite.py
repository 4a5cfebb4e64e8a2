"""Linear layers and embeddings of a graph as the quantized operators of ONNX Runtime.

Legend: N rows (outputs) and K columns (inputs) of a weight, B blocks a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxlm.graphs.edit import MICROSOFT, add_constant, new_node, replace
from onnxlm.graphs.linear import Linear
from onnxlm.quantize.blocks import pack_gather, pack_matmul
from onnxlm.quantize.row import RowQuantized
from onnxlm.quantized_tensor import QuantizedTensor

# int8 activations, one scale a block: the level at which every width of code has a fast kernel.
ACCURACY_LEVEL = 4


class Rewriter:
    """Replaces the linears of one graph; what several of them share is made once.

    Args:
        graph: The graph, changed in place.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._block_sums: dict[tuple[ir.Value, int], ir.Value] = {}
        self._row_inputs: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._widened: dict[str, ir.Value] = {}

    def blocks(self, linear: Linear, tensor: QuantizedTensor) -> None:
        """y = MatMulNBits(x); offsets add blocksum(x) @ offset.T, so that the operator stays symmetric.

        With zero points in floating point the operator leaves its fast path. A code is centred already,
        so w = scale * (code - centre) + offset splits exactly.
        """
        rows, columns = tensor.shape
        node = new_node(
            "MatMulNBits",
            [linear.x, self._codes(linear, tensor), self._scales(linear.name, tensor)],
            domain=MICROSOFT,
            attributes={
                "N": rows,
                "K": columns,
                "bits": tensor.bits,
                "block_size": tensor.block_size,
                "accuracy_level": ACCURACY_LEVEL,
            },
        )
        nodes = [node]
        if tensor.offset is not None:
            nodes += self._offset_nodes(linear, tensor, node.outputs[0])
        replace(self._graph, [linear.node], nodes)

    def rows(self, linear: Linear, tensor: RowQuantized) -> None:
        """y = MatMulIntegerToFloat(quantized x, codes) * r, with r the largest magnitude of x's row.

        Activations have one scale a row, computed once per input, so that rows stay independent.
        """
        quantized, magnitude = self._row_input(linear)
        graph, name = self._graph, linear.name
        product = new_node(
            "MatMulIntegerToFloat",
            [
                quantized,
                add_constant(graph, f"{name}.row_codes", tensor.codes),
                self._scalar("row.scale", 1 / 127, np.float32),
                add_constant(graph, f"{name}.row_scale", tensor.scale),
                # The weights' zero point is left out, 0 for signed codes: where a session turns them into
                # unsigned ones it makes a new one, and must not meet one that other products share.
                self._scalar("row.zero_point", 128, np.uint8),
            ],
            domain=MICROSOFT,
        )
        scaled = new_node("Mul", [product.outputs[0], magnitude])
        replace(graph, [linear.node], [product, scaled])

    def table(self, gather: ir.Node, tensor: QuantizedTensor) -> None:
        """Gather(table, ids) -> GatherBlockQuantized, on the tensors that a tied head reads too."""
        source = gather.inputs[0]
        assert source is not None and source.name is not None
        node = new_node(
            "GatherBlockQuantized",
            [
                self._flat(source.name, tensor),
                gather.inputs[1],
                self._scales(source.name, tensor),
            ],
            domain=MICROSOFT,
            attributes={
                "bits": tensor.bits,
                "block_size": tensor.block_size,
                "quantize_axis": 1,
                "gather_axis": 0,
            },
        )
        replace(self._graph, [gather], [node])

    def _codes(self, linear: Linear, tensor: QuantizedTensor) -> ir.Value:
        """[N, B, bytes a block]; a tied table is stored flat and reshaped, which a session folds."""
        flat = self._graph.initializers.get(_flat_name(linear.name, tensor))
        if flat is None:
            return add_constant(self._graph, f"{linear.name}.q{tensor.bits}", pack_matmul(tensor))
        shape = np.array(
            [tensor.shape[0], -1, tensor.block_size * tensor.bits // 8], dtype=np.int64
        )
        turned = new_node(
            "Reshape", [flat, add_constant(self._graph, f"{linear.name}.shape", shape)]
        )
        self._graph.insert_before(linear.node, turned)
        return turned.outputs[0]

    def _flat(self, name: str, tensor: QuantizedTensor) -> ir.Value:
        return add_constant(self._graph, _flat_name(name, tensor), pack_gather(tensor))

    def _scales(self, name: str, tensor: QuantizedTensor) -> ir.Value:
        return self._floats(f"{name}.scale", tensor.scale)

    def _floats(self, name: str, array: NDArray[np.float32]) -> ir.Value:
        """A float32 constant, on disk in 16 bits where that loses nothing; a session folds the Cast."""
        half = array.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), array):
            return add_constant(self._graph, name, array)
        if name not in self._widened:
            stored = add_constant(self._graph, name, half)
            self._widened[name] = self._folded("Cast", stored, to=ir.DataType.FLOAT)
        return self._widened[name]

    def _folded(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        """A node on constants, at the head of the graph."""
        node = new_node(op_type, inputs, attributes=attributes)
        first = next(iter(self._graph))
        self._graph.insert_before(first, node)
        return node.outputs[0]

    def _offset_nodes(
        self, linear: Linear, tensor: QuantizedTensor, product: ir.Value
    ) -> list[ir.Node]:
        assert tensor.offset is not None
        sums = self._block_sum(linear, tensor)
        correction = new_node("MatMul", [sums, self._offset(linear, tensor)])
        return [correction, new_node("Add", [product, correction.outputs[0]])]

    def _offset(self, linear: Linear, tensor: QuantizedTensor) -> ir.Value:
        """The offsets, float32 [B, N].

        A GGUF block stores its least value, minimum = offset - centre * scale, in 16 bits: where the
        offsets come back exactly from that, that is what is stored.
        """
        assert tensor.offset is not None
        name = linear.name
        centre = np.float32(1 << (tensor.bits - 1))
        minimum = (tensor.offset - centre * tensor.scale).astype(np.float16)
        if not np.array_equal(minimum.astype(np.float32) + centre * tensor.scale, tensor.offset):
            return self._floats(f"{name}.offset", np.ascontiguousarray(tensor.offset.T))
        scale = self._scales(name, tensor)
        least = self._floats(f"{name}.minimum", minimum.astype(np.float32))
        factor = self._scalar(f"centre.{tensor.bits}", float(centre), np.float32)
        shift = new_node("Mul", [scale, factor])
        offset = new_node("Add", [least, shift.outputs[0]])
        turned = new_node("Transpose", [offset.outputs[0]], attributes={"perm": [1, 0]})
        self._graph.insert_before(linear.node, [shift, offset, turned])
        return turned.outputs[0]

    def _block_sum(self, linear: Linear, tensor: QuantizedTensor) -> ir.Value:
        """x summed over each block, [..., B]; once per distinct input."""
        key = (linear.x, tensor.block_size)
        if key not in self._block_sums:
            self._block_sums[key] = self._make_block_sum(linear, tensor)
        return self._block_sums[key]

    def _make_block_sum(self, linear: Linear, tensor: QuantizedTensor) -> ir.Value:
        size, blocks = tensor.block_size, tensor.scale.shape[1]
        x = linear.x
        missing = blocks * size - tensor.shape[1]
        nodes: list[ir.Node] = []
        if missing:
            pads = np.array([0, missing], dtype=np.int64)
            axis = np.array([-1], dtype=np.int64)
            pad = new_node(
                "Pad",
                [
                    x,
                    add_constant(self._graph, f"pads_{missing}", pads),
                    None,
                    add_constant(self._graph, "axes_last", axis),
                ],
            )
            nodes.append(pad)
            x = pad.outputs[0]
        shape = np.array([0, 0, blocks, size], dtype=np.int64)
        split = new_node(
            "Reshape", [x, add_constant(self._graph, f"blocks_{blocks}x{size}", shape)]
        )
        axis = np.array([-1], dtype=np.int64)
        total = new_node(
            "ReduceSum",
            [split.outputs[0], add_constant(self._graph, "axes_last", axis)],
            attributes={"keepdims": 0},
        )
        nodes += [split, total]
        self._graph.insert_before(linear.node, nodes)
        return total.outputs[0]

    def _row_input(self, linear: Linear) -> tuple[ir.Value, ir.Value]:
        if linear.x not in self._row_inputs:
            self._row_inputs[linear.x] = self._quantize_rows(linear)
        return self._row_inputs[linear.x]

    def _quantize_rows(self, linear: Linear) -> tuple[ir.Value, ir.Value]:
        x, graph = linear.x, self._graph
        axis = add_constant(graph, "axes_last", np.array([-1], dtype=np.int64))
        magnitudes = new_node("Abs", [x])
        largest = new_node("ReduceMax", [magnitudes.outputs[0], axis], attributes={"keepdims": 1})
        # A row of zeros must not become 0 / 0.
        floor = self._scalar("row.floor", np.finfo(np.float32).tiny, np.float32)
        safe = new_node("Max", [largest.outputs[0], floor])
        unit = new_node("Div", [x, safe.outputs[0]])
        codes = new_node(
            "QuantizeLinear",
            [
                unit.outputs[0],
                self._scalar("row.scale", 1 / 127, np.float32),
                self._scalar("row.zero_point", 128, np.uint8),
            ],
        )
        graph.insert_before(linear.node, [magnitudes, largest, safe, unit, codes])
        return codes.outputs[0], safe.outputs[0]

    def _scalar(self, name: str, value: float, dtype: type[np.generic]) -> ir.Value:
        return add_constant(self._graph, name, np.array(value, dtype=dtype))


def _flat_name(name: str, tensor: QuantizedTensor) -> str:
    return f"{name}.q{tensor.bits}_rows"


def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Rows of several tensors under one another, exactly; None when their blocks differ in size.

    Four-bit rows beside eight-bit ones become eight-bit codes of the same values.
    """
    if len({(part.block_size, part.shape[1]) for part in parts}) != 1:
        return None
    bits = max(part.bits for part in parts)
    offset: NDArray[np.float32] | None = None
    if any(part.offset is not None for part in parts):
        offset = np.concatenate(
            [np.zeros_like(p.scale) if p.offset is None else p.offset for p in parts]
        )
    return QuantizedTensor(
        bits,
        parts[0].block_size,
        np.concatenate([_widened(part, bits) for part in parts]),
        np.concatenate([part.scale for part in parts]),
        offset,
    )


def _widened(tensor: QuantizedTensor, bits: int) -> NDArray[np.uint8]:
    shift = (1 << (bits - 1)) - (1 << (tensor.bits - 1))
    return tensor.codes + np.uint8(shift)
