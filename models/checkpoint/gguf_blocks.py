"""Unpacks GGUF's block formats into codes, scales and offsets without loss.

Block layouts: ggml, `ggml/src/ggml-common.h` (`block_q4_0` and so on), 32 columns each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL

from onnxlm.models.checkpoint import gguf_k_blocks, mxfp4
from onnxlm.models.checkpoint.gguf_bits import Bytes, affine, half, planes, symmetric
from onnxlm.quantized_tensor import QuantizedTensor

BLOCK = 32


def _nibbles(blocks: Bytes, start: int) -> Bytes:
    """The 32 four-bit codes behind byte `start`: low nibbles are columns 0-15, high ones 16-31."""
    return planes(blocks[..., start:], (0, 4), 15).reshape(len(blocks), -1)


def _five(blocks: Bytes, start: int) -> Bytes:
    """The 32 five-bit codes behind byte `start`: four bytes of fifth bits, a column each, and nibbles."""
    fifth = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
    return _nibbles(blocks, start + 4) | (fifth.reshape(len(blocks), -1) << np.uint8(4))


def _q4_0(blocks: Bytes) -> QuantizedTensor:
    """Values are d * (q - 8)."""
    return symmetric(_nibbles(blocks, 2), 4, BLOCK, half(blocks, 0))


def _q4_1(blocks: Bytes) -> QuantizedTensor:
    """Values are d * q + m."""
    return affine(_nibbles(blocks, 4), 4, BLOCK, half(blocks, 0), half(blocks, 2))


def _q5_0(blocks: Bytes) -> QuantizedTensor:
    """Values are d * (q - 16)."""
    return symmetric(_five(blocks, 2), 5, BLOCK, half(blocks, 0))


def _q5_1(blocks: Bytes) -> QuantizedTensor:
    """Values are d * q + m."""
    return affine(_five(blocks, 4), 5, BLOCK, half(blocks, 0), half(blocks, 2))


def _q8_0(blocks: Bytes) -> QuantizedTensor:
    """Values are d * q with signed q; codes are q + 128."""
    codes = (blocks[..., 2:] ^ np.uint8(0x80)).reshape(len(blocks), -1)
    return symmetric(codes, 8, BLOCK, half(blocks, 0))


def _iq4_nl(blocks: Bytes) -> QuantizedTensor:
    """Values are d times one of sixteen signed bytes, so that eight bits hold what four stand for."""
    table = np.array(IQ4_NL.kvalues, np.int8).view(np.uint8) ^ np.uint8(0x80)
    return symmetric(table[_nibbles(blocks, 2)], 8, BLOCK, half(blocks, 0))


def _mxfp4(blocks: Bytes) -> QuantizedTensor:
    """A power of two in front of the numbers."""
    return mxfp4.decode(_nibbles(blocks, 1), blocks[..., 0])


_UNPACK: dict[GGMLQuantizationType, Callable[[Bytes], QuantizedTensor]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
    GGMLQuantizationType.MXFP4: _mxfp4,
    GGMLQuantizationType.Q2_K: gguf_k_blocks.q2_k,
    GGMLQuantizationType.Q3_K: gguf_k_blocks.q3_k,
    GGMLQuantizationType.Q4_K: gguf_k_blocks.q4_k,
    GGMLQuantizationType.Q5_K: gguf_k_blocks.q5_k,
    GGMLQuantizationType.Q6_K: gguf_k_blocks.q6_k,
}
EXACT_TYPES = frozenset(kind.name for kind in _UNPACK)


def unpack(rows: Bytes, type_name: str) -> QuantizedTensor:
    """Codes, scales and offsets of a block-quantized matrix.

    Args:
        rows: The file's bytes, uint8 [N, bytes a row].
        type_name: One of `EXACT_TYPES`.
    """
    kind = GGMLQuantizationType[type_name]
    _, block_bytes = GGML_QUANT_SIZES[kind]
    return _UNPACK[kind](rows.reshape(rows.shape[0], -1, block_bytes))
