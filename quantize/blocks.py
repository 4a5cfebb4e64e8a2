"""Matrices in blocks of small codes: round-to-nearest, and the byte layouts of the kernels.

Shapes: N rows (output channels), K columns (input channels), B = ceil(K / block_size) blocks a row.

Layouts (onnxruntime contrib operators, uint8, low bits first):
    MatMulNBits           data [N, B, block_size * bits / 8], scales [N, B]; last block padded.
    GatherBlockQuantized  data [N, K * bits / 8], scales [N, B]; same bytes if block_size divides K.
Without a zero-point input both take 2 ** (bits - 1), the centre by which `QuantizedTensor` is
defined.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxlm.errors import QuantizationError
from onnxlm.quantized_tensor import QuantizedTensor

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def block_count(columns: int, block_size: int) -> int:
    """ceil(columns / block_size)."""
    return -(-columns // block_size)


def split_blocks(weight: Float, block_size: int) -> Float:
    """[N, K] -> [N, B, block_size]; a short last block repeats the row's last value.

    Repeating a value that the block already holds leaves its minimum, maximum and extremum alone.
    """
    rows, columns = weight.shape
    pad = block_count(columns, block_size) * block_size - columns
    if pad:
        weight = np.pad(weight, ((0, 0), (0, pad)), mode="edge")
    return weight.reshape(rows, -1, block_size)


def symmetric_scale(blocks: Float, bits: int) -> Float:
    """Scale [...] of blocks [..., block_size] whose centre code stands for zero.

    Four bits take the signed extremum as the code that has no mirror (-8), so all 16 codes serve:
    the scale then has the opposite sign of the extremum. At eight bits that would win 0.4% of the
    range and cost the bound of half a step, so there the scale is max|w| / 127.
    """
    largest: Float = np.abs(blocks).max(axis=-1)
    if bits == 8:
        return largest / np.float32(127)
    index = np.abs(blocks).argmax(axis=-1)[..., None]
    extremum = np.take_along_axis(blocks, index, axis=-1)[..., 0]
    return extremum / np.float32(-(2 ** (bits - 1)))


def asymmetric_scale(blocks: Float, bits: int) -> tuple[Float, Float]:
    """(scale, offset), each [...], that put the least value on code 0, the greatest on the last."""
    low, high = blocks.min(axis=-1), blocks.max(axis=-1)
    scale = (high - low) / np.float32(2**bits - 1)
    return scale, low + scale * np.float32(2 ** (bits - 1))


def require_finite(weight: Float) -> None:
    """Refuse a weight that no codes can stand for.

    Raises:
        QuantizationError: It holds NaN or infinity.
    """
    if not np.isfinite(weight).all():
        raise QuantizationError("weight holds NaN or infinity", fix="check the checkpoint")


def inverse_of(scale: Float) -> Float:
    """1 / scale, and 0 where that overflows or the scale is 0: such a block's values are 0 in any sum."""
    large = np.abs(scale) >= np.finfo(np.float32).tiny
    inverse: Float = np.divide(1.0, scale, out=np.zeros_like(scale), where=large)
    return inverse


def short_scale(scale: Float) -> Float:
    """A scale that 16 bits hold, a little larger so that no value is clipped; float32, as given.

    Where 16 bits do not hold them all (`fits_short`), all stay as they are.
    """
    chosen = _rounded_up(scale)
    return chosen if _near(chosen, scale) else scale


def fits_short(scale: Float) -> bool:
    """Whether 16 bits hold every scale.

    Half floats have 11 significant bits, and fewer below 2 ** -14. No step may widen by more than an eighth.
    """
    return _near(_rounded_up(scale), scale)


def _near(chosen: Float, scale: Float) -> bool:
    widened = np.abs(chosen) > np.abs(scale) * np.float32(1.125)
    return bool(np.isfinite(chosen).all() and not widened.any())


def _rounded_up(scale: Float) -> Float:
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
        # What is within the rounding of a float32 division is the same number.
        short = np.abs(half.astype(np.float32)) < np.abs(scale) * np.float32(1 - 1e-6)
        away = np.nextafter(half, np.copysign(np.float16(np.inf), scale.astype(np.float16)))
    chosen: Float = np.where(short, away, half).astype(np.float32)
    return chosen


def encode(
    weight: Float, bits: int, block_size: int, scale: Float, offset: Float | None = None
) -> QuantizedTensor:
    """Nearest codes for scales that are already chosen; values outside the range are clipped.

    Args:
        weight: [N, K].
        bits: 4 or 8.
        block_size: Columns that share a scale.
        scale: [N, B]; a block whose scale is 0, or next to it, gets the centre code.
        offset: [N, B], or None for symmetric blocks.
    """
    columns = weight.shape[1]
    blocks = split_blocks(weight, block_size)
    if offset is not None:
        blocks = blocks - offset[..., None]
    inverse = inverse_of(scale)
    centre = 2 ** (bits - 1)
    codes = np.rint(blocks * inverse[..., None])
    codes = np.clip(codes, -centre, centre - 1) + np.float32(centre)
    codes = codes.astype(np.uint8).reshape(weight.shape[0], -1)[:, :columns]
    return QuantizedTensor(bits, block_size, np.ascontiguousarray(codes), scale, offset)


def round_to_nearest(
    weight: Float, bits: int, block_size: int, *, symmetric: bool = True, short_scales: bool = False
) -> QuantizedTensor:
    """The plain quantizer: each block's range from its own values, each value to the nearest code.

    A block size of K gives one scale an output channel, the form integer matrix products read.

    Args:
        weight: [N, K], finite.
        bits: 4 or 8.
        block_size: Columns that share a scale.
        symmetric: Whether the centre code stands for zero.
        short_scales: Whether symmetric blocks take scales that can be stored in 16 bits.

    Raises:
        QuantizationError: The weight holds NaN or infinity.
    """
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    require_finite(weight)
    blocks = split_blocks(weight, block_size)
    if symmetric:
        scale = symmetric_scale(blocks, bits)
        return encode(weight, bits, block_size, short_scale(scale) if short_scales else scale)
    scale, offset = asymmetric_scale(blocks, bits)
    return encode(weight, bits, block_size, scale, offset)


def pack_matmul(tensor: QuantizedTensor) -> Bytes:
    """MatMulNBits' data: uint8 [N, B, block_size * bits / 8].

    The padding of a short last block is the centre code, whose value is zero.
    """
    rows, columns = tensor.shape
    size = tensor.block_size
    codes = tensor.codes
    pad = block_count(columns, size) * size - columns
    if pad:
        codes = np.pad(codes, ((0, 0), (0, pad)), constant_values=2 ** (tensor.bits - 1))
    return _pack(codes, tensor.bits).reshape(rows, -1, size * tensor.bits // 8)


def unpack(data: Bytes, bits: int, columns: int) -> Bytes:
    """Codes uint8 [N, columns] of either layout; padding after `columns` is dropped."""
    data = data.reshape(data.shape[0], -1)
    if bits == 8:
        return np.ascontiguousarray(data[:, :columns])
    codes = np.empty((data.shape[0], data.shape[1] * 2), np.uint8)
    codes[:, 0::2] = data & 15
    codes[:, 1::2] = data >> 4
    return np.ascontiguousarray(codes[:, :columns])


def _pack(codes: Bytes, bits: int) -> Bytes:
    """[N, K] -> [N, K * bits / 8]."""
    if bits == 8:
        return np.ascontiguousarray(codes)
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
