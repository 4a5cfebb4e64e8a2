"""Key and value caches of a batch: which columns hold tokens, and the buffers that hold the columns.

A graph handles its caches in one of two ways (`StateSpec.update`), and there is one class for each. Shapes:
B rows, P cached columns, S new columns of a call, T = P + S.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.io_spec import StateSpec
from onnxlm.runtime.cache_rows import reordered
from onnxlm.runtime.device_buffers import Device, on_host, placed, resized
from onnxlm.runtime.memory_budget import affordable

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

_STEP = 256


class KVCache(Protocol):
    """What a batch asks of its caches.

    A call goes: `fits` or `grow`, mask, `bind`, run, `commit`. Nothing counts as cached before `commit`, so a
    call that fails leaves what was.

    Between two decode steps the processor's caches hold weights, so there numpy is slow and is called little.

    Attributes:
        buffers: The next call's pasts, by graph input.
        partial: Whether a call may leave out the last rows.
        running: Rows that the next call runs, from the first on; B where `partial` is false.
    """

    buffers: dict[str, ort.OrtValue]
    partial: bool
    running: int

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

    def fits(self, columns: int) -> bool:
        """Whether a call with S columns uses the buffers that the last call used."""

    def grow(self, columns: int) -> None:
        """Make room for S columns.

        Raises:
            InputError: It would take more bytes than are allowed.
        """

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind pasts and presents, the presents behind the outputs that are bound already."""

    def commit(self, binding: ort.IOBinding) -> None:
        """Take note of a call that has run: the tokens of its mask, and the presents it put out."""

    def rewind(self, lengths: Ids) -> None:
        """Forget what each row has behind its first tokens, int64 [B]."""

    def reorder(self, rows: Ids) -> None:
        """Let row i go on from what row `rows[i]` holds, int64 [new B]; a row that stays is not copied.

        The next call runs all rows.
        """

    def fork(self) -> KVCache:
        """A cache that holds the same tokens; no later call on one shows in the other."""


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
        self.buffers = _empty(states, rows, device)

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
                self.buffers[state.past], _past_axis(state), used, self.capacity, self._device
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
        self.buffers = _empty(states, rows, device)

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
                    self.buffers[state.past], _past_axis(state), width, width, self._device
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
                self.buffers[state.past], _past_axis(state), width, width, self._device
            )
            for state in self._states
        }
        return other


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


def bind_rows(bind: Callable[..., None], name: str, buffer: ort.OrtValue, rows: int) -> None:
    """Bind the first rows of a buffer.

    Args:
        bind: `bind_ortvalue_input` or `bind_ortvalue_output` of a binding.
        name: The graph's input or output.
        buffer: Its first axis is rows; if not all are wanted, in the processor's memory.
        rows: How many.
    """
    if rows == buffer.shape()[0]:
        bind(name, buffer)
    else:  # a value over the front of the same memory
        bind(name, ort.OrtValue.ortvalue_from_numpy(buffer.numpy()[:rows]))


def bytes_at(states: Sequence[StateSpec], batch_size: int, columns: int) -> int:
    """Bytes that the states of `batch_size` rows need for `columns` columns."""
    return sum(
        int(np.prod(_shape(state, batch_size, columns))) * np.dtype(state.dtype).itemsize
        for state in states
    )


def _empty(states: Sequence[StateSpec], rows: int, device: Device) -> dict[str, ort.OrtValue]:
    return {
        state.past: placed(np.zeros(_shape(state, rows, 0), dtype=state.dtype), device)
        for state in states
    }


def _past_axis(state: StateSpec) -> int:
    """The axis of a state that grows."""
    return state.shape.index(io_spec.PAST)


def _shape(state: StateSpec, rows: int, columns: int) -> tuple[int, ...]:
    sizes = {io_spec.BATCH: rows, io_spec.PAST: columns}
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in state.shape)
