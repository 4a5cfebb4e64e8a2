"""Statistics of every linear input, the large ones gathered for as many inputs at a time as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onnxlm.quantize.calibrating import Observer
from onnxlm.quantize.calibration import Statistics

# Second moments held at once. Those of a model of 1.1 billion weights are 3.9 GB together: as much as itself.
MOMENTS_BUDGET = 1_000_000_000

# Runs the calibration text and hands the named values to an observer.
Run = Callable[[Sequence[str], Observer], None]


class Observed:
    """What linear layers read.

    The text is run once for the ranges, and once more for every further group of inputs whose second moments
    fit into the budget.

    Args:
        run: Runs the calibration text.
        widths: K of every input, in the order in which `take` will ask for them.
        moments: Whether second moments are wanted.
        budget: Bytes of second moments held at once; one input's are held whatever they need.
    """

    def __init__(
        self,
        run: Run,
        widths: Mapping[str, int],
        moments: bool,
        budget: int = MOMENTS_BUDGET,
    ) -> None:
        self._run = run
        self._budget = budget
        self._waiting = list(widths) if moments else []
        self.ranges = {name: Statistics.empty(width) for name, width in widths.items()}
        if widths:
            self._observe(list(widths), self._next_group(), ranges=True)

    def take(self, name: str) -> Statistics | None:
        """The statistics of one input, which are then forgotten; None where it was not observed."""
        if name in self._waiting:
            group = self._next_group()
            self._observe(group, group, ranges=False)
        return self.ranges.pop(name, None)

    def _next_group(self) -> list[str]:
        room, count = self._budget, 0
        for name in self._waiting:
            room -= self.ranges[name].abs_max.size ** 2 * np.dtype(np.float32).itemsize
            if room < 0 and count:
                break
            count += 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group

    def _observe(self, names: Sequence[str], with_moments: Sequence[str], ranges: bool) -> None:
        wanted = set(with_moments)

        def observer(name: str, values: np.ndarray) -> None:
            if ranges:
                self.ranges[name].add_range(values)
            if name in wanted:
                self.ranges[name].add_moments(values)

        self._run(names, observer)
