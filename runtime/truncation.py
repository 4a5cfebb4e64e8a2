"""Rules that leave fewer candidates: pure functions over rows, none of which sees its neighbours.

Each takes one setting for all rows or one a row. Of equal tokens the lower columns are kept, as arg-max has
it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxlm.runtime.arrays import Floats
from onnxlm.runtime.candidates import Candidates, weights
from onnxlm.runtime.selection import least_keys_with_mass, top_columns

# The least number that float32 divides by without losing precision, and the largest that it holds.
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
_MOST_TEMPERATURE = float(np.finfo(np.float32).max)
# Above this width a nucleus is found by selection, below it by sorting.
_SORTED_WIDTH = 2048


def scale_temperature(candidates: Candidates, temperature: ArrayLike) -> Candidates:
    """Divide the logits by a temperature above 0, as differences to the largest, which cannot overflow."""
    held = np.asarray(temperature, dtype=np.float64).clip(_LEAST_TEMPERATURE, _MOST_TEMPERATURE)
    with np.errstate(over="ignore"):  # far below the largest becomes -inf, which is right
        logits = candidates.logits - candidates.logits.max(axis=1, keepdims=True)
        logits /= np.broadcast_to(held, len(logits)).astype(np.float32)[:, None]
    return Candidates(logits, candidates.ids)


def keep_top_k(candidates: Candidates, k: ArrayLike) -> Candidates:
    """The k largest logits of each row; 0 keeps all."""
    rows, width = candidates.logits.shape
    wanted = [count or width for count in np.broadcast_to(np.asarray(k), rows).tolist()]
    if min(wanted) >= width:
        return candidates
    pairs = zip(candidates.logits, wanted, strict=True)
    return candidates.take([top_columns(row, count) for row, count in pairs])


def keep_top_p(candidates: Candidates, p: ArrayLike) -> Candidates:
    """The fewest tokens, largest first, whose share of the row's mass is at least p; one at the least.

    1 keeps all.
    """
    logits = candidates.logits
    shares = np.broadcast_to(np.asarray(p, dtype=np.float64), len(logits)).tolist()
    if min(shares) >= 1.0:
        return candidates
    return candidates.take(
        [_nucleus(row, share) for row, share in zip(logits, shares, strict=True)]
    )


def keep_min_p(candidates: Candidates, min_p: ArrayLike) -> Candidates:
    """Tokens at least `min_p` times as likely as the row's likeliest (Nguyen et al. 2024); 0 keeps all."""
    least = np.broadcast_to(np.asarray(min_p, dtype=np.float64), len(candidates.logits))
    if not least.any():
        return candidates
    with np.errstate(divide="ignore"):
        distance = np.log(least).astype(np.float32)
    floor = candidates.logits.max(axis=1) + distance
    return candidates.keep(candidates.logits >= floor[:, None])


def keep_typical(candidates: Candidates, mass: ArrayLike) -> Candidates:
    """The tokens whose surprise is nearest to the expected one, the fewest with this share of the mass.

    Locally typical sampling (Meister et al. 2022): a token's surprise is -log p, the expected one the
    entropy. Tokens as near as the last one kept are kept too. 1 keeps all.
    """
    logits = candidates.logits
    shares = np.broadcast_to(np.asarray(mass, dtype=np.float64), len(logits))
    narrowed = np.flatnonzero(shares < 1.0)
    if not narrowed.size:
        return candidates
    kept = np.ones(logits.shape, dtype=np.bool_)
    kept[narrowed] = [_typical(logits[row], shares[row]) for row in narrowed]
    return candidates.keep(kept)


def _typical(logits: Floats, share: float) -> NDArray[np.bool_]:
    """The typical set of one row, bool [n]."""
    weight = weights(logits)
    possible = np.flatnonzero(weight)
    weight = weight[possible]
    below = logits[possible].astype(np.float64) - float(logits.max())
    total = float(weight.sum(dtype=np.float64))
    # -log p differs from token to token by the logits alone, so they are what the mean is taken of.
    # A running sum: it does not depend on what impossible tokens lie between.
    expected = (weight * below).cumsum()[-1] / total
    distance = np.abs(below - expected)
    last, _ = least_keys_with_mass(distance, weight, max(share * total, 1.0))
    kept = np.zeros(logits.shape, dtype=np.bool_)
    kept[possible[distance <= last]] = True
    return kept


def _nucleus(logits: Floats, share: float) -> NDArray[np.int64]:
    """The columns of one row's nucleus, ascending."""
    if share >= 1.0:
        return np.arange(logits.size)
    if logits.size > _SORTED_WIDTH:
        return _nucleus_by_selection(logits, share)
    order = np.argsort(-logits, kind="stable")
    mass = weights(logits)[order].cumsum(dtype=np.float64)
    count = 1 + np.count_nonzero(mass[:-1] < share * mass[-1])
    return np.sort(order[:count])


def _nucleus_by_selection(logits: Floats, share: float) -> NDArray[np.int64]:
    """The columns of one row's nucleus, ascending, however flat the row is."""
    weight = weights(logits)
    total = float(weight.sum(dtype=np.float64))
    # All tokens below this weight together have less than 1 - p: the nucleus is above it.
    heavy = weight >= 0.5 * (1.0 - share) * total / weight.size
    keys = -logits.compress(heavy)
    # Above 0, so that one is kept.
    last, missing = least_keys_with_mass(keys, weight.compress(heavy), max(share * total, 1.0))
    kept: NDArray[np.bool_] = logits > -last
    level = np.flatnonzero(logits == -last)
    kept[level[: math.ceil(missing / float(weight[level[0]]))]] = True
    return np.flatnonzero(kept)
