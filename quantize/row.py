"""One signed 8-bit scale per output channel, for integer matrix products over many rows of activations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowQuantized:
    """A weight with one scale per output channel: w[n, k] = scale[n] * codes[k, n].

    Attributes:
        codes: int8 [K, N], in [-127, 127].
        scale: float32 [N].
    """

    codes: NDArray[np.int8]
    scale: NDArray[np.float32]

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        return (self.codes.astype(np.float32) * self.scale).T


def quantize_rows(weight: NDArray[np.float32]) -> RowQuantized:
    """Round a weight [N, K] to the nearest of 255 levels of its output channel."""
    # A channel of zeros must not become 0 / 0.
    peak = np.maximum(np.abs(weight).max(axis=1), np.finfo(np.float32).tiny)
    scale = (peak / np.float32(127)).astype(np.float32)
    codes = np.rint(weight / scale[:, None]).astype(np.int8)
    return RowQuantized(np.ascontiguousarray(codes.T), scale)
