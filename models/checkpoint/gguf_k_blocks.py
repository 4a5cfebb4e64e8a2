"""Unpacks GGUF's K-quants: blocks of 256 columns whose parts have small scales, times one of the block.

Block layouts: ggml, `ggml/src/ggml-common.h` (`block_q2_K` to `block_q6_K`). Both levels of scales are
multiplied out: a float16 times at most 8 bits is exact in float32.

Legend: N rows, B blocks a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxlm.models.checkpoint.gguf_bits import Bytes, Floats, affine, half, planes, symmetric
from onnxlm.quantized_tensor import QuantizedTensor


def q2_k(blocks: Bytes) -> QuantizedTensor:
    """16 scales and least values of 4 bits in a byte, 64 bytes of codes, d, d of the least values."""
    scales = blocks[..., :16]
    codes = _quarters(blocks[..., 16:80])
    scale = half(blocks, 80)[..., None] * (scales & 15)
    least = half(blocks, 82)[..., None] * (scales >> 4)
    return affine(codes, 2, 16, _by_row(scale), -_by_row(least))


def q3_k(blocks: Bytes) -> QuantizedTensor:
    """32 bytes of third bits, 64 of the lower two, 16 scales of 6 bits, d."""
    third = planes(blocks[..., :32], range(8), 1)
    codes = _quarters(blocks[..., 32:96]) | (third.reshape(len(blocks), -1) << np.uint8(2))
    packed = blocks[..., 96:108]
    low = planes(packed[..., :8], (0, 4), 15).reshape(*packed.shape[:-1], 16)
    high = planes(packed[..., 8:], (0, 2, 4, 6), 3).reshape(low.shape)
    signed = (low | (high << 4)).astype(np.float32) - 32
    return symmetric(codes, 3, 16, _by_row(half(blocks, 108)[..., None] * signed))


def q4_k(blocks: Bytes) -> QuantizedTensor:
    """d, d of the least values, 8 scales and least values of 6 bits, 128 bytes of codes."""
    codes = planes(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32), (0, 4), 15)
    return affine(codes.reshape(len(blocks), -1), 4, 32, *_scales_and_least(blocks))


def q5_k(blocks: Bytes) -> QuantizedTensor:
    """As `q4_k`, with 32 bytes of fifth bits in front of the codes."""
    low = planes(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32), (0, 4), 15)
    fifth = planes(blocks[..., 16:48], range(8), 1).reshape(low.shape)
    codes = low | (fifth << np.uint8(4))
    return affine(codes.reshape(len(blocks), -1), 5, 32, *_scales_and_least(blocks))


def q6_k(blocks: Bytes) -> QuantizedTensor:
    """128 bytes of lower four bits, 64 of the upper two, 16 signed scales of 8 bits, d."""
    low = planes(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64), (0, 4), 15)
    codes = low.reshape(len(blocks), -1) | (_quarters(blocks[..., 128:192]) << np.uint8(4))
    signed = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return symmetric(codes, 6, 16, _by_row(half(blocks, 208)[..., None] * signed))


def _quarters(packed: Bytes) -> Bytes:
    """Two bits a column, [N, B, 64] -> [N, B * 256]: the four of a byte are 32 columns apart."""
    halves = packed.reshape(*packed.shape[:-1], 2, 32)
    return planes(halves, (0, 2, 4, 6), 3).reshape(len(packed), -1)


def _scales_and_least(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and least value of each 32 columns, float32 [N, B * 8], of `q4_k` and `q5_k`.

    Twelve bytes hold the lower six bits of the first four of each kind, whose upper two bits are those of the
    last four; the lower four bits of these are the nibbles of the last four bytes.
    """
    first, second, nibbles = np.split(blocks[..., 4:16], 3, axis=-1)
    scales = np.concatenate((first & 63, (nibbles & 15) | (first >> 6 << 4)), axis=-1)
    least = np.concatenate((second & 63, (nibbles >> 4) | (second >> 6 << 4)), axis=-1)
    scale = half(blocks, 0)[..., None] * scales
    return _by_row(scale), -_by_row(half(blocks, 2)[..., None] * least)


def _by_row(values: NDArray[np.float32]) -> Floats:
    """[N, B, parts] -> float32 [N, B * parts]."""
    return values.astype(np.float32).reshape(len(values), -1)
