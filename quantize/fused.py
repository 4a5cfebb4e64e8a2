"""Quantized layers and embeddings as ONNX Runtime's own operators (com.microsoft).

Legend: N rows (outputs) and K columns (inputs) of a weight, B blocks a row.

What is stored for a weight `w`:
    w.q4, w.q8          uint8, as MatMulNBits reads it: padded to whole blocks, low bits first
    w.scale             [N, B], of the activations' type
    w.minimum           float16 [N, B], or w.offset, float32 or float16 [N, B]; neither for symmetric blocks
    w.row_codes         int8 [K, N], and w.row_scale, float32 [N], where prefill has its own weights
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxlm.graphs.edit import MICROSOFT
from onnxlm.graphs.linear import Linear
from onnxlm.quantize.blocks import pack_matmul
from onnxlm.quantize.graph_edit import GraphEdit
from onnxlm.quantize.row import RowQuantized
from onnxlm.quantized_tensor import QuantizedTensor

# int8 activations, one scale a block: the level at which every width of code has a fast kernel.
ACCURACY_LEVEL = 4


class FusedOperators:
    """Replaces the layers and embeddings of one graph."""

    # MatMulNBits packs constant codes with their scales when a session is opened. Behind a Cast, which a
    # session without optimizations keeps, scales come too late: at this accuracy level the products are then
    # wrong numbers, without an error (ONNX Runtime 1.32).
    SHORT_SCALES: ClassVar[bool] = False

    def __init__(self, edit: GraphEdit) -> None:
        self._edit = edit

    def layer(self, linear: Linear, tensor: QuantizedTensor, is_table: bool) -> None:
        """y = MatMulNBits(x); offsets add blocksum(x) @ offset.T, so that the operator stays symmetric.

        With zero points in floating point the operator leaves its fast path. A code is centred already,
        so w = scale * (code - centre) + offset splits exactly.
        """
        edit, node, name = self._edit, linear.node, linear.name
        rows, columns = tensor.shape
        codes = self._codes(name, tensor, is_table)
        if is_table:  # an embedding reads them as a matrix; a session folds the Reshape
            shape = edit.integers(f"{name}.shape", rows, -1, _block_bytes(tensor))
            codes = edit.before(node, "Reshape", [codes, shape])
        y = edit.before(
            node,
            "MatMulNBits",
            [linear.x, codes, edit.scale(name, tensor)],
            MICROSOFT,
            N=rows,
            K=columns,
            bits=tensor.bits,
            block_size=tensor.block_size,
            accuracy_level=ACCURACY_LEVEL,
        )
        edit.replace(node, edit.add_offsets(linear, tensor, y))

    def rows(self, linear: Linear, tensor: RowQuantized) -> None:
        """y = MatMulIntegerToFloat(codes of x, codes) * r, see `GraphEdit.quantized_rows`."""
        edit, node, name = self._edit, linear.node, linear.name
        codes, magnitude = edit.quantized_rows(linear)
        product = edit.before(
            node,
            "MatMulIntegerToFloat",
            [
                codes,
                edit.constant(f"{name}.row_codes", tensor.codes),
                edit.scalar("row.step", 1 / 127),
                edit.constant(f"{name}.row_scale", tensor.scale),
                # The weights' zero point is left out, 0 for signed codes: where a session turns them into
                # unsigned ones it makes a new one, and must not meet one that other products share.
                edit.scalar("row.centre", 128, np.uint8),
            ],
            MICROSOFT,
        )
        edit.replace(node, edit.before(node, "Mul", [product, magnitude]))

    def embedding(self, gather: ir.Node, name: str, tensor: QuantizedTensor) -> None:
        """Gather(table, ids) -> GatherBlockQuantized on the codes that a tied head reads too.

        Where K is no multiple of the block, padding is gathered along and cut off.
        """
        edit = self._edit
        y = edit.before(
            gather,
            "GatherBlockQuantized",
            [self._codes(name, tensor, True), gather.inputs[1], edit.scale(name, tensor)],
            MICROSOFT,
            bits=tensor.bits,
            block_size=tensor.block_size,
            quantize_axis=1,
            gather_axis=0,
        )
        y = edit.first_columns(gather, tensor, y)
        edit.replace(gather, edit.add_row_offsets(gather, tensor, y))

    def _codes(self, name: str, tensor: QuantizedTensor, is_table: bool) -> ir.Value:
        """[N, B, bytes a block], or for a table [N, B * bytes a block]: the same bytes."""
        rows, blocks = tensor.scale.shape
        size = _block_bytes(tensor)
        shape = (rows, blocks * size) if is_table else (rows, blocks, size)
        return self._edit.store(
            f"{name}.q{tensor.bits}",
            shape,
            ir.DataType.UINT8,
            lambda: pack_matmul(tensor).reshape(shape),
        )


def _block_bytes(tensor: QuantizedTensor) -> int:
    return tensor.block_size * tensor.bits // 8
