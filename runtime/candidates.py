"""The tokens that may still be drawn, and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxlm.runtime.arrays import Floats

# Weights are whole numbers up to this one. The sum over a vocabulary of 2**19 tokens fits float64's 53 bits.
_HEAVIEST = np.float32(2.0**34)
_BLOCK = 1024


@dataclass(frozen=True)
class Candidates:
    """Tokens that may still be drawn.

    Attributes:
        logits: float32 [rows, n]; -inf for what a row cannot draw.
        ids: int64 [rows, n], the tokens of the columns; None where column and token are the same.
    """

    logits: Floats
    ids: NDArray[np.int64] | None = None

    def keep(self, kept: NDArray[np.bool_]) -> Candidates:
        """The columns marked in bool [rows, n], in their order; what else a row has becomes -inf."""
        return self.take([np.flatnonzero(row) for row in kept])

    def take(self, columns: Sequence[NDArray[np.int64]]) -> Candidates:
        """Some columns of each row, int64 [k] in ascending order; what else a row has becomes -inf."""
        rows, width = self.logits.shape
        widest = max(map(len, columns), default=0)
        narrow = widest <= width // 4  # else moving them costs more than it spares
        logits = np.full((rows, widest if narrow else width), -np.inf, dtype=np.float32)
        if not narrow:
            for row, chosen in enumerate(columns):
                logits[row, chosen] = self.logits[row, chosen]
            return Candidates(logits, self.ids)
        ids = np.zeros((rows, widest), dtype=np.int64)
        for row, chosen in enumerate(columns):
            logits[row, : chosen.size] = self.logits[row, chosen]
            ids[row, : chosen.size] = chosen if self.ids is None else self.ids[row, chosen]
        return Candidates(logits, ids)


def weights(logits: Floats) -> Floats:
    """Whole numbers in proportion to the probabilities of each row.

    Sums of whole numbers are exact in float64. So neither the order of the candidates nor how many impossible
    ones lie between them, which the other rows of a batch decide, can move the edge of a nucleus or a draw.

    Args:
        logits: float32 [..., n], the largest of each row finite.

    Returns:
        float32 [..., n]. The largest of a row is 2**34; what is less than 2**-35 times as likely has none.
    """
    with np.errstate(over="ignore"):  # far below the largest becomes -inf, which is right
        shares: Floats = logits - logits.max(axis=-1, keepdims=True)
    np.exp(shares, out=shares)
    shares *= _HEAVIEST  # a power of two: exact
    return np.rint(shares, out=shares)


def draw(candidates: Candidates, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """One token a row by inverse transform.

    Args:
        candidates: What may be drawn, in proportion to the exponential of its logit.
        uniform: float64 [rows] in [0, 1).

    Returns:
        int64 [rows].
    """
    mass = weights(candidates.logits)
    rows, width = mass.shape
    # The running sum over blocks, then within one: no array of sums as wide as the vocabulary.
    starts = np.arange(0, width, _BLOCK)
    reached = np.add.reduceat(mass, starts, axis=1, dtype=np.float64).cumsum(axis=1)
    wanted = uniform * reached[:, -1]
    # Strictly above: a token without mass is never the first column to get there.
    blocks = (reached > wanted[:, None]).argmax(axis=1)
    columns = np.empty(rows, dtype=np.int64)
    for row, block in enumerate(blocks.tolist()):
        inside = mass[row, block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
        before = reached[row, block] - inside[-1]
        columns[row] = block * _BLOCK + int((inside > wanted[row] - before).argmax())
    if candidates.ids is not None:
        columns = candidates.ids[np.arange(rows), columns]
    return columns
