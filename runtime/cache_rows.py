"""Rows of a cache buffer: in another order, as beams go on from others; without their first columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.io_spec import StateSpec
from onnxlm.runtime.device_buffers import Device, on_host, taken


def reordered(
    buffer: ort.OrtValue,
    state: StateSpec,
    rows: NDArray[np.int64],
    used: int,
    device: Device,
) -> ort.OrtValue:
    """A buffer whose row i holds what row `rows[i]` held; the same buffer, changed, where that can be.

    Args:
        buffer: The state's buffer, B rows.
        state: Its description.
        rows: int64 [N], where each row comes from; a row may be wanted more than once, or not at all.
        used: Columns that hold anything; the rest of a new buffer is zero.
        device: Where the buffer is, and a new one will be.

    Returns:
        A buffer of N rows. With N = B in the processor's memory it is the one that was given, in which only
        rows that move were copied.
    """
    axis = state.shape.index(io_spec.BATCH)
    if axis == 0 and not on_host(device):
        return taken(buffer, rows, device)
    columns = [slice(None)] * len(state.shape)
    columns[state.column_axis] = slice(used)
    whole = buffer.numpy()
    held = np.moveaxis(whole[tuple(columns)], axis, 0)
    if rows.size == len(held) and on_host(device):
        _move(held, {to: source for to, source in enumerate(rows.tolist()) if to != source})
        return buffer
    shape = (*whole.shape[:axis], rows.size, *whole.shape[axis + 1 :])
    new = np.zeros(shape, dtype=whole.dtype)
    np.moveaxis(new[tuple(columns)], axis, 0)[:] = held[rows]
    return ort.OrtValue.ortvalue_from_numpy(new, *device.place)


def drop_first(
    buffer: ort.OrtValue,
    state: StateSpec,
    counts: Sequence[int],
    used: Sequence[int],
    device: Device,
) -> None:
    """Let what a row holds behind its first columns begin at the buffer's first; the buffer stays.

    Args:
        buffer: The state's buffer.
        state: Its description.
        counts: How many columns of each row go.
        used: How many of each row hold anything.
        device: Where the buffer is. From a device it comes over the processor's memory.
    """
    whole = buffer.numpy()
    rows = np.moveaxis(whole, (state.shape.index(io_spec.BATCH), state.column_axis), (0, 1))
    for row, (count, end) in enumerate(zip(counts, used, strict=True)):
        if count:
            rows[row, : end - count] = rows[row, count:end]
    if not on_host(device):
        buffer.update_inplace(whole)


def _move(held: NDArray[np.generic], sources: dict[int, int]) -> None:
    """Copy rows within an array, each from what its source held at first."""
    early = {row: held[row].copy() for row in sources.keys() & set(sources.values())}
    for to, source in sources.items():
        held[to] = early.get(source, held[source])
