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
        hessian: Sum over the tokens of x x^T * K / |x|^2, float32 [K, K]; None when not gathered. Each token
            weighs the same: the few that are hundreds of times larger would drown all others.
        factor: What the input is now multiplied by before it is read, float32 [K].
    """

    abs_max: Floats
    factor: Floats
    hessian: Floats | None = None

    @classmethod
    def empty(cls, width: int) -> Statistics:
        """Nothing seen yet of an input of K = `width` channels."""
        return cls(np.zeros(width, dtype=np.float32), np.ones(width, dtype=np.float32))

    def add_range(self, x: Floats) -> None:
        """Widen the ranges by float32 [tokens, K]."""
        self.abs_max = np.maximum(self.abs_max, np.abs(x).max(axis=0) * self.factor)

    def add_moments(self, x: Floats) -> None:
        """Add the second moments of float32 [tokens, K]."""
        size = np.square(x).sum(axis=1, keepdims=True)
        share = np.divide(x.shape[1], size, out=np.zeros_like(size), where=size > 0)
        read = x * self.factor
        moments = read.T @ (read * share)
        if self.hessian is None:
            self.hessian = moments
        else:
            self.hessian += moments

    def rescale(self, factor: Floats) -> None:
        """Become the statistics of x * factor, factor [K] above 0."""
        self.factor = self.factor * factor
        self.abs_max = self.abs_max * factor
        if self.hessian is not None:
            self.hessian *= np.outer(factor, factor)
