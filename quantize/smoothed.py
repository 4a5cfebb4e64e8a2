"""Smoothing of a whole graph: factors on its parameters' rows and columns that leave its function alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxlm.quantize.calibration import Statistics
from onnxlm.quantize.smoothing import (
    channel_max,
    divide_rows,
    group_max,
    multiply_columns,
    smoothing_scale,
    spread_to_heads,
)
from onnxlm.quantize.structure import LinearInput, Rows

Floats = NDArray[np.float32]


class Smoothing:
    """What parameters are multiplied by; they are kept as vectors, so that no second model is held."""

    def __init__(self) -> None:
        self._columns: dict[str, Floats] = {}
        self._rows: dict[str, Floats] = {}

    @property
    def changed(self) -> set[str]:
        """Names of the parameters that are not what they were."""
        return self._columns.keys() | self._rows.keys()

    def apply(self, name: str, values: Floats) -> Floats:
        """The parameter `name` as it is now.

        Args:
            name: A parameter.
            values: As it was, [N, K] or [N].
        """
        if name in self._columns:
            values = multiply_columns(values, self._columns[name])
        return divide_rows(values, self._rows[name]) if name in self._rows else values

    def multiply_columns(self, name: str, scale: Floats) -> None:
        """Multiply the columns of a parameter [N, K] by `scale` [K]."""
        self._columns[name] = self._columns.get(name, np.float32(1)) * scale

    def divide_rows(self, rows: Rows, count: int, scale: Floats) -> None:
        """Divide some of a parameter's `count` rows by `scale`."""
        every = self._rows.setdefault(rows.name, np.ones(count, np.float32))
        every[rows.start : rows.end] *= scale


def smooth(
    inputs: Sequence[LinearInput],
    parameter: Callable[[str], Floats],
    seen: Mapping[str, Statistics],
    alpha: float,
) -> Smoothing:
    """Move activation outliers into the weights.

    Args:
        inputs: Linear inputs; those without an origin are left alone.
        parameter: The values of a parameter, [N, K] or [N].
        seen: Statistics by input name; those of smoothed inputs are rescaled to what will now be seen.
        alpha: Strength, see `smoothing_scale`.
    """
    made = Smoothing()
    for item in inputs:
        if item.origin is None or item.name not in seen:
            continue
        readers = [linear.name for linear in item.linears]
        widest = np.max(
            [channel_max([made.apply(name, parameter(name))]) for name in readers], axis=0
        )
        divisor, factor = _scales(item.origin.heads, seen[item.name].abs_max, widest, alpha)
        for name in readers:
            made.multiply_columns(name, factor)
        for rows in item.origin.rows:
            made.divide_rows(rows, len(parameter(rows.name)), divisor)
        seen[item.name].rescale(1.0 / factor)
    return made


def _scales(
    heads: tuple[int, int, int] | None, active: Floats, widest: Floats, alpha: float
) -> tuple[Floats, Floats]:
    """What the rows that make an input are divided by, and its readers' columns multiplied by."""
    if heads is None:
        scale = smoothing_scale(active, widest, alpha)
        return scale, scale
    count, groups, width = heads
    shared = [group_max(values, groups, width) for values in (active, widest)]
    scale = smoothing_scale(shared[0], shared[1], alpha)
    return scale, spread_to_heads(scale, count, width)
