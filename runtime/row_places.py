"""Where the rows of a batch lie in its cache: those that a call runs lie in front of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxlm.runtime.arrays import Ids

_Scalar = TypeVar("_Scalar", bound=np.generic)


class RowPlaces:
    """An order of the rows.

    A call binds the first rows of each buffer only, so a row that has ended costs nothing, and yet keeps what
    it holds.

    Args:
        rows: B.

    Attributes:
        rows: int64 [B], the row at each place.
        running: How many rows, from the first place on, the last call ran.
    """

    def __init__(self, rows: int) -> None:
        self.rows: Ids = np.arange(rows)
        self.running = rows
        self._in_order = True

    def arrange(self, live: Sequence[bool]) -> Ids | None:
        """Bring the rows marked in bool [B] to the front, with as few moves as can be.

        Returns:
            int64 [B], from which place each place gets its row; None when none moves.
        """
        self.running = sum(live)
        behind = [p for p in range(self.running, len(live)) if live[self.rows[p]]]
        if not behind:
            return None
        moves = np.arange(len(live))
        ended = [p for p in range(self.running) if not live[self.rows[p]]]
        moves[ended], moves[behind] = behind, ended
        self.rows = self.rows[moves]
        self._in_order = False
        return moves

    @property
    def places(self) -> Ids:
        """int64 [B], the place of each row."""
        return np.argsort(self.rows)

    def by_place(self, values: Sequence[int]) -> Sequence[int]:
        """What is listed by row [B], by place."""
        return values if self._in_order else [values[row] for row in self.rows.tolist()]

    def by_row(self, values: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """What lies by place [B, ...], by row; the same array where no row has moved."""
        if self._in_order:
            return values
        moved: NDArray[_Scalar] = values[self.places]
        return moved
