"""Block-quantized weights as plain numpy: what a GGUF file holds and what the schemes produce."""

from __future__ import annotations

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
