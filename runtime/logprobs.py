"""Log-probabilities of the model's own distribution, for whom wants to know what was chosen from what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxlm.runtime.selection import largest


@dataclass(frozen=True)
class TokenLogprob:
    """One chosen token.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability, before temperature, penalties and filters.
        top: The likeliest tokens of that step and theirs, likeliest first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def log_normalizers(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """What is taken from the logits of each row to make them log-probabilities, float64 [rows]."""
    peaks = logits.max(axis=1)
    with np.errstate(over="ignore"):  # far below the largest becomes -inf, which is right
        below = logits - peaks[:, None]
    sums = np.exp(below, out=below).sum(axis=1, dtype=np.float64)
    normalizers: NDArray[np.float64] = peaks + np.log(sums)
    return normalizers


def token_logprob(
    logits: NDArray[np.float32], normalizer: float, token_id: int, count: int
) -> TokenLogprob:
    """What is told of one chosen token.

    Args:
        logits: float32 [vocab_size].
        normalizer: Of the same row.
        token_id: The token.
        count: How many of the likeliest are told of.
    """
    chosen, *top = (
        (int(i), float(logits[i]) - normalizer) for i in (token_id, *largest(logits, count))
    )
    return TokenLogprob(*chosen, tuple(top))
