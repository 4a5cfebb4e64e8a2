"""A long text cut into rows that fit a model's context, so that each token is predicted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxlm.errors import InputError


@dataclass(frozen=True)
class Window:
    """One row.

    Attributes:
        ids: Token ids; the last is only predicted.
        first: Position whose prediction is the first that counts; those before it count in an earlier row.
    """

    ids: list[int]
    first: int

    @property
    def scored(self) -> int:
        """Predictions that count."""
        return len(self.ids) - 1 - self.first


def strided_windows(
    ids: Sequence[int], before: Sequence[int], window: int, stride: int
) -> list[Window]:
    """Rows that begin `stride` tokens of the text apart.

    Each token is predicted in one row (the first only if `before` holds something), from all that the row
    holds before it: behind the first row that is more than `window - stride` tokens, `before` counted.

    Args:
        ids: Tokens of the text.
        before: What every row begins with, such as BOS.
        window: Most tokens that a row runs, `before` counted.
        stride: Tokens that each row adds to what the rows before it predict.

    Raises:
        InputError: There are fewer than two tokens, a row holds none of the text, or the stride is out of
            its bounds.
    """
    if len(ids) < 2:
        raise InputError(
            "the evaluation text is too short", found=f"{len(ids)} tokens", allowed="2 or more"
        )
    size = window - len(before)
    if size < 1:
        raise InputError("the window", found=window, allowed=f"{len(before) + 1} or more")
    if not 1 <= stride <= size:
        raise InputError("the stride", found=stride, allowed=f"1 to {size}")
    rows = []
    predicted = 0 if before else 1  # tokens of the text that need no prediction any more
    for start in range(0, len(ids) - 1, stride):
        end = min(start + size + 1, len(ids))
        rows.append(Window([*before, *ids[start:end]], len(before) + predicted - 1 - start))
        predicted = end
        if end == len(ids):
            break
    return rows
