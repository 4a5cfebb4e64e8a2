"""The tokens that a row holds, as rules ask for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from onnxlm.runtime.arrays import Ids


class RowHistory:
    """Prompt and new tokens of one row; no padding, nothing of other rows.

    Args:
        prompt: Every token before the first new one, those of earlier calls too.

    Attributes:
        prompt_length: Tokens of the prompt.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt_length = self._length = len(prompt)
        self._ids: Ids = np.array(prompt, dtype=np.int64)
        self._counts = Counter(self._ids.tolist())

    @property
    def ids(self) -> Ids:
        """int64 [length], a view."""
        return self._ids[: self._length]

    @property
    def new_tokens(self) -> int:
        """Tokens behind the prompt."""
        return self._length - self.prompt_length

    def counts(self) -> tuple[Ids, Ids]:
        """The different tokens, int64 [n], and how often each is held, int64 [n]."""
        size = len(self._counts)
        return (
            np.fromiter(self._counts.keys(), dtype=np.int64, count=size),
            np.fromiter(self._counts.values(), dtype=np.int64, count=size),
        )

    def append(self, token_id: int) -> None:
        """Add a new token."""
        if self._length == self._ids.size:
            self._ids = np.resize(self._ids, max(64, 2 * self._length))
        self._ids[self._length] = token_id
        self._length += 1
        self._counts[token_id] += 1

    def extended(self, token_id: int) -> RowHistory:
        """Another history with one token more."""
        other = RowHistory(())
        other.prompt_length, other._length = self.prompt_length, self._length
        other._ids = self._ids.copy()
        other._counts = self._counts.copy()
        other.append(token_id)
        return other
