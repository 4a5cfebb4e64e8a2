"""Quantized layers and embeddings in standard ONNX: DequantizeLinear in blocks (opset 21 on), then MatMul.

ONNX Runtime turns the pair into its own fused operator when it loads the graph; other runtimes do likewise,
or compute what it says.

Legend: N rows (outputs) and K columns (inputs) of a weight, B blocks a row.

What is stored for a weight `w`:
    w.q4, w.q8          int4 or int8 [K, N]; for an embedding table int8 [N, K], whatever its width
    w.scale             float32 or float16 [N, B]
    w.minimum           float16 [N, B], or w.offset, float32 or float16 [N, B]; neither for symmetric blocks
    w.row_codes         int8 [K, N], and w.row_scale, float32 [N], where prefill has its own weights
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxlm.graphs.linear import Linear
from onnxlm.quantize.graph_edit import GraphEdit
from onnxlm.quantize.row import RowQuantized
from onnxlm.quantized_tensor import QuantizedTensor


class PortableOperators:
    """Replaces the layers and embeddings of one graph."""

    SHORT_SCALES: ClassVar[bool] = True

    def __init__(self, edit: GraphEdit) -> None:
        self._edit = edit

    def layer(self, linear: Linear, tensor: QuantizedTensor, is_table: bool) -> None:
        """y = x @ DequantizeLinear(codes, scale) + blocksum(x) @ offset.T."""
        edit, node, name = self._edit, linear.node, linear.name
        codes = self._codes(name, tensor, is_table)
        if is_table:  # a session folds it
            codes = edit.before(node, "Transpose", [codes], perm=[1, 0])
        scale = edit.before(node, "Transpose", [edit.scale(name, tensor)], perm=[1, 0])
        weight = edit.before(
            node, "DequantizeLinear", [codes, scale], axis=0, block_size=tensor.block_size
        )
        y = edit.before(node, "MatMul", [linear.x, weight])
        edit.replace(node, edit.add_offsets(linear, tensor, y))

    def rows(self, linear: Linear, tensor: RowQuantized) -> None:
        """y = MatMulInteger(codes of x, codes) * scale / 127 * r, see `GraphEdit.quantized_rows`."""
        edit, node, name = self._edit, linear.node, linear.name
        codes, magnitude = edit.quantized_rows(linear)
        weight = edit.constant(f"{name}.row_codes", tensor.codes)
        centre = edit.scalar("row.centre", 128, np.uint8)
        product = edit.before(node, "MatMulInteger", [codes, weight, centre])
        product = edit.before(node, "Cast", [product], to=ir.DataType.FLOAT.value)
        scale = edit.constant(f"{name}.row_scale", tensor.scale)
        step = edit.before(node, "Mul", [scale, edit.scalar("row.step", 1 / 127)])
        y = edit.before(node, "Mul", [product, step])
        edit.replace(node, edit.before(node, "Mul", [y, magnitude]))

    def embedding(self, gather: ir.Node, name: str, tensor: QuantizedTensor) -> None:
        """Gather(table, ids) -> rows of codes and of scales, then DequantizeLinear on those rows."""
        edit, ids = self._edit, gather.inputs[1]
        codes = edit.before(gather, "Gather", [self._codes(name, tensor, True), ids])
        scale = edit.before(gather, "Gather", [edit.scale(name, tensor), ids])
        y = edit.before(
            gather, "DequantizeLinear", [codes, scale], axis=2, block_size=tensor.block_size
        )
        edit.replace(gather, edit.add_row_offsets(gather, tensor, y))

    def _codes(self, name: str, tensor: QuantizedTensor, is_table: bool) -> ir.Value:
        """Signed codes, for which 0 stands for zero."""
        rows, columns = tensor.shape
        if is_table:  # few runtimes gather or transpose numbers of four bits
            return self._edit.store(
                f"{name}.q8", (rows, columns), ir.DataType.INT8, lambda: _signed(tensor)
            )
        dtype = ir.DataType.INT4 if tensor.bits == 4 else ir.DataType.INT8
        return self._edit.store(
            f"{name}.q{tensor.bits}",
            (columns, rows),
            dtype,
            lambda: _signed(tensor).T.astype(dtype.numpy()),
        )


def _signed(tensor: QuantizedTensor) -> NDArray[np.int8]:
    """[N, K]."""
    centre = 1 << (tensor.bits - 1)
    return (tensor.codes.astype(np.int16) - centre).astype(np.int8)
