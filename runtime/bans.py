"""Tokens that may not come next: which ones, by rule, and how their logits lose all chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxlm.runtime.arrays import Ids
from onnxlm.runtime.penalties import Logits, ends_with


def ban(logits: Logits, banned: Sequence[Sequence[int] | Ids]) -> Logits:
    """Give tokens no chance.

    Args:
        logits: float [rows, vocab_size].
        banned: Token ids of each row.

    Returns:
        float [rows, vocab_size], new, with -inf for what is banned.
    """
    changed = logits.copy()
    for row, ids in enumerate(banned):
        changed[row, np.asarray(ids, dtype=np.int64)] = -np.inf
    return changed


def repeated_ngrams(held: Ids, size: int) -> Ids:
    """The tokens that would complete a sequence of `size` tokens that a row already holds.

    Args:
        held: All tokens of the row, int64 [length].
        size: 1 or more; with 1 no token comes twice.

    Returns:
        int64 [n].
    """
    if held.size < size:
        return held[:0]
    windows = np.lib.stride_tricks.sliding_window_view(held, size)
    alike = (windows[:, :-1] == held[held.size - size + 1 :]).all(axis=1)
    last: Ids = windows[alike, -1]
    return last


def completed(held: Ids, sequences: Sequence[Sequence[int]]) -> list[int]:
    """The last token of each sequence whose other tokens are the last ones of the row."""
    return [ids[-1] for ids in sequences if ends_with(held, ids[:-1])]
