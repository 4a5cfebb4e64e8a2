"""Four-bit codes whose rounding errors are made up for by the columns that are still to be rounded.

Source: Frantar et al., "GPTQ" (2023), with three changes that lowered the measured KL: blocks are taken in
the order of their inputs' energy (as a whole, so that a block keeps one scale), a block's scale is searched
when its turn comes, on columns that already carry the compensation, and a token's share in the second
moments does not grow with its size (a few tokens are hundreds of times larger than the rest).

Shapes: N rows and K columns of a weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxlm.quantize.blocks import (
    fits_short,
    inverse_of,
    require_finite,
    split_blocks,
    symmetric_scale,
)
from onnxlm.quantized_tensor import QuantizedTensor

Float = NDArray[np.float32]

# Added to every channel's energy, as a share of their mean: few tokens say little of rare directions.
DAMPING = 0.15
# Width of a triangular matrix that is inverted as it is.
_SMALL = 128
# Shares of a block's range that are tried as its scale: clipping its extremum can serve the rest.
_SHARES = np.array([1.0, 0.92, 0.84, 0.76], dtype=np.float32)


def compensated(weight: Float, moments: Float, bits: int, block_size: int) -> QuantizedTensor:
    """Symmetric codes that keep y = x W^T rather than W.

    Args:
        weight: [N, K].
        moments: Second moments of the input x, [K, K], see `Statistics.hessian`.
        bits: 4 or 8.
        block_size: Columns that share a scale.

    Raises:
        QuantizationError: The weight holds NaN or infinity.
    """
    require_finite(weight)
    short = fits_short(symmetric_scale(split_blocks(weight, block_size), bits))
    damped = _damped(moments)
    energy = np.diag(damped).astype(np.float32)
    blocks = _blocks_by_energy(energy, block_size)
    order = np.concatenate(blocks)
    factor = _factor(damped[np.ix_(order, order)])
    centre = 1 << (bits - 1)
    columns: Float = np.ascontiguousarray(weight.T[order])  # [K, N], in the order of rounding
    codes = np.zeros(columns.shape, dtype=np.uint8)
    scale = np.zeros((weight.shape[0], len(blocks)), dtype=np.float32)
    start = 0
    for block in blocks:
        end = start + block.size
        chosen = _search_scale(columns[start:end].T, energy[block], bits, short)
        errors = _round_block(columns, codes, factor, (start, end), chosen, centre)
        if end < columns.shape[0]:
            columns[end:] -= factor[start:end, end:].T @ errors
        scale[:, block[0] // block_size] = chosen
        start = end
    restored = np.empty_like(codes)
    restored[order] = codes
    return QuantizedTensor(bits, block_size, np.ascontiguousarray(restored.T), scale)


def _damped(moments: Float) -> NDArray[np.float64]:
    damped = moments.astype(np.float64)
    diagonal = np.diag(damped).copy()
    mean = diagonal.mean() or 1.0
    # A channel that was never active is worth as much as an average one: it may be active elsewhere.
    diagonal[diagonal <= 0] = mean
    damped[np.diag_indices_from(damped)] = diagonal + DAMPING * mean
    return damped


def _blocks_by_energy(energy: Float, block_size: int) -> list[NDArray[np.intp]]:
    """Columns of each block, the most energetic block first, inside it the most energetic column first."""
    starts = range(0, energy.size, block_size)
    blocks = [np.arange(start, min(start + block_size, energy.size)) for start in starts]
    blocks = [block[np.argsort(-energy[block], kind="stable")] for block in blocks]
    return sorted(blocks, key=lambda block: -float(energy[block].mean()))


def _factor(damped: NDArray[np.float64]) -> Float:
    """Upper Cholesky factor of the inverse: row j says how later columns make up for column j.

    With M = R R^T, R upper triangular, the inverse is (R^-1)^T R^-1. R is the lower factor of M read
    backwards; that and a triangular inverse take a quarter of what a general inverse and its factor take.
    """
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    return _upper_inverse(lower[::-1, ::-1]).astype(np.float32)


def _upper_inverse(upper: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Inverse of an upper triangular matrix, by halves: the work is in products."""
    size = upper.shape[0]
    if size <= _SMALL:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    inverse = np.zeros_like(upper)
    first, last = _upper_inverse(upper[:half, :half]), _upper_inverse(upper[half:, half:])
    inverse[:half, :half], inverse[half:, half:] = first, last
    inverse[:half, half:] = -first @ (upper[:half, half:] @ last)
    return inverse


def _search_scale(block: Float, energy: Float, bits: int, short: bool) -> Float:
    """The scale [N] of a block [N, size] with the least error, weighted by the columns' energy.

    Args:
        block: Columns as they are when the block's turn comes.
        energy: Of each column.
        bits: 4 or 8.
        short: Round to 16 bits, as it is stored.
    """
    top = (1 << (bits - 1)) - 1
    widest = symmetric_scale(block, bits)  # the extremum on the lowest code
    mirrored = -widest * np.float32((top + 1) / top)  # and on the highest
    best_error = np.full(block.shape[0], np.inf, dtype=np.float32)
    best = widest
    for start in (widest, mirrored):
        for share in _SHARES:
            codes = _nearest(block, start * share, top)
            # The best scale for these codes; a block of zeros keeps a scale of 0.
            weighted = codes * energy
            norm = (weighted * codes).sum(axis=1)
            scale = np.divide(
                (weighted * block).sum(axis=1), norm, out=np.zeros_like(norm), where=norm > 0
            )
            if short:
                scale = scale.astype(np.float16).astype(np.float32)
            error = np.square(block - _nearest(block, scale, top) * scale[:, None]) @ energy
            better = error < best_error
            best_error = np.where(better, error, best_error)
            best = np.where(better, scale, best)
    return best


def _nearest(block: Float, scale: Float, top: int) -> Float:
    codes: Float = np.clip(np.rint(block * inverse_of(scale)[:, None]), -top - 1, top)
    return codes


def _round_block(
    columns: Float,
    codes: NDArray[np.uint8],
    factor: Float,
    span: tuple[int, int],
    scale: Float,
    centre: int,
) -> Float:
    """Round one block column by column, in place; returns the scaled errors [size, N]."""
    start, end = span
    inverse = inverse_of(scale)
    errors = np.empty((end - start, columns.shape[1]), dtype=np.float32)
    for j in range(start, end):
        rounded = np.clip(np.rint(columns[j] * inverse), -centre, centre - 1)
        codes[j] = (rounded + centre).astype(np.uint8)
        error = (columns[j] - rounded * scale) / factor[j, j]
        errors[j - start] = error
        columns[j + 1 : end] -= np.outer(factor[j, j + 1 : end], error)
    return errors
