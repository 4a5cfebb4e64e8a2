"""A cache that each call returns anew, longer by its new columns. Shapes as in `kv_cache`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from onnxlm.io_spec import StateSpec
from onnxlm.runtime.arrays import Flags, Ids
from onnxlm.runtime.cache_rows import reordered
from onnxlm.runtime.device_buffers import Device, on_host, resized
from onnxlm.runtime.memory_budget import affordable
from onnxlm.runtime.state_buffers import (
    ROOM,
    bytes_at,
    empty_buffers,
    rewindable,
    tokens_kept,
    widest_window,
    window_columns,
)


class AppendCache:
    """Each call returns past and new columns, padding and all, in a new buffer; the mask tells them apart.

    States with a sliding window hold the last of the mask's columns.

    Args:
        states: The package's states.
        rows: B.
        device: Where the buffers are.
        budget: Most bytes that a call may put out; None for as much as the machine has.
    """

    partial = False
    evicted = None

    def __init__(
        self,
        states: Sequence[StateSpec],
        rows: int,
        device: Device,
        budget: int | None = None,
    ) -> None:
        self._states = states
        self._device = device
        self._budget = budget
        self.running = self.expected = rows
        self._window = widest_window(states)
        self._windowed = 0  # columns of states with a window
        self._mask: Ids = np.zeros((rows, 0), dtype=np.int64)
        self._next = self._mask
        self.buffers = empty_buffers(states, rows, device)

    @property
    def lengths(self) -> Ids:
        """int64 [B], tokens of each row in the cache."""
        lengths: Ids = self._mask.sum(axis=1)
        return lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        rows, columns = self._mask.shape
        return bytes_at(self._states, rows, columns, self._windowed)

    def run_first(self, rows: int) -> None:
        """All rows run: what one call puts out is the next one's past, of every row."""

    def longest(self, counts: Sequence[int]) -> int:
        """Tokens of the longest row with so many more; rows that get none do not matter."""
        new = np.array(counts)
        return int((self.lengths + new)[new > 0].max(initial=0))

    def room(self, rows: Flags) -> int:
        """No limit: positions are counted without the padding."""
        return sys.maxsize

    def chunk_mask(self, real: Flags) -> Ids:
        """The mask."""
        self._next = np.concatenate((self._mask, real), axis=1, dtype=np.int64)
        return self._next

    def step_mask(self, live: Sequence[int]) -> Ids:
        """The mask; a row that does not count gets padding."""
        return self.chunk_mask(np.array(live, dtype=np.bool_)[:, None])

    def evict(self, call: int) -> None:
        """Cut off columns that no row needs; one that ended long since needs those of its last tokens."""
        if self._window and self._windowed >= tokens_kept(self._window) + ROOM:
            kept = self._columns_needed()
            if self._windowed - kept >= ROOM:
                self._cut_windowed(self._windowed - kept, kept)

    def fits(self, columns: int, call: int) -> bool:
        """Never: the last call's presents are pasts now."""
        return False

    def grow(self, columns: int, call: int) -> None:
        """Nothing but a look at the bytes: the graph makes the room."""
        needed = self._mask.shape[1] + columns
        windowed = window_columns(self._window, self._windowed + columns, call)

        def size(count: int) -> int:
            return bytes_at(self._states, self.expected, count, windowed)

        affordable(size, needed, needed, self._budget, on_host=on_host(self._device))

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind the pasts; the presents are allocated by the run."""
        for state in self._states:
            binding.bind_ortvalue_input(state.past, self.buffers[state.past])
            binding.bind_output(state.present, *self._device.place)

    def commit(self, binding: ort.IOBinding) -> None:
        """Take the presents as the next pasts."""
        self._windowed += self._next.shape[1] - self._mask.shape[1]
        self._mask = self._next
        presents = binding.get_outputs()[-len(self._states) :]
        for state, present in zip(self._states, presents, strict=True):
            self.buffers[state.past] = present

    def rewind(self, lengths: Ids) -> Ids:
        """Mark what is forgotten as padding; columns that only end in padding are cut off."""
        before = self._mask.shape[1] - self._windowed
        lengths = rewindable(lengths, self._mask[:, :before].sum(axis=1), self._window)
        mask = self._mask * (self._mask.cumsum(axis=1) <= lengths[:, None])
        width = int(np.flatnonzero(mask.sum(axis=0)).max(initial=-1)) + 1
        if width < mask.shape[1]:
            self._windowed = max(0, width - before)
            for state in self._states:
                kept = self._windowed if state.window else width
                self._resize(state, kept)
        self._mask = mask[:, :width]
        return lengths

    def reorder(self, rows: Ids) -> None:
        """Copy rows that move, their padding too."""
        for state in self._states:
            self.buffers[state.past] = reordered(
                self.buffers[state.past], state, rows, self._used(state), self._device
            )
        self._mask = self._mask[rows]
        self.running = self.expected = rows.size

    def fork(self) -> AppendCache:
        """The same columns, padding too, in new buffers."""
        other = AppendCache(self._states, len(self._mask), self._device, self._budget)
        other._mask, other._windowed = self._mask, self._windowed
        other.buffers = dict(self.buffers)
        for state in self._states:
            other._resize(state, other._used(state))
        return other

    def _used(self, state: StateSpec) -> int:
        return self._windowed if state.window else self._mask.shape[1]

    def _resize(self, state: StateSpec, columns: int, skipped: int = 0) -> None:
        """A new buffer for a state, of some columns of the old one."""
        self.buffers[state.past] = resized(
            self.buffers[state.past], state.column_axis, columns, columns, self._device, skipped
        )

    def _cut_windowed(self, skipped: int, kept: int) -> None:
        self._windowed = kept
        for state in self._states:
            if state.window:
                self._resize(state, kept, skipped)

    def _columns_needed(self) -> int:
        """How many of the last columns hold the last tokens of each row that are to stay."""
        kept = np.minimum(self.lengths, tokens_kept(self._window))
        behind = self._mask[:, ::-1].cumsum(axis=1)  # tokens of the last 1, 2, .. columns
        needed = (behind < kept[:, None]).sum(axis=1) + 1
        return int(needed[kept > 0].max(initial=0))
