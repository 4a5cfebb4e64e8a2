"""Random numbers that depend on a seed and a count alone: no state, so no company can change a draw."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import ArrayLike, NDArray


def fresh_seed() -> int:
    """A seed that nobody has used."""
    return secrets.randbits(64)


def uniforms(seeds: NDArray[np.uint64], steps: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1) that depend on a row's seed and step alone, whatever was drawn before.

    Args:
        seeds: uint64 [rows], or [rows, 1] for many steps.
        steps: Tokens each row has drawn so far: [rows], one number for all, or many [steps].

    Returns:
        float64 [rows] or [rows, steps], of 53 random bits.
    """
    seeds, counter = np.broadcast_arrays(seeds, np.asarray(steps, dtype=np.uint64))
    zero = np.zeros_like(counter)
    words = philox4x32((*_halves(counter), zero, zero), _halves(seeds))
    bits = (words[0] >> np.uint64(5) << np.uint64(26)) | (words[1] >> np.uint64(6))
    return bits.astype(np.float64) / 2.0**53


_Words = tuple[NDArray[np.uint64], ...]


def philox4x32(counter: _Words, key: _Words) -> _Words:
    """Philox-4x32-10 (Salmon et al. 2011), a counter-based generator: no state, any element by itself.

    Args:
        counter: Four uint64 arrays of 32-bit words, low word first.
        key: Two such arrays.

    Returns:
        Four such arrays.
    """
    low = np.uint64(0xFFFFFFFF)
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (second >> np.uint64(32)) ^ b ^ k, second & low
        c, d = (first >> np.uint64(32)) ^ d ^ m, first & low
        k, m = (k + np.uint64(0x9E3779B9)) & low, (m + np.uint64(0xBB67AE85)) & low
    return a, b, c, d


def _halves(words: NDArray[np.uint64]) -> _Words:
    return words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)
