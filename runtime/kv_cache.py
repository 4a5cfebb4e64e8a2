"""Key and value caches of a batch: which columns hold tokens, and the buffers that hold the columns.

A graph handles its caches in one of two ways (`StateSpec.update`), and there is one class for each. Shapes:
B rows, P cached columns, S new columns of a call, T = P + S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import onnxruntime as ort

from onnxlm.io_spec import StateSpec
from onnxlm.runtime.append_cache import AppendCache
from onnxlm.runtime.arrays import Flags, Ids
from onnxlm.runtime.device_buffers import Device
from onnxlm.runtime.in_place_cache import InPlaceCache


class KVCache(Protocol):
    """What a batch asks of its caches.

    A call goes: `evict`, `fits` or `grow`, mask, `bind`, run, `commit`. Nothing counts as cached before
    `commit`, so a call that fails leaves what was.

    Between two decode steps the processor's caches hold weights, so there numpy is slow and is called little.

    Attributes:
        buffers: The next call's pasts, by graph input.
        partial: Whether a call may leave out the last rows.
        running: Rows that the next call runs, from the first on; B where `partial` is false.
        expected: Rows that `reorder` will make of these; room must be there for so many.
        evicted: What the next call's `io_spec.EVICTED` is; None where graphs have no such input.
    """

    buffers: dict[str, ort.OrtValue]
    evicted: ort.OrtValue | None
    partial: bool
    running: int
    expected: int

    @property
    def lengths(self) -> Ids:
        """int64 [B], tokens of each row in the cache."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""

    def run_first(self, rows: int) -> None:
        """Have the next calls run so many rows, where `partial` allows it."""

    def longest(self, counts: Sequence[int]) -> int:
        """Tokens of the longest row with so many more; rows that get none do not matter."""

    def room(self, rows: Flags) -> int:
        """Columns that one call may add to those of the running rows that are marked in bool [running]."""

    def chunk_mask(self, real: Flags) -> Ids:
        """int64 [running, T] for a prefill call whose new tokens are marked in bool [running, S]."""

    def step_mask(self, live: Sequence[int]) -> Ids:
        """int64 [running, T] for a decode step that counts for the rows marked with 1, not those with 0.

        It may be the last step's array, changed.
        """

    def evict(self, call: int) -> None:
        """Have layers with a sliding window forget tokens, if a call of so many columns needs their room.

        No token that a later one sees goes, and a few more stay, see `rewind`.
        """

    def fits(self, columns: int, call: int) -> bool:
        """Whether S columns, so many of them in a call, use the buffers that the last call used."""

    def grow(self, columns: int, call: int) -> None:
        """Make room for S columns, so many of them in a call.

        Raises:
            InputError: It would take more bytes than are allowed.
        """

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind pasts and presents, the presents behind the outputs that are bound already."""

    def commit(self, binding: ort.IOBinding) -> None:
        """Take note of a call that has run: the tokens of its mask, and the presents it put out."""

    def rewind(self, lengths: Ids) -> Ids:
        """Forget what each row has behind its first tokens, int64 [B].

        Returns:
            int64 [B], how many each row still has: those, or none where a sliding window has lost tokens that
            the next one would see.
        """

    def reorder(self, rows: Ids) -> None:
        """Let row i go on from what row `rows[i]` holds, int64 [new B]; a row that stays is not copied.

        The next call runs all rows.
        """

    def fork(self) -> KVCache:
        """A cache that holds the same tokens; no later call on one shows in the other."""


def new_cache(
    states: Sequence[StateSpec],
    rows: int,
    context_length: int,
    device: Device,
    budget: int | None = None,
) -> KVCache:
    """An empty cache of `rows` rows, of the kind that the states ask for."""
    if all(state.update == "in_place" for state in states):
        return InPlaceCache(states, rows, context_length, device, budget)
    return AppendCache(states, rows, device, budget)
