"""A cache whose past and present are one buffer. Shapes as in `kv_cache`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from onnxlm import io_spec
from onnxlm.io_spec import StateSpec
from onnxlm.runtime.arrays import Flags, Ids
from onnxlm.runtime.cache_rows import drop_first, reordered
from onnxlm.runtime.device_buffers import Device, on_host, placed, resized
from onnxlm.runtime.memory_budget import affordable
from onnxlm.runtime.state_buffers import (
    bind_rows,
    bytes_at,
    empty_buffers,
    rewindable,
    tokens_kept,
    widest_window,
    window_columns,
)

_STEP = 256


class InPlaceCache:
    """Past and present are one buffer, which grows in steps and never to the context limit up front.

    GroupQueryAttention counts a row's past tokens and puts the new ones behind them. So each row lies at the
    left of its buffer, padding takes no room, and of the mask only the sums matter. A decode step's mask is
    as wide as the buffers: no shape changes from step to step, and nothing is bound or planned anew.

    States with a sliding window have shorter buffers: where one is full, each row's oldest tokens are evicted
    and the others moved to its left. Graphs are told how many of each row are gone.

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
        self.running = self.expected = rows
        self._lengths = [0] * rows
        self._next = self._lengths
        self._step_mask: Ids | None = None
        self.capacity = 0
        self.buffers = empty_buffers(states, rows, device)
        self._window = widest_window(states)
        self._windowed = 0  # columns of states with a window
        self._gone = [0] * rows
        self._told: list[int] = []
        self._tell_of(rows)

    @property
    def lengths(self) -> Ids:
        """int64 [B], tokens of each row in the cache."""
        return np.array(self._lengths, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, room included."""
        return bytes_at(self._states, len(self._lengths), self.capacity, self._windowed)

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
        # Of a row without a new token at least one counts.
        self._tell(np.minimum(self._gone[: self.running], np.maximum(past - 1, 0)).tolist())
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
        self._tell(self._gone[: self.running])
        if self._step_mask is None:
            cached = np.arange(self.capacity) < np.array(lengths)[:, None]
            self._step_mask = cached.astype(np.int64)
        for row, length in enumerate(lengths):
            self._step_mask[row, length] = 1
        return self._step_mask

    def evict(self, call: int) -> None:
        """Keep each row's last tokens, where its columns and those of a call are more than are to be held."""
        if not self._window:
            return
        held, kept = self._held(), tokens_kept(self._window)
        most = window_columns(self._window, self._context_length, call)
        if max(held) + call <= most or most == self._context_length:
            return
        counts = [max(0, columns - kept) for columns in held]
        gone = [before + count for before, count in zip(self._gone, counts, strict=True)]
        lengths, empty = self._lengths, [0] * len(held)
        # Nothing counts as cached while it moves: an interrupt leaves nothing that is half right.
        self._lengths = self._gone = empty
        self._step_mask = None
        for state in self._states:
            if state.window:
                drop_first(self.buffers[state.past], state, counts, held, self._device)
        self._lengths, self._gone = lengths, gone

    def fits(self, columns: int, call: int) -> bool:
        """Whether the buffers have so many columns left, and those with a window room for the call."""
        if self._columns(columns) > self.capacity or self.expected > len(self._lengths):
            return False
        return not self._window or self._columns_of_windows(self.capacity, call) <= self._windowed

    def grow(self, columns: int, call: int) -> None:
        """New buffers of a multiple of 256 columns, at least half as many again as before.

        Those of states with a window have no more than are ever used.
        """
        needed = self._columns(columns)
        wanted = self.capacity
        if needed > wanted:
            wanted = max(needed, self.capacity * 3 // 2)
            wanted = min(-(-wanted // _STEP) * _STEP, self._context_length)

        def size(count: int) -> int:
            windowed = self._columns_of_windows(count, call)
            return bytes_at(self._states, self.expected, count, windowed)

        before = self.capacity, self._windowed
        capacity = affordable(
            size, needed, wanted, self._budget, held=self.nbytes, on_host=on_host(self._device)
        )
        after = capacity, self._columns_of_windows(capacity, call)
        self._step_mask = None
        for state in self._states:
            kind = int(state.window > 0)
            if before[kind] != after[kind]:
                self.buffers[state.past] = resized(
                    self.buffers[state.past],
                    state.column_axis,
                    self._used(state),
                    after[kind],
                    self._device,
                )
        self.capacity, self._windowed = after

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind each buffer as past and present, of the rows that run."""
        if self.evicted is not None:
            bind_rows(binding.bind_ortvalue_input, io_spec.EVICTED, self.evicted, self.running)
        for state in self._states:
            buffer = self.buffers[state.past]
            bind_rows(binding.bind_ortvalue_input, state.past, buffer, self.running)
            bind_rows(binding.bind_ortvalue_output, state.present, buffer, self.running)
            if state.twin:
                bind_rows(binding.bind_ortvalue_output, state.twin, buffer, self.running)

    def commit(self, binding: ort.IOBinding) -> None:
        """Count the new tokens; their columns are in place already."""
        self._lengths = self._next

    def rewind(self, lengths: Ids) -> Ids:
        """Count less; what lies behind is overwritten in time."""
        gone = np.array(self._gone, dtype=np.int64)
        lengths = rewindable(lengths, gone, self._window)
        self._gone = np.where(lengths == 0, 0, gone).tolist()
        self._lengths = lengths.tolist()
        self._step_mask = None
        return lengths

    def reorder(self, rows: Ids) -> None:
        """Copy rows that move, as far as any row reaches."""
        for state in self._states:
            self.buffers[state.past] = reordered(
                self.buffers[state.past], state, rows, self._used(state), self._device
            )
        lengths = [self._lengths[row] for row in rows]
        self._gone = [self._gone[row] for row in rows]
        if rows.size != len(self._lengths):
            self._tell_of(rows.size)
        if lengths != self._lengths:
            self._lengths = lengths
            self._step_mask = None
        self.run_first(rows.size)
        self.expected = rows.size

    def fork(self) -> InPlaceCache:
        """The columns that hold tokens, in new buffers."""
        rows = len(self._lengths)
        other = InPlaceCache(self._states, rows, self._context_length, self._device, self._budget)
        other._lengths, other._gone = list(self._lengths), list(self._gone)
        other.buffers = dict(self.buffers)
        other.grow(0, 0)
        return other

    def _held(self) -> list[int]:
        """Tokens of each row in states with a window, [B]."""
        return [length - gone for length, gone in zip(self._lengths, self._gone, strict=True)]

    def _used(self, state: StateSpec) -> int:
        """Columns of a state that hold anything."""
        return max(self._held() if state.window else self._lengths)

    def _columns_of_windows(self, capacity: int, call: int) -> int:
        """Columns of states with a window, where the others have `capacity`."""
        least = max(max(self._held()) + call, self._windowed)
        return min(capacity, max(least, window_columns(self._window, capacity, call)))

    def _tell_of(self, rows: int) -> None:
        """A new input of so many rows for what graphs are told."""
        self._told = [0] * rows
        self.evicted = None
        if self._window:
            self.evicted = placed(np.zeros((rows, 1), dtype=np.int64), self._device)

    def _tell(self, gone: list[int]) -> None:
        """Tell the graphs how many tokens of each running row are gone, [running]."""
        if self.evicted is None or self._told[: self.running] == gone:
            return
        self._told[: self.running] = gone
        self.evicted.update_inplace(np.array(self._told, dtype=np.int64)[:, None])

    def _columns(self, new: int) -> int:
        """Columns that a call with so many new ones needs."""
        return min(max(self._lengths) + new, self._context_length)
