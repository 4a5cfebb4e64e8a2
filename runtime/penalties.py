"""Rules that make tokens likelier or less likely: pure functions over logits and what rows hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxlm.runtime.arrays import Ids

Logits = NDArray[np.floating[Any]]
Bias = tuple[tuple[int, ...], float]


def penalize_repetition(logits: Logits, held: Sequence[Ids], penalty: Sequence[float]) -> Logits:
    """Make tokens that a row holds less likely: positive logits are divided, negative ones multiplied.

    Keskar et al. 2019 (CTRL), as transformers does it.

    Args:
        logits: float [rows, vocab_size].
        held: The different tokens of each row, int64 [n].
        penalty: Of each row; 1 changes nothing, less than 1 makes the tokens likelier.

    Returns:
        float [rows, vocab_size], new.
    """
    changed = logits.copy()
    for row, (ids, factor) in enumerate(zip(held, penalty, strict=True)):
        if factor != 1.0:
            old = logits[row, ids]
            changed[row, ids] = np.where(old < 0, old * factor, old / factor)
    return changed


def penalize_counts(
    logits: Logits,
    held: Sequence[tuple[Ids, Ids]],
    presence: Sequence[float],
    frequency: Sequence[float],
) -> Logits:
    """Take from the logits of tokens that a row holds: once, and for every time that it holds them.

    Args:
        logits: float [rows, vocab_size].
        held: The different tokens of each row, int64 [n], and how often it holds each, int64 [n].
        presence: Taken once, of each row.
        frequency: Taken every time, of each row.

    Returns:
        float [rows, vocab_size], new.
    """
    changed = logits.copy()
    for row, (ids, counts) in enumerate(held):
        if presence[row] or frequency[row]:
            taken = presence[row] + frequency[row] * counts
            changed[row, ids] = logits[row, ids] - taken.astype(logits.dtype)
    return changed


def add_biases(logits: Logits, rows: Sequence[Ids], biases: Sequence[Sequence[Bias]]) -> Logits:
    """Add a bias to the last token of each sequence whose other tokens are the last ones of the row.

    Args:
        logits: float [rows, vocab_size].
        rows: All tokens of each row, int64 [length].
        biases: Pairs (token ids, bias) of each row.

    Returns:
        float [rows, vocab_size], new.
    """
    changed = logits.copy()
    for row, (held, pairs) in enumerate(zip(rows, biases, strict=True)):
        for ids, bias in pairs:
            if ends_with(held, ids[:-1]):
                changed[row, ids[-1]] += bias
    return changed


def ends_with(held: Ids, ids: Sequence[int]) -> bool:
    """Whether the last tokens of a row are these."""
    return len(ids) <= held.size and held[held.size - len(ids) :].tolist() == list(ids)
