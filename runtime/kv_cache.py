"""Key and value caches: buffers that grow in steps and that past and present share where the graph allows it.

Shapes: B rows, P cached columns, C columns of room (P <= C).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.io_spec import StateSpec

_STEP = 256


class KVCache:
    """All caches of one batch.

    Args:
        states: The package's states.
        batch_size: Rows, B.
        device: Device type and number of the buffers.
    """

    def __init__(
        self,
        states: Sequence[StateSpec],
        batch_size: int,
        device: tuple[str, int] = ("cpu", 0),
    ) -> None:
        self._states = tuple(states)
        self._batch = batch_size
        self._device = device
        self.in_place = all(state.update == "in_place" for state in states)
        self.capacity = 0
        self.buffers: dict[str, ort.OrtValue] = {}
        self._allocate(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers as allocated."""
        return bytes_at(self._states, self._batch, self.capacity)

    def reserve(self, columns: int, used: int) -> bool:
        """Make room for `columns` columns, of which the first `used` hold values.

        Room grows to the next multiple of 256 or by half, whichever is more, never to the context limit
        up front. A cache that appends needs no room: its graph returns grown buffers.

        Returns:
            Whether the buffers are new ones, so that bindings must be renewed.
        """
        if not self.in_place or columns <= self.capacity:
            return False
        wanted = max(-(-columns // _STEP) * _STEP, -(-self.capacity * 3 // 2 // _STEP) * _STEP)
        old = self.buffers
        self._allocate(wanted)
        if used:
            self._copy(old, used)
        return True

    def take_present(self, present: Sequence[ort.OrtValue]) -> None:
        """Adopt grown buffers, in the order of the states, as the next past."""
        for state, value in zip(self._states, present, strict=True):
            self.buffers[state.past] = value

    def keep_first(self, columns: int) -> None:
        """Cut appended buffers down to their first `columns` columns."""
        for state in self._states:
            axis = state.shape.index(io_spec.PAST)
            kept = (slice(None),) * axis + (slice(0, columns),)
            shorter = np.ascontiguousarray(self.buffers[state.past].numpy()[kept])
            self.buffers[state.past] = ort.OrtValue.ortvalue_from_numpy(shorter, *self._device)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self.buffers = {}
        for state in self._states:
            shape = _shape(state, self._batch, capacity)
            # Zeros, not empty memory: a kernel that multiplies an unused tail by 0 must not meet a NaN.
            self.buffers[state.past] = ort.OrtValue.ortvalue_from_numpy(
                np.zeros(shape, dtype=state.dtype), *self._device
            )

    def _copy(self, old: Mapping[str, ort.OrtValue], used: int) -> None:
        for state in self._states:
            axis = state.shape.index(io_spec.PAST)
            kept = (slice(None),) * axis + (slice(0, used),)
            source = old[state.past].numpy()[kept]
            target = self.buffers[state.past]
            if self._device[0] == "cpu":
                target.numpy()[kept] = source
            else:
                whole: NDArray[np.generic] = np.zeros(target.shape(), dtype=state.dtype)
                whole[kept] = source
                target.update_inplace(whole)


def _shape(state: StateSpec, batch_size: int, columns: int) -> tuple[int, ...]:
    sizes = {io_spec.BATCH: batch_size, io_spec.PAST: columns}
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in state.shape)


def bytes_at(states: Sequence[StateSpec], batch_size: int, columns: int) -> int:
    """Bytes that the states of `batch_size` rows need for `columns` columns."""
    return sum(
        int(np.prod(_shape(state, batch_size, columns))) * np.dtype(state.dtype).itemsize
        for state in states
    )
