"""What was seen of one linear layer's input, gathered batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass
class Statistics:
    """Ranges, and where wanted second moments, of an input x [tokens, K].

    Attributes:
        abs_max: max|x_j|, float32 [K].
        tokens: Tokens seen.
        hessian: Sum over the tokens of x x^T * K / |x|^2, float32 [K, K]; None when not gathered. Each token
            weighs the same: the few that are hundreds of times larger would drown all others.
    """

    abs_max: Floats
    tokens: int = 0
    hessian: Floats | None = None

    @classmethod
    def empty(cls, width: int, hessian: bool = False) -> Statistics:
        """Nothing seen yet of an input of K = `width` channels."""
        moments = np.zeros((width, width), dtype=np.float32) if hessian else None
        return cls(np.zeros(width, dtype=np.float32), 0, moments)

    def add(self, x: Floats) -> None:
        """Take in float32 [tokens, K]."""
        self.abs_max = np.maximum(self.abs_max, np.abs(x).max(axis=0))
        self.tokens += x.shape[0]
        if self.hessian is not None:
            size = np.square(x).sum(axis=1, keepdims=True)
            weighted = x * np.divide(x.shape[1], size, out=np.zeros_like(size), where=size > 0)
            self.hessian += x.T @ weighted

    def rescale(self, factor: Floats) -> None:
        """Become the statistics of x * factor, factor [K] above 0."""
        self.abs_max = self.abs_max * factor
        if self.hessian is not None:
            self.hessian *= np.outer(factor, factor)
