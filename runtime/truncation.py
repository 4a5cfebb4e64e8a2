"""Rules that leave fewer candidates: pure functions over rows, none of which sees its neighbours.

Each takes one setting for all rows or one a row. Of equal tokens the lower columns are kept, as arg-max has
it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxlm.runtime.candidates import Candidates, Floats, weights

# The least number that float32 divides by without losing precision.
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
# Groups whose maxima bound the k-th largest value: one pass of maxima spares a partition of the vocabulary.
_GROUP = 64
# Above this width a nucleus is found by selection, below it by sorting all rows at once.
_SORTED_WIDTH = 2048


def scale_temperature(candidates: Candidates, temperature: ArrayLike) -> Candidates:
    """Divide the logits by a temperature above 0, as differences to the largest, which cannot overflow."""
    least = np.maximum(np.asarray(temperature, dtype=np.float64), _LEAST_TEMPERATURE)
    with np.errstate(over="ignore"):  # far below the largest becomes -inf, which is right
        logits = candidates.logits - candidates.logits.max(axis=1, keepdims=True)
        logits /= np.broadcast_to(least, len(logits)).astype(np.float32)[:, None]
    return Candidates(logits, candidates.ids)


def keep_top_k(candidates: Candidates, k: ArrayLike) -> Candidates:
    """The k largest logits of each row; 0 keeps all."""
    logits = candidates.logits
    rows, width = logits.shape
    wanted = np.broadcast_to(np.asarray(k, dtype=np.int64), rows)
    narrowed = (wanted > 0) & (wanted < width)
    if not narrowed.any():
        return candidates
    least = np.full(rows, -np.inf, dtype=np.float32)
    for count in np.unique(wanted[narrowed]):
        alike = np.flatnonzero(narrowed & (wanted == count))
        least[alike] = _kth_largest(logits if alike.size == rows else logits[alike], int(count))
    kept = logits >= least[:, None]
    counts = np.count_nonzero(kept, axis=1)
    for row in np.flatnonzero(narrowed & (counts > wanted)):
        ties = np.flatnonzero(logits[row] == least[row])
        kept[row, ties[ties.size - (counts[row] - wanted[row]) :]] = False
    return candidates.keep(kept)


def keep_top_p(candidates: Candidates, p: ArrayLike) -> Candidates:
    """The fewest tokens, largest first, whose share of the row's mass is at least p; one at the least.

    1 keeps all.
    """
    logits = candidates.logits
    shares = np.broadcast_to(np.asarray(p, dtype=np.float64), len(logits))
    narrowed = np.flatnonzero(shares < 1.0)
    if not narrowed.size:
        return candidates
    if narrowed.size < len(logits):
        kept = np.ones(logits.shape, dtype=np.bool_)
        kept[narrowed] = _nuclei(logits[narrowed], shares[narrowed])
    else:
        kept = _nuclei(logits, shares)
    return candidates.keep(kept)


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
    total = weight.sum()
    # -log p is log(total) - log(weight); the mean of log(weight) is all that differs from token to token.
    # A running sum: it does not depend on what impossible tokens lie between.
    expected = (weight * below).cumsum()[-1] / total
    distance = np.abs(below - expected)
    order = np.argsort(distance, kind="stable")
    reached = weight[order].cumsum() < share * total
    last = min(int(np.count_nonzero(reached)), order.size - 1)
    kept = np.zeros(logits.shape, dtype=np.bool_)
    kept[possible[distance <= distance[order[last]]]] = True
    return kept


def _kth_largest(logits: Floats, k: int) -> Floats:
    """float32 [rows]: the k-th largest value of each row."""
    rows, width = logits.shape
    groups = width // _GROUP
    if groups < 2 * k:
        kth: Floats = np.partition(logits, width - k, axis=1)[:, width - k]
        return kth
    peaks = logits[:, : groups * _GROUP].reshape(rows, _GROUP, groups).max(axis=1)
    # k groups reach the k-th largest peak, so at least k values do, and few more.
    floors = np.partition(peaks, groups - k, axis=1)[:, groups - k]
    few = [row[np.flatnonzero(row >= floor)] for row, floor in zip(logits, floors, strict=True)]
    return np.array([np.partition(v, v.size - k)[v.size - k] for v in few], dtype=np.float32)


def _nuclei(logits: Floats, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The nucleus of each row, bool [rows, n]."""
    if logits.shape[1] <= _SORTED_WIDTH:
        return _nuclei_by_sorting(logits, shares)
    return np.stack([_nucleus_by_selection(*row) for row in zip(logits, shares, strict=True)])


def _nuclei_by_sorting(logits: Floats, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
    order = np.argsort(-logits, axis=1, kind="stable")
    mass = np.take_along_axis(weights(logits), order, axis=1).cumsum(axis=1)
    needed = np.ones_like(order, dtype=np.bool_)
    needed[:, 1:] = mass[:, :-1] < shares[:, None] * mass[:, -1:]
    kept = np.empty_like(needed)
    np.put_along_axis(kept, order, needed, axis=1)
    return kept


def _nucleus_by_selection(logits: Floats, share: float) -> NDArray[np.bool_]:
    """The nucleus of one row, bool [n], by quickselect on mass: linear in n, however flat the row."""
    weight = weights(logits)
    total = float(weight.sum())
    # All tokens below this weight together have less than 1 - p: the nucleus is above it.
    floor = 0.5 * (1.0 - share) * total / weight.size
    rest = weight.compress(weight >= floor)
    # Mass that the tokens not decided yet must still give; above 0, so that one is kept.
    missing = max(share * total, 1.0)
    while rest.size > _SORTED_WIDTH:
        pivot = np.median(rest[:: max(1, rest.size // 63)])
        heavy, light = rest.compress(rest > pivot), rest.compress(rest < pivot)
        heavy_mass = float(heavy.sum())
        equal = rest.size - heavy.size - light.size
        equal_mass = equal * float(pivot)
        if heavy_mass >= missing:
            rest = heavy
        elif heavy_mass + equal_mass >= missing or not light.size:
            rest, missing = np.full(equal, pivot), missing - heavy_mass
            break
        else:
            rest, missing = light, missing - heavy_mass - equal_mass
    rest = np.sort(rest)[::-1]
    last = min(int(np.searchsorted(rest.cumsum(), missing)), rest.size - 1)
    kept: NDArray[np.bool_] = weight > rest[last]
    ties = np.flatnonzero(weight == rest[last])
    ties = ties[np.argsort(-logits[ties], kind="stable")]  # near ties that weights do not tell
    kept[ties[: np.count_nonzero(rest[: last + 1] == rest[last])]] = True
    return kept
