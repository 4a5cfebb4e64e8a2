"""The tokens that may still be drawn, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Weights are whole numbers up to this one. The sum over a vocabulary of 2**19 tokens fits float64's 53 bits.
_HEAVIEST = 2.0**34


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
        width = kept.shape[1]
        rows, columns = np.divmod(np.flatnonzero(kept), width)
        counts = np.bincount(rows, minlength=len(kept))
        widest = int(counts.max(initial=0))
        if widest > width // 4:  # moving them costs more than it spares
            return Candidates(np.where(kept, self.logits, np.float32(-np.inf)), self.ids)
        places = np.arange(columns.size) - np.repeat(counts.cumsum() - counts, counts)
        logits = np.full((len(kept), widest), -np.inf, dtype=np.float32)
        ids = np.zeros((len(kept), widest), dtype=np.int64)
        logits[rows, places] = self.logits[rows, columns]
        ids[rows, places] = columns if self.ids is None else self.ids[rows, columns]
        return Candidates(logits, ids)


def weights(logits: Floats) -> NDArray[np.float64]:
    """Whole numbers in proportion to the probabilities of each row.

    Sums of whole numbers are exact. So neither the order of the candidates nor how many impossible ones lie
    between them, which the other rows of a batch decide, can move the edge of a nucleus or a draw.

    Args:
        logits: float32 [..., n], the largest of each row finite.

    Returns:
        float64 [..., n]. The largest of a row is 2**34; what is less than 2**-35 times as likely has none.
    """
    with np.errstate(over="ignore"):  # far below the largest becomes -inf, which is right
        shares: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scaled = shares.astype(np.float64)
    scaled *= _HEAVIEST
    return np.rint(scaled, out=scaled)


def draw(candidates: Candidates, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """One token a row by inverse transform.

    Args:
        candidates: What may be drawn, in proportion to the exponential of its logit.
        uniform: float64 [rows] in [0, 1).

    Returns:
        int64 [rows].
    """
    mass = weights(candidates.logits).cumsum(axis=1)
    # Strictly above: a token without mass is never the first column to get there.
    columns = (mass > (uniform * mass[:, -1])[:, None]).argmax(axis=1)
    if candidates.ids is not None:
        columns = candidates.ids[np.arange(columns.size), columns]
    return np.asarray(columns, dtype=np.int64)
