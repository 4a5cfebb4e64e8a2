"""A cache that each call returns anew, longer by its new columns. Shapes as in `kv_cache`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from onnxlm.io_spec import StateSpec
from onnxlm.runtime.arrays import Flags, Ids
from onnxlm.runtime.cache_rows import reordered
from onnxlm.runtime.device_buffers import Device, resized
from onnxlm.runtime.memory_budget import affordable
from onnxlm.runtime.state_buffers import bytes_at, empty_buffers, past_axis


class AppendCache:
    """Each call returns past and new columns, padding and all, in a new buffer; the mask tells them apart.

    Args:
        states: The package's states.
        rows: B.
        device: Where the buffers are.
        budget: Most bytes that a call may put out; None for as much as the machine has.
    """

    partial = False

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
        self.running = rows
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
        return bytes_at(self._states, *self._mask.shape)

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

    def fits(self, columns: int) -> bool:
        """Never: the last call's presents are pasts now."""
        return False

    def grow(self, columns: int) -> None:
        """Nothing but a look at the bytes: the graph makes the room."""
        rows, held = self._mask.shape
        needed = held + columns
        affordable(lambda count: bytes_at(self._states, rows, count), needed, needed, self._budget)

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind the pasts; the presents are allocated by the run."""
        for state in self._states:
            binding.bind_ortvalue_input(state.past, self.buffers[state.past])
            binding.bind_output(state.present, *self._device)

    def commit(self, binding: ort.IOBinding) -> None:
        """Take the presents as the next pasts."""
        self._mask = self._next
        presents = binding.get_outputs()[-len(self._states) :]
        for state, present in zip(self._states, presents, strict=True):
            self.buffers[state.past] = present

    def rewind(self, lengths: Ids) -> None:
        """Mark what is forgotten as padding; columns that only end in padding are cut off."""
        mask = self._mask * (self._mask.cumsum(axis=1) <= lengths[:, None])
        width = int(np.flatnonzero(mask.sum(axis=0)).max(initial=-1)) + 1
        if width < mask.shape[1]:
            for state in self._states:
                self.buffers[state.past] = resized(
                    self.buffers[state.past], past_axis(state), width, width, self._device
                )
        self._mask = mask[:, :width]

    def reorder(self, rows: Ids) -> None:
        """Copy rows that move, their padding too."""
        for state in self._states:
            self.buffers[state.past] = reordered(
                self.buffers[state.past], state, rows, self._mask.shape[1], self._device
            )
        self._mask = self._mask[rows]
        self.running = rows.size

    def fork(self) -> AppendCache:
        """The same columns, padding too, in new buffers."""
        other = AppendCache(self._states, len(self._mask), self._device, self._budget)
        other._mask = self._mask
        width = self._mask.shape[1]
        other.buffers = {
            state.past: resized(
                self.buffers[state.past], past_axis(state), width, width, self._device
            )
            for state in self._states
        }
        return other
