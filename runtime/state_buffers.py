"""The buffers of a package's states: their sizes, and how a call binds them.

States of layers with a sliding window keep a row's last tokens only. What a query does not see is not evicted
token by token: columns fill up, then all that are not needed go at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort

from onnxlm.io_spec import StateSpec
from onnxlm.runtime.arrays import Ids
from onnxlm.runtime.device_buffers import Device, placed

# Tokens before a window's first one that an eviction leaves, so that a row can be rewound by as many.
_REWINDABLE = 64
# Columns that fill before the next eviction; a call with more of them has as many as it needs.
ROOM = 256


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


def widest_window(states: Sequence[StateSpec]) -> int:
    """The window that all states with one are kept for; 0 where there is none."""
    return max((state.window for state in states), default=0)


def tokens_kept(window: int) -> int:
    """Tokens of a row that an eviction leaves."""
    return window - 1 + _REWINDABLE


def rewindable(lengths: Ids, evicted: Ids, window: int) -> Ids:
    """To how many tokens rows go back that are to be rewound to so many, int64 [B].

    Args:
        lengths: Tokens that are to stay, int64 [B].
        evicted: First tokens of each row that windows have lost, int64 [B].
        window: See `widest_window`.

    Returns:
        As asked for; 0 where the next token's window has lost a token.
    """
    found: Ids = np.where((evicted == 0) | (lengths - evicted >= window - 1), lengths, 0)
    return found


def window_columns(window: int, columns: int, call: int = 0) -> int:
    """Columns of a state with a window.

    Args:
        window: See `widest_window`.
        columns: Those of states without.
        call: New columns of a call.
    """
    return min(columns, tokens_kept(window) + max(call, ROOM))


def bytes_at(
    states: Sequence[StateSpec], batch_size: int, columns: int, windowed: int | None = None
) -> int:
    """Bytes that the states of `batch_size` rows take.

    Args:
        states: The states.
        batch_size: B.
        columns: Columns of those without a window.
        windowed: Columns of those with one; at most as many as are kept when None.
    """
    if windowed is None:
        windowed = window_columns(widest_window(states), columns)
    return sum(
        math.prod(state.sized(batch_size, windowed if state.window else columns))
        * np.dtype(state.dtype).itemsize
        for state in states
    )


def empty_buffers(
    states: Sequence[StateSpec], rows: int, device: Device
) -> dict[str, ort.OrtValue]:
    """A buffer of no columns for each state, by graph input."""
    return {
        state.past: placed(np.zeros(state.sized(rows, 0), dtype=state.dtype), device)
        for state in states
    }
