"""The largest of many numbers without sorting them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floating = NDArray[np.floating[Any]]

# Groups whose maxima bound the k-th largest value: one pass of maxima spares a partition of the vocabulary.
_GROUP = 64
# So few are sorted.
_SORTED = 2048


def top_columns(values: Floating, count: int) -> NDArray[np.int64]:
    """Where the largest of [n] are, int64 [count] in ascending order; of equal ones the first are taken."""
    count = min(count, values.size)
    groups = values.size // _GROUP
    if groups >= 2 * count > 0:
        peaks = values[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        # So many groups reach this peak: at least so many values do, and few more.
        floor = np.partition(peaks, groups - count)[groups - count]
        near = np.flatnonzero(values >= floor)
    else:
        near = np.arange(values.size)
    if count == 0:
        return near[:0]
    of_near = values[near]
    least = np.partition(of_near, near.size - count)[near.size - count]
    kept = of_near >= least
    surplus = int(np.count_nonzero(kept)) - count
    if surplus:
        kept[np.flatnonzero(of_near == least)[-surplus:]] = False
    columns: NDArray[np.int64] = near[kept]
    return columns


def largest(values: Floating, count: int) -> NDArray[np.int64]:
    """Where the largest of [n] are, largest first; of equal ones the first come first."""
    columns = top_columns(values, count)
    order: NDArray[np.int64] = columns[np.argsort(-values[columns], kind="stable")]
    return order


def least_keys_with_mass(keys: Floating, mass: Floating, needed: float) -> tuple[float, float]:
    """How far one must go, by ascending key, to gather some mass: quickselect, linear in n.

    Args:
        keys: [n], finite.
        mass: [n], whole numbers.
        needed: Above 0, at most the sum of all mass.

    Returns:
        The key of the last one that is needed, and the mass that those of this key must give.
    """
    while keys.size > _SORTED:
        pivot = np.median(keys[:: max(1, keys.size // 63)])
        below = keys < pivot
        gathered = float(mass.compress(below).sum(dtype=np.float64))
        if gathered >= needed:
            keys, mass = keys.compress(below), mass.compress(below)
            continue
        level = float(mass.compress(keys == pivot).sum(dtype=np.float64))
        if gathered + level >= needed:
            return float(pivot), needed - gathered
        above = keys > pivot
        keys, mass, needed = keys.compress(above), mass.compress(above), needed - gathered - level
    order = np.argsort(keys, kind="stable")
    reached = mass[order].cumsum(dtype=np.float64)
    last = min(int(np.searchsorted(reached, needed)), keys.size - 1)
    key = keys[order[last]]
    first = int(np.searchsorted(keys[order], key))
    return float(key), needed - (float(reached[first - 1]) if first else 0.0)
