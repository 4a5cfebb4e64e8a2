"""Distributions whose probabilities are known, and what a draw from candidates would follow."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxlm.runtime.candidates import Candidates

# Eight tokens whose probabilities are known; ids out of order on purpose.
PROBABILITIES = np.array([0.05, 0.30, 0.02, 0.20, 0.10, 0.25, 0.06, 0.02])


def logits_of(probabilities: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.atleast_2d(np.asarray(probabilities, dtype=np.float64))).astype(np.float32)


def probabilities_of(candidates: Candidates, width: int) -> np.ndarray:
    """float64 [rows, width]: what a draw would follow, by token."""
    exponentials = np.exp(candidates.logits.astype(np.float64))
    table = np.zeros((len(exponentials), width))
    ids = candidates.ids
    if ids is None:
        ids = np.broadcast_to(np.arange(width), exponentials.shape)
    for row, columns in enumerate(ids):
        np.add.at(table[row], columns, exponentials[row])
    return table / table.sum(axis=1, keepdims=True)


def kept(candidates: Candidates) -> list[set[int]]:
    """The tokens that each row may draw."""
    width = candidates.logits.shape[1] if candidates.ids is None else int(candidates.ids.max()) + 1
    return [set(np.flatnonzero(row).tolist()) for row in probabilities_of(candidates, width)]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The statistic of counts against what was expected of them."""
    return float(((counts - expected) ** 2 / expected).sum())
