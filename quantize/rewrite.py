"""Linear layers and embeddings of a graph as the quantized operators of ONNX Runtime.

Legend: N rows (outputs) and K columns (inputs) of a weight, B blocks a row.

Names of what is stored for a weight `w`:
    w.q4, w.q8          codes, uint8, as MatMulNBits reads them; padded to whole blocks
    w.scale             float32 or float16 [N, B]
    w.minimum           float16 [N, B], or w.offset, float32 or float16 [N, B]
    w.row_codes         int8 [K, N], with w.row_scale, float32 [N], where prefill has its own weights
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxlm.graphs.edit import MICROSOFT, add_constant, add_tensor, lazy_tensor, move, new_node
from onnxlm.graphs.linear import Linear, linears
from onnxlm.quantize.blocks import pack_matmul
from onnxlm.quantize.row import RowQuantized
from onnxlm.quantize.structure import embeddings, name_of
from onnxlm.quantized_tensor import QuantizedTensor

# int8 activations, one scale a block: the level at which every width of code has a fast kernel.
ACCURACY_LEVEL = 4


class Rewriter:
    """Puts quantized operators into the graphs of one package; what they share is stored once.

    Args:
        tensors: Codes by the name of the weight that they replace.
    """

    def __init__(self, tensors: Mapping[str, QuantizedTensor]) -> None:
        self._tensors = tensors
        self._stored: dict[str, ir.TensorProtocol] = {}

    def rewrite(self, graph: ir.Graph, rows: Mapping[str, RowQuantized]) -> None:
        """Replace every layer and embedding whose weight has codes.

        Args:
            graph: The graph, changed in place; the weights stay, unread.
            rows: Weights that this graph reads with one scale per row instead, by the same names.
        """
        edit = _GraphEdit(graph, self._stored)
        tables = [node for node in embeddings(graph) if _table(node) in self._tensors]
        flat = {_table(node) for node in tables}
        for node in tables:
            edit.embedding(node, self._tensors[_table(node)])
        for linear in linears(graph):
            if linear.name in rows:
                edit.rows(linear, rows[linear.name])
            elif linear.name in self._tensors:
                edit.blocks(linear, self._tensors[linear.name], linear.name in flat)


def _table(gather: ir.Node) -> str:
    table = gather.inputs[0]
    assert table is not None
    return name_of(table)


class _GraphEdit:
    """The edits of one graph; values that several of them read are made once."""

    def __init__(self, graph: ir.Graph, stored: dict[str, ir.TensorProtocol]) -> None:
        self._graph = graph
        self._stored = stored
        self._block_sums: dict[tuple[ir.Value, int], ir.Value] = {}
        self._row_inputs: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._widened: dict[str, ir.Value] = {}

    def blocks(self, linear: Linear, tensor: QuantizedTensor, flat: bool) -> None:
        """y = MatMulNBits(x); offsets add blocksum(x) @ offset.T, so that the operator stays symmetric.

        With zero points in floating point the operator leaves its fast path. A code is centred already,
        so w = scale * (code - centre) + offset splits exactly.
        """
        rows, columns = tensor.shape
        node, name = linear.node, linear.name
        codes = self._codes(name, tensor, flat)
        if flat:  # an embedding reads them as a matrix; a session folds the Reshape
            shape = np.array([rows, -1, tensor.block_size * tensor.bits // 8], dtype=np.int64)
            codes = self._before(node, "Reshape", [codes, self._constant(f"{name}.shape", shape)])
        y = self._before(
            node,
            "MatMulNBits",
            [linear.x, codes, self._floats(f"{name}.scale", tensor.scale)],
            MICROSOFT,
            N=rows,
            K=columns,
            bits=tensor.bits,
            block_size=tensor.block_size,
            accuracy_level=ACCURACY_LEVEL,
        )
        if tensor.offset is not None:
            sums = self._block_sum(linear, tensor)
            offset = self._before(node, "Transpose", [self._offset(node, name, tensor)])
            y = self._before(node, "Add", [y, self._before(node, "MatMul", [sums, offset])])
        self._replace(node, y)

    def rows(self, linear: Linear, tensor: RowQuantized) -> None:
        """y = MatMulIntegerToFloat(quantized x, codes) * r, with r the largest magnitude of x's row.

        Activations have one scale a row, computed once per input, so that rows stay independent.
        """
        if linear.x not in self._row_inputs:
            self._row_inputs[linear.x] = self._quantize_rows(linear)
        quantized, magnitude = self._row_inputs[linear.x]
        node, name = linear.node, linear.name
        product = self._before(
            node,
            "MatMulIntegerToFloat",
            [
                quantized,
                self._constant(f"{name}.row_codes", tensor.codes),
                self._scalar("row.scale", 1 / 127, np.float32),
                self._constant(f"{name}.row_scale", tensor.scale),
                # The weights' zero point is left out, 0 for signed codes: where a session turns them into
                # unsigned ones it makes a new one, and must not meet one that other products share.
                self._scalar("row.zero_point", 128, np.uint8),
            ],
            MICROSOFT,
        )
        self._replace(node, self._before(node, "Mul", [product, magnitude]))

    def embedding(self, gather: ir.Node, tensor: QuantizedTensor) -> None:
        """Gather(table, ids) -> GatherBlockQuantized on the codes that a tied head reads too.

        Offsets are gathered beside and added; where K is no multiple of the block, padding is cut off.
        """
        name, ids = _table(gather), gather.inputs[1]
        columns = tensor.shape[1]
        blocks, size = tensor.scale.shape[1], tensor.block_size
        y = self._before(
            gather,
            "GatherBlockQuantized",
            [
                self._codes(name, tensor, flat=True),
                ids,
                self._floats(f"{name}.scale", tensor.scale),
            ],
            MICROSOFT,
            bits=tensor.bits,
            block_size=size,
            quantize_axis=1,
            gather_axis=0,
        )
        last = self._integers("axis_last", -1)
        if tensor.offset is not None:
            offset = self._before(gather, "Gather", [self._offset(gather, name, tensor), ids])
            offset = self._before(gather, "Unsqueeze", [offset, last])  # [B, S, blocks, 1]
            split = self._integers(f"blocks_{blocks}x{size}", 0, 0, blocks, size)
            y = self._before(gather, "Add", [self._before(gather, "Reshape", [y, split]), offset])
            whole = self._integers(f"columns_{blocks * size}", 0, 0, blocks * size)
            y = self._before(gather, "Reshape", [y, whole])
        if columns != blocks * size:
            ends = [self._integers("index_first", 0), self._integers(f"index_{columns}", columns)]
            y = self._before(gather, "Slice", [y, *ends, last])
        self._replace(gather, y)

    def _codes(self, name: str, tensor: QuantizedTensor, flat: bool) -> ir.Value:
        """[N, B, bytes a block], or [N, B * bytes a block]: the same bytes."""
        rows, blocks = tensor.scale.shape
        size = tensor.block_size * tensor.bits // 8
        shape = (rows, blocks * size) if flat else (rows, blocks, size)
        return self._store(
            f"{name}.q{tensor.bits}", shape, np.uint8, lambda: pack_matmul(tensor).reshape(shape)
        )

    def _offset(self, anchor: ir.Node, name: str, tensor: QuantizedTensor) -> ir.Value:
        """The offsets, float32 [N, B].

        A GGUF block stores its least value, minimum = offset - centre * scale, in 16 bits: where the
        offsets come back exactly from that, that is what is stored.
        """
        assert tensor.offset is not None
        centre = float(1 << (tensor.bits - 1))
        minimum = _to_half(tensor.offset - centre * tensor.scale).astype(np.float32)
        if not np.array_equal(minimum + centre * tensor.scale, tensor.offset):
            return self._floats(f"{name}.offset", tensor.offset)
        scale = self._floats(f"{name}.scale", tensor.scale)
        factor = self._scalar(f"centre.{tensor.bits}", centre, np.float32)
        least = self._floats(f"{name}.minimum", minimum)
        return self._before(anchor, "Add", [least, self._before(anchor, "Mul", [scale, factor])])

    def _block_sum(self, linear: Linear, tensor: QuantizedTensor) -> ir.Value:
        """x [B, S, K] summed over each block; once per distinct input."""
        key = (linear.x, tensor.block_size)
        if key not in self._block_sums:
            size, blocks = tensor.block_size, tensor.scale.shape[1]
            node, x = linear.node, linear.x
            last = self._integers("axis_last", -1)
            missing = blocks * size - tensor.shape[1]
            if missing:
                pads = self._integers(f"pads_{missing}", 0, missing)
                x = self._before(node, "Pad", [x, pads, None, last])
            shape = self._integers(f"blocks_{blocks}x{size}", 0, 0, blocks, size)
            split = self._before(node, "Reshape", [x, shape])
            self._block_sums[key] = self._before(node, "ReduceSum", [split, last], keepdims=0)
        return self._block_sums[key]

    def _quantize_rows(self, linear: Linear) -> tuple[ir.Value, ir.Value]:
        """uint8 codes of x / r, and r."""
        x, node, last = linear.x, linear.node, self._integers("axis_last", -1)
        sizes = self._before(node, "Abs", [x])
        largest = self._before(node, "ReduceMax", [sizes, last], keepdims=1)
        # A row of zeros must not become 0 / 0.
        floor = self._scalar("row.floor", float(np.finfo(np.float32).tiny), np.float32)
        magnitude = self._before(node, "Max", [largest, floor])
        step = self._scalar("row.scale", 1 / 127, np.float32)
        centre = self._scalar("row.zero_point", 128, np.uint8)
        unit = self._before(node, "Div", [x, magnitude])
        return self._before(node, "QuantizeLinear", [unit, step, centre]), magnitude

    def _floats(self, name: str, array: NDArray[np.float32]) -> ir.Value:
        """A float32 constant, on disk in 16 bits where that loses nothing; a session folds the Cast."""
        if name not in self._widened:
            half = _to_half(array)
            if np.array_equal(half.astype(np.float32), array):
                first, stored = next(iter(self._graph)), self._constant(name, half)
                self._widened[name] = self._before(
                    first, "Cast", [stored], to=ir.DataType.FLOAT.value
                )
            else:
                self._widened[name] = self._constant(name, array)
        return self._widened[name]

    def _before(
        self,
        anchor: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        domain: str = "",
        **attributes: object,
    ) -> ir.Value:
        """The outcome of a new node in front of `anchor`."""
        node = new_node(op_type, inputs, domain=domain, attributes=attributes)
        self._graph.insert_before(anchor, node)
        return node.outputs[0]

    def _replace(self, old: ir.Node, value: ir.Value) -> None:
        """Let `value` take the place of what `old` makes."""
        move(self._graph, old.outputs[0], value)
        self._graph.remove([old], safe=True)

    def _store(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: type[np.generic],
        make: Callable[[], NDArray[Any]],
    ) -> ir.Value:
        """An initializer that all graphs share and that is made when it is written."""
        if name in self._graph.initializers:
            return self._graph.initializers[name]
        if name not in self._stored:
            kind = ir.DataType.from_numpy(np.dtype(dtype))
            self._stored[name] = lazy_tensor(name, kind, shape, make)
        return add_tensor(self._graph, self._stored[name])

    def _constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        return self._store(name, array.shape, array.dtype.type, lambda: array)

    def _integers(self, name: str, *values: int) -> ir.Value:
        return add_constant(self._graph, name, np.array(values, dtype=np.int64))

    def _scalar(self, name: str, value: float, dtype: type[np.generic]) -> ir.Value:
        return add_constant(self._graph, name, np.array(value, dtype=dtype))


def _to_half(array: NDArray[np.float32]) -> NDArray[np.float16]:
    """Rounded to 16 bits; infinite where those do not reach."""
    with np.errstate(over="ignore"):
        return array.astype(np.float16)
