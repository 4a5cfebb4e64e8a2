"""The buffers of a package's states: their sizes, and how a call binds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort

from onnxlm import io_spec
from onnxlm.io_spec import StateSpec
from onnxlm.runtime.device_buffers import Device, placed


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


def empty_buffers(
    states: Sequence[StateSpec], rows: int, device: Device
) -> dict[str, ort.OrtValue]:
    """A buffer of no columns for each state, by graph input."""
    return {
        state.past: placed(np.zeros(_shape(state, rows, 0), dtype=state.dtype), device)
        for state in states
    }


def past_axis(state: StateSpec) -> int:
    """The axis of a state that grows."""
    return state.shape.index(io_spec.PAST)


def _shape(state: StateSpec, rows: int, columns: int) -> tuple[int, ...]:
    sizes = {io_spec.BATCH: rows, io_spec.PAST: columns}
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in state.shape)
