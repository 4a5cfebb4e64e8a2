"""Unpacks GGUF's block formats into codes, scales and offsets without loss.

Block layouts: ggml, `ggml/src/ggml-common.h` (`block_q4_0`, `block_q4_1`, `block_q8_0`), 32 columns each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from onnxlm.quantized_tensor import QuantizedTensor

BLOCK = 32
Bytes = NDArray[np.uint8]


def _half(blocks: Bytes, start: int) -> NDArray[np.float32]:
    """The float16 at byte `start` of every block, as float32 [N, blocks]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0].astype("<f4")


def _nibbles(blocks: Bytes, start: int) -> Bytes:
    """The 32 four-bit codes behind byte `start`: low nibbles are columns 0-15, high ones 16-31."""
    packed = blocks[..., start:]
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1).reshape(len(blocks), -1)


def _q4_0(blocks: Bytes) -> QuantizedTensor:
    """Values are d * (q - 8)."""
    return QuantizedTensor(4, BLOCK, _nibbles(blocks, 2), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> QuantizedTensor:
    """Values are d * q + m, kept as d * (q - 8) + (m + 8 d).

    d and m are float16, so d * (q - 8) is exact in float32 and m + 8 d is, unless their exponents lie
    more than 10 apart: then one value may differ from d * q + m by one unit in the last place.
    """
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    return QuantizedTensor(4, BLOCK, _nibbles(blocks, 4), scale, minimum + np.float32(8) * scale)


def _q8_0(blocks: Bytes) -> QuantizedTensor:
    """Values are d * q with signed q; codes are q + 128."""
    codes = (blocks[..., 2:] ^ np.uint8(0x80)).reshape(len(blocks), -1)
    return QuantizedTensor(8, BLOCK, codes, _half(blocks, 0))


_UNPACK: dict[str, tuple[int, Callable[[Bytes], QuantizedTensor]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q8_0": (34, _q8_0),
}
EXACT_TYPES = frozenset(_UNPACK)


def unpack(rows: Bytes, type_name: str) -> QuantizedTensor:
    """Codes, scales and offsets of a block-quantized matrix.

    Args:
        rows: The file's bytes, uint8 [N, bytes a row].
        type_name: One of `EXACT_TYPES`.
    """
    block_bytes, unpack_blocks = _UNPACK[type_name]
    return unpack_blocks(rows.reshape(rows.shape[0], -1, block_bytes))
