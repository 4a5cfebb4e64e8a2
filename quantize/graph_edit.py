"""What quantized operators are built from: nodes, constants that graphs share, sums and offsets of blocks.

Legend: N rows (outputs) and K columns (inputs) of a weight, B blocks a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxlm.errors import QuantizationError
from onnxlm.graphs.edit import add_constant, add_tensor, lazy_tensor, move, new_node
from onnxlm.graphs.linear import Linear
from onnxlm.quantize.structure import name_of
from onnxlm.quantized_tensor import QuantizedTensor


class GraphEdit:
    """The edits of one graph; values that several of them read are made once.

    Args:
        graph: The graph, changed in place.
        stored: Tensors by name that the graphs of one package share; grows.
        short_scales: Whether scales may be stored in 16 bits and widened by a node of the graph.
        half: Whether the graph's activations are float16; scales and offsets are of their type.
    """

    def __init__(
        self,
        graph: ir.Graph,
        stored: dict[str, ir.TensorProtocol],
        short_scales: bool,
        half: bool = False,
    ) -> None:
        self._graph = graph
        self._stored = stored
        self._short_scales = short_scales
        self._half = half
        self._block_sums: dict[tuple[ir.Value, int], ir.Value] = {}
        self._row_inputs: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._widened: dict[str, ir.Value] = {}

    def before(
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

    def replace(self, old: ir.Node, value: ir.Value) -> None:
        """Let `value` take the place of what `old` makes."""
        move(self._graph, old.outputs[0], value)
        self._graph.remove([old], safe=True)

    def store(
        self, name: str, shape: Sequence[int], dtype: ir.DataType, make: Callable[[], NDArray[Any]]
    ) -> ir.Value:
        """An initializer that all graphs share and that is made when it is written."""
        if name in self._graph.initializers:
            return self._graph.initializers[name]
        if name not in self._stored:
            self._stored[name] = lazy_tensor(name, dtype, shape, make)
        return add_tensor(self._graph, self._stored[name])

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """An initializer that all graphs share."""
        return self.store(name, array.shape, ir.DataType.from_numpy(array.dtype), lambda: array)

    def integers(self, name: str, *values: int) -> ir.Value:
        """A small int64 vector."""
        return add_constant(self._graph, name, np.array(values, dtype=np.int64))

    def scalar(self, name: str, value: float, dtype: type[np.generic] = np.float32) -> ir.Value:
        """A constant of rank 0."""
        return add_constant(self._graph, name, np.array(value, dtype=dtype))

    def scale(self, name: str, tensor: QuantizedTensor) -> ir.Value:
        """The scales of weight `name`, [N, B]."""
        name = f"{name}.scale"
        if self._short_scales:
            return self._floats(name, tensor.scale)
        return self.floats(name, tensor.scale)

    def floats(self, name: str, array: NDArray[np.float32]) -> ir.Value:
        """A constant of the activations' type.

        Raises:
            QuantizationError: 16 bits do not reach so far.
        """
        return self.constant(name, _all_to_half(name, array) if self._half else array)

    def add_offsets(self, linear: Linear, tensor: QuantizedTensor, y: ir.Value) -> ir.Value:
        """Y + blocksum(x) @ offset.T: what the offsets of a weight add to its layer's outcome `y`."""
        if tensor.offset is None:
            return y
        node = linear.node
        sums = self._block_sum(linear, tensor)
        offset = self.before(node, "Transpose", [self._offset(node, linear.name, tensor)])
        return self.before(node, "Add", [y, self.before(node, "MatMul", [sums, offset])])

    def add_row_offsets(self, gather: ir.Node, tensor: QuantizedTensor, y: ir.Value) -> ir.Value:
        """Rows `y` [batch, tokens, K] of a table and, added, the offsets of the same rows."""
        table, ids = gather.inputs
        if tensor.offset is None or table is None:
            return y
        blocks, size = tensor.scale.shape[1], tensor.block_size
        whole = self._offset(gather, name_of(table), tensor)
        offset = self.before(gather, "Gather", [whole, ids])
        offset = self.before(gather, "Unsqueeze", [offset, self.integers("axis_last", -1)])
        wide = self.integers(f"expand_{size}", 1, 1, 1, size)
        offset = self.before(gather, "Expand", [offset, wide])
        flat = self.integers(f"flat_{blocks * size}", 0, 0, blocks * size)
        offset = self.before(gather, "Reshape", [offset, flat])
        return self.before(gather, "Add", [y, self.first_columns(gather, tensor, offset)])

    def first_columns(self, anchor: ir.Node, tensor: QuantizedTensor, value: ir.Value) -> ir.Value:
        """`value`, [batch, tokens, whole blocks], cut to K columns."""
        columns = tensor.shape[1]
        if columns % tensor.block_size == 0:
            return value
        ends = [self.integers("index_first", 0), self.integers(f"index_{columns}", columns)]
        return self.before(anchor, "Slice", [value, *ends, self.integers("axis_last", -1)])

    def quantized_rows(self, linear: Linear) -> tuple[ir.Value, ir.Value]:
        """A layer's input x as uint8 codes of x / r, and r; once per distinct input.

        r is the largest magnitude of each row: rows stay independent. A code c stands for (c - 128) / 127.
        """
        if linear.x not in self._row_inputs:
            x, node = linear.x, linear.node
            sizes = self.before(node, "Abs", [x])
            last = self.integers("axis_last", -1)
            largest = self.before(node, "ReduceMax", [sizes, last], keepdims=1)
            # A row of zeros must not become 0 / 0.
            floor = self.scalar("row.floor", float(np.finfo(np.float32).tiny))
            magnitude = self.before(node, "Max", [largest, floor])
            unit = self.before(node, "Div", [x, magnitude])
            form = [self.scalar("row.step", 1 / 127), self.scalar("row.centre", 128, np.uint8)]
            codes = self.before(node, "QuantizeLinear", [unit, *form])
            self._row_inputs[x] = codes, magnitude
        return self._row_inputs[linear.x]

    def _offset(self, anchor: ir.Node, name: str, tensor: QuantizedTensor) -> ir.Value:
        """The offsets, [N, B].

        A GGUF block stores its least value, minimum = offset - centre * scale, in 16 bits: where the
        offsets come back exactly from that, that is what is stored.
        """
        assert tensor.offset is not None
        if self._half:  # rounded once, and not in every step of a sum
            return self.floats(f"{name}.offset", tensor.offset)
        centre = float(1 << (tensor.bits - 1))
        minimum = _to_half(tensor.offset - centre * tensor.scale).astype(np.float32)
        if not np.array_equal(minimum + centre * tensor.scale, tensor.offset):
            return self._floats(f"{name}.offset", tensor.offset)
        factor = self.scalar(f"centre.{tensor.bits}", centre)
        shift = self.before(anchor, "Mul", [self.scale(name, tensor), factor])
        return self.before(anchor, "Add", [self._floats(f"{name}.minimum", minimum), shift])

    def _block_sum(self, linear: Linear, tensor: QuantizedTensor) -> ir.Value:
        """x [batch, tokens, K] summed over each block; once per distinct input."""
        key = (linear.x, tensor.block_size)
        if key not in self._block_sums:
            size, blocks = tensor.block_size, tensor.scale.shape[1]
            node, x, last = linear.node, linear.x, self.integers("axis_last", -1)
            missing = blocks * size - tensor.shape[1]
            if missing:
                pads = self.integers(f"pads_{missing}", 0, missing)
                x = self.before(node, "Pad", [x, pads, None, last])
            shape = self.integers(f"blocks_{blocks}x{size}", 0, 0, blocks, size)
            split = self.before(node, "Reshape", [x, shape])
            self._block_sums[key] = self.before(node, "ReduceSum", [split, last], keepdims=0)
        return self._block_sums[key]

    def _floats(self, name: str, array: NDArray[np.float32]) -> ir.Value:
        """A constant, on disk in 16 bits where that loses nothing; a session folds the Cast."""
        if self._half:
            return self.floats(name, array)
        if name not in self._widened:
            half = _to_half(array)
            if np.array_equal(half.astype(np.float32), array):
                first, stored = next(iter(self._graph)), self.constant(name, half)
                wide = self.before(first, "Cast", [stored], to=ir.DataType.FLOAT.value)
                self._widened[name] = wide
            else:
                self._widened[name] = self.constant(name, array)
        return self._widened[name]


def _all_to_half(name: str, array: NDArray[np.float32]) -> NDArray[np.float16]:
    half = _to_half(array)
    if not np.isfinite(half).all():
        raise QuantizationError(
            f"{name}: a graph of 16 bits cannot hold it",
            found=float(np.abs(array).max()),
            allowed=f"up to {np.finfo(np.float16).max}",
            fix="quantize an fp32 package",
        )
    return half


def _to_half(array: NDArray[np.float32]) -> NDArray[np.float16]:
    """Rounded to 16 bits; infinite where those do not reach."""
    with np.errstate(over="ignore"):
        return array.astype(np.float16)
