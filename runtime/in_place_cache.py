"""A cache whose past and present are one buffer. Shapes as in `kv_cache`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from onnxlm import io_spec
from onnxlm.io_spec import StateSpec
from onnxlm.runtime.arrays import Flags, Ids
from onnxlm.runtime.cache_rows import reordered
from onnxlm.runtime.device_buffers import Device, on_host, resized
from onnxlm.runtime.memory_budget import affordable
from onnxlm.runtime.state_buffers import bind_rows, bytes_at, empty_buffers, past_axis

_STEP = 256


class InPlaceCache:
    """Past and present are one buffer, which grows in steps and never to the context limit up front.

    GroupQueryAttention counts a row's past tokens and puts the new ones behind them. So each row lies at the
    left of its buffer, padding takes no room, and of the mask only the sums matter. A decode step's mask is
    as wide as the buffers: no shape changes from step to step, and nothing is bound or planned anew.

    Args:
        states: The package's states.
        rows: B.
        context_length: Most positions of a row.
        device: Where the buffers are.
        budget: Most bytes they may take; None for as much as the machine has.
    """

    def __init__(
        self,
        states: Sequence[StateSpec],
        rows: int,
        context_length: int,
        device: Device,
        budget: int | None = None,
    ) -> None:
        self._states = states
        self._context_length = context_length
        self._device = device
        self._budget = budget
        # Rows are moved by the processor, in its own memory.
        self.partial = on_host(device) and all(s.shape[0] == io_spec.BATCH for s in states)
        self.running = rows
        self._lengths = [0] * rows
        self._next = self._lengths
        self._step_mask: Ids | None = None
        self.capacity = 0
        self.buffers = empty_buffers(states, rows, device)

    @property
    def lengths(self) -> Ids:
        """int64 [B], tokens of each row in the cache."""
        return np.array(self._lengths, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, room included."""
        return bytes_at(self._states, len(self._lengths), self.capacity)

    def run_first(self, rows: int) -> None:
        """Bind the front of each buffer: rows lie one behind the other."""
        if rows != self.running:
            self.running = rows
            self._step_mask = None

    def longest(self, counts: Sequence[int]) -> int:
        """Tokens of the longest row with so many more; rows that get none do not matter."""
        pairs = zip(self._lengths, counts, strict=True)
        return max((length + count for length, count in pairs if count), default=0)

    def room(self, rows: Flags) -> int:
        """Columns up to the context limit: the kernel's rotary table ends there."""
        return self._context_length - int(self.lengths[: self.running][rows].max())

    def chunk_mask(self, real: Flags) -> Ids:
        """The mask; of a row without a new token, as much as is needed: nothing is written there."""
        lengths, counts = self.lengths[: self.running], real.sum(axis=1)
        self._next = (lengths + counts).tolist() + self._lengths[self.running :]
        self._step_mask = None
        past = np.minimum(lengths, lengths[counts > 0].max())
        cached = np.arange(past.max()) < past[:, None]
        return np.concatenate((cached, real), axis=1, dtype=np.int64)

    def step_mask(self, live: Sequence[int]) -> Ids:
        """The mask; a decode step writes one column in every row.

        In a row that does not count it is the free one behind the row's end. Where none is free the row gives
        up its last.
        """
        most, behind = self._context_length - 1, self._lengths[self.running :]
        lengths = [min(length, most) for length in self._lengths[: self.running]]
        self._lengths = lengths + behind
        self._next = [length + new for length, new in zip(lengths, live, strict=True)] + behind
        if self._step_mask is None:
            cached = np.arange(self.capacity) < np.array(lengths)[:, None]
            self._step_mask = cached.astype(np.int64)
        for row, length in enumerate(lengths):
            self._step_mask[row, length] = 1
        return self._step_mask

    def fits(self, columns: int) -> bool:
        """Whether the buffers have so many columns left."""
        return self._columns(columns) <= self.capacity

    def grow(self, columns: int) -> None:
        """New buffers of a multiple of 256 columns, at least half as many again as before."""
        needed = self._columns(columns)
        wanted = max(needed, self.capacity * 3 // 2)
        wanted = min(-(-wanted // _STEP) * _STEP, self._context_length)
        rows = len(self._lengths)
        self.capacity = affordable(
            lambda count: bytes_at(self._states, rows, count),
            needed,
            wanted,
            self._budget,
            held=self.nbytes,
        )
        self._step_mask = None
        used = max(self._lengths)
        for state in self._states:
            self.buffers[state.past] = resized(
                self.buffers[state.past], past_axis(state), used, self.capacity, self._device
            )

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind each buffer as past and present, of the rows that run."""
        for state in self._states:
            buffer = self.buffers[state.past]
            bind_rows(binding.bind_ortvalue_input, state.past, buffer, self.running)
            bind_rows(binding.bind_ortvalue_output, state.present, buffer, self.running)
            if state.twin:
                bind_rows(binding.bind_ortvalue_output, state.twin, buffer, self.running)

    def commit(self, binding: ort.IOBinding) -> None:
        """Count the new tokens; their columns are in place already."""
        self._lengths = self._next

    def rewind(self, lengths: Ids) -> None:
        """Count less; what lies behind is overwritten in time."""
        self._lengths = lengths.tolist()
        self._step_mask = None

    def reorder(self, rows: Ids) -> None:
        """Copy rows that move, as far as any row reaches."""
        used = max(self._lengths)
        for state in self._states:
            self.buffers[state.past] = reordered(
                self.buffers[state.past], state, rows, used, self._device
            )
        lengths = [self._lengths[row] for row in rows]
        if lengths != self._lengths:
            self._lengths = lengths
            self._step_mask = None
        self.run_first(rows.size)

    def fork(self) -> InPlaceCache:
        """The columns that hold tokens, in new buffers."""
        rows = len(self._lengths)
        other = InPlaceCache(self._states, rows, self._context_length, self._device, self._budget)
        other._lengths = list(self._lengths)
        other.buffers = dict(self.buffers)
        other.grow(0)
        return other

    def _columns(self, new: int) -> int:
        """Columns that a call with so many new ones needs."""
        return min(max(self._lengths) + new, self._context_length)
