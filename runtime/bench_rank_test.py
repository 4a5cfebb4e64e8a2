"""Whether two samples differ: the Mann-Whitney test, which looks at ranks alone, whatever the outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxlm.runtime.arrays import Ids

# Ways of dealing the ranks that 64 bits can count: some 32 to each of two samples.
_COUNTABLE = 1 << 62


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of the Mann-Whitney test, ties by middle ranks (Mann and Whitney 1947, Lehmann 1975).

    Exact, by counting, up to some 32 values a side; the normal approximation, corrected for ties and
    continuity, is within a hundredth of that from there on, and takes no time.
    """
    if len(a) > len(b):
        return mann_whitney(b, a)  # the same, and fewer ways to count
    pooled = np.array([*a, *b])
    # Twice the middle ranks: whole numbers, ties or not.
    ordered = np.sort(pooled)
    ranks = np.searchsorted(ordered, pooled) + np.searchsorted(ordered, pooled, "right") + 1
    mean = len(a) * (len(pooled) + 1)
    far = abs(int(ranks[: len(a)].sum()) - mean)
    if math.comb(len(pooled), len(a)) < _COUNTABLE:
        return _exact(ranks, len(a), mean, far)
    return _normal(ranks, len(a), far)


def _exact(ranks: Ids, size: int, mean: int, far: int) -> float:
    """The share of all ways to deal the ranks in which the sum lies as far from its mean as it does here."""
    # ways[n, s]: subsets of n of the ranks so far that sum to s.
    most = int(np.sort(ranks)[len(ranks) - size :].sum())
    ways = np.zeros((size + 1, most + 1), dtype=np.int64)
    ways[0, 0] = 1
    for rank in ranks.tolist():
        ways[1:, rank:] += ways[:-1, : most + 1 - rank].copy()
    deals = ways[size]
    extreme = np.abs(np.arange(most + 1) - mean) >= far
    return int(deals[extreme].sum()) / int(deals.sum())


def _normal(ranks: Ids, size: int, far: int) -> float:
    """The tail of a normal distribution with the variance of the sum; a tie takes some of it away."""
    count = len(ranks)
    # Of a sum of `size` of these ranks, drawn without putting back.
    variance = size * (count - size) / (count - 1) * float(np.var(ranks)) if count > 1 else 0.0
    if not variance:
        return 1.0
    # Sums of doubled ranks lie two apart where there are no ties: half of that is the continuity.
    deviation = max(0.0, far - 1) / math.sqrt(variance)
    return math.erfc(deviation / math.sqrt(2))
