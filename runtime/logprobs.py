"""Log-probabilities of the model's own distribution, for whom wants to know what was chosen from what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


def log_softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Natural logarithms of the probabilities, float64 [..., vocab_size]."""
    below = logits.astype(np.float64)
    below -= below.max(axis=-1, keepdims=True)
    below -= np.log(np.exp(below).sum(axis=-1, keepdims=True))
    return below


def token_logprob(logprobs: NDArray[np.float64], token_id: int, count: int) -> TokenLogprob:
    """What is told of one chosen token.

    Args:
        logprobs: float64 [vocab_size].
        token_id: The token.
        count: How many of the likeliest are told of.
    """
    top = tuple((int(best), float(logprobs[best])) for best in largest(logprobs, count))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)


def largest(values: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """Where the largest of [n] are, largest first; of equal ones the first come first."""
    count = min(count, values.size)
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    least = np.partition(values, values.size - count)[values.size - count]
    above, level = np.flatnonzero(values > least), np.flatnonzero(values == least)
    chosen = np.concatenate((above, level[: count - above.size]))
    chosen.sort()
    order: NDArray[np.int64] = chosen[np.argsort(-values[chosen], kind="stable")]
    return order
