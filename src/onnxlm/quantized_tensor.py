"""Block-quantized weights as plain numpy: what a GGUF file holds and what the schemes produce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [N, K] of small unsigned codes with one scale (and one offset) a block of one row.

    value[n, k] = scale[n, b] * (codes[n, k] - 2 ** (bits - 1)) + offset[n, b], with b = k // block_size.

    Attributes:
        bits: 4 or 8.
        block_size: Columns that share a scale; the last block of a row may be shorter.
        codes: uint8 [N, K], each in [0, 2 ** bits).
        scale: float32 [N, ceil(K / block_size)].
        offset: float32 like `scale`, or None for symmetric blocks.
    """

    bits: int
    block_size: int
    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    offset: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, index: NDArray[np.intp]) -> QuantizedTensor:
        """The rows `index`, in that order."""
        offset = None if self.offset is None else self.offset[index]
        return QuantizedTensor(
            self.bits, self.block_size, self.codes[index], self.scale[index], offset
        )

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        columns = self.codes.shape[1]
        centred = self.codes.astype(np.float32) - np.float32(2 ** (self.bits - 1))
        values = centred * np.repeat(self.scale, self.block_size, axis=1)[:, :columns]
        if self.offset is not None:
            values += np.repeat(self.offset, self.block_size, axis=1)[:, :columns]
        return values


def alike(parts: Sequence[QuantizedTensor]) -> list[QuantizedTensor] | None:
    """The same values in codes of one width and blocks of one size; None where blocks do not fit together.

    Four-bit codes beside eight-bit ones become eight-bit codes of the same values, a wide block beside narrow
    ones several narrow ones of one scale: GGUF files give one matrix of a layer more bits than the others.
    """
    size = min(part.block_size for part in parts)
    if any(part.block_size % size for part in parts):
        return None
    bits = max(part.bits for part in parts)
    return [_in_form(part, bits, size) for part in parts]


def _in_form(tensor: QuantizedTensor, bits: int, size: int) -> QuantizedTensor:
    if (tensor.bits, tensor.block_size) == (bits, size):
        return tensor
    shift = (1 << (bits - 1)) - (1 << (tensor.bits - 1))
    times, blocks = tensor.block_size // size, -(-tensor.shape[1] // size)
    scale, offset = (
        None if values is None else np.repeat(values, times, axis=1)[:, :blocks]
        for values in (tensor.scale, tensor.offset)
    )
    assert scale is not None
    return QuantizedTensor(bits, size, tensor.codes + np.uint8(shift), scale, offset)


def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Rows of several tensors under one another, exactly, see `alike`; None when they do not fit together."""
    same = alike(parts)
    if same is None or len({part.shape[1] for part in same}) != 1:
        return None
    offset: NDArray[np.float32] | None = None
    if any(part.offset is not None for part in same):
        offset = np.concatenate(
            [np.zeros_like(part.scale) if part.offset is None else part.offset for part in same]
        )
    return QuantizedTensor(
        same[0].bits,
        same[0].block_size,
        np.concatenate([part.codes for part in same]),
        np.concatenate([part.scale for part in same]),
        offset,
    )
