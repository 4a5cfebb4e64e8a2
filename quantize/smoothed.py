"""Applies smoothing to the weights of a graph, wherever an input's scale can be folded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxlm.quantize.calibration import Statistics
from onnxlm.quantize.smoothing import (
    channel_max,
    divide_norm,
    divide_rows,
    group_max,
    multiply_columns,
    smoothing_scale,
    spread_to_heads,
)
from onnxlm.quantize.structure import LinearInput, WeightRows

Floats = NDArray[np.float32]


def smooth(
    inputs: Sequence[LinearInput],
    weight: Callable[[str], Floats],
    seen: Mapping[str, Statistics],
    alpha: float,
) -> dict[str, Floats]:
    """Move activation outliers into the weights.

    Args:
        inputs: Linear inputs; those without an origin are left alone.
        weight: Current value of an initializer.
        seen: Statistics by input name; those of smoothed inputs are rescaled to what will now be seen.
        alpha: Strength, see `smoothing_scale`.

    Returns:
        The changed initializers by name.
    """
    changed: dict[str, Floats] = {}

    def current(name: str) -> Floats:
        return changed[name] if name in changed else weight(name)

    for item in inputs:
        if item.origin is None or item.name not in seen:
            continue
        readers = [linear.name for linear in item.linears]
        widest = channel_max([current(name) for name in readers])
        active = seen[item.name].abs_max
        origin = item.origin
        heads = origin.heads if isinstance(origin, WeightRows) else None
        if heads is not None:
            count, groups, width = heads
            made = smoothing_scale(
                group_max(active, groups, width), group_max(widest, groups, width), alpha
            )
            read = spread_to_heads(made, count, width)
        else:
            made = read = smoothing_scale(active, widest, alpha)
        for name in readers:
            changed[name] = multiply_columns(current(name), read)
        if isinstance(origin, WeightRows):
            rows = current(origin.name).copy()
            rows[origin.start : origin.end] = divide_rows(rows[origin.start : origin.end], made)
            changed[origin.name] = rows
        else:
            changed[origin.name] = divide_norm(current(origin.name), made)
        seen[item.name].rescale(1.0 / read)
    return changed
