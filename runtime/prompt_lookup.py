"""Guesses how a row goes on: as it did behind the last place where it said the same before.

A text that quotes, edits or repeats what was said (code, summaries, structured data) is guessed right for
many tokens on end, for the price of a dictionary (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Tokens that must have come in the same order before. One alone says little.
NGRAM = 2
# How far back a match is followed: longer ones do not tell more.
LONGEST_MATCH = 8


@dataclass(frozen=True)
class Draft:
    """A guess.

    Attributes:
        ids: The next tokens.
        match: How many tokens before them are the same as there, from `NGRAM` to `LONGEST_MATCH`.
    """

    ids: list[int]
    match: int


class RowDrafts:
    """The tokens of one row, and where each n-gram of them was seen last.

    Args:
        ids: What the row holds.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # behind an n-gram's latest occurrence
        self._found: int | None = None  # that of the last one before its present one
        for token_id in ids:
            self.append(token_id)

    def __len__(self) -> int:
        return len(self._ids)

    def copy(self) -> RowDrafts:
        """Another one that goes on from here."""
        other = RowDrafts(())
        other._ids, other._ends, other._found = list(self._ids), dict(self._ends), self._found
        return other

    def append(self, token_id: int) -> None:
        """Add a token."""
        self._ids.append(token_id)
        end = len(self._ids)
        if end < NGRAM:
            return
        key = tuple(self._ids[-NGRAM:])
        self._found = self._ends.get(key)
        self._ends[key] = end

    def draft(self, count: int) -> Draft | None:
        """At most `count` next tokens; None where the last n-gram has not come before."""
        start = self._found
        if start is None or count < 1:
            return None
        ids, end = self._ids, len(self._ids)
        match = NGRAM
        while match < min(LONGEST_MATCH, start) and ids[start - match - 1] == ids[end - match - 1]:
            match += 1
        # What overlaps with the end repeats itself: it goes on in its period.
        period = ids[start:end]
        return Draft([period[i % len(period)] for i in range(count)], match)
