"""What unpacking GGUF's blocks is made of: small codes out of bytes, and codes of any centre as tensors.

Legend: N rows, K columns, B blocks a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onnxlm.quantized_tensor import QuantizedTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of every block, as float32 [N, B]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0].astype("<f4")


def planes(packed: Bytes, shifts: Sequence[int], mask: int) -> Bytes:
    """Codes that share bytes, [..., n] -> [..., shifts, n]: those of the first shift come first."""
    by = np.array(list(shifts), np.uint8)[:, None]
    codes: Bytes = (packed[..., None, :] >> by) & np.uint8(mask)
    return codes


def symmetric(codes: Bytes, width: int, block_size: int, scale: Floats) -> QuantizedTensor:
    """Values are scale * (q - 2 ** (width - 1)).

    Args:
        codes: uint8 [N, K], each of `width` bits.
        width: Bits that the file has for a code.
        block_size: Columns that share a scale.
        scale: float32 [N, K / block_size].
    """
    bits = 4 if width <= 4 else 8
    shift = np.uint8(2 ** (bits - 1) - 2 ** (width - 1))
    return QuantizedTensor(bits, block_size, codes + shift, scale)


def affine(
    codes: Bytes, width: int, block_size: int, scale: Floats, least: Floats
) -> QuantizedTensor:
    """Values are scale * q + least, kept as scale * (q - c) + (least + c * scale), c = 2 ** (width - 1).

    scale * (q - c) is exact in float32 and least + c * scale is, unless their exponents lie so far apart that
    a float32 does not hold both: then a value may differ from scale * q + least by a unit in the last place.
    """
    whole = symmetric(codes, width, block_size, scale)
    offset = least + np.float32(2 ** (width - 1)) * scale
    return QuantizedTensor(whole.bits, block_size, whole.codes, scale, offset)
