"""Statistics gathered in groups are those gathered at once, and no more of them are held than allowed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from onnxlm.quantize.calibrating import Observer
from onnxlm.quantize.observed import Observed

WIDTHS = {"a": 8, "b": 4, "c": 8, "d": 16, "e": 2}
BYTES = {name: 4 * width**2 for name, width in WIDTHS.items()}
RNG = np.random.default_rng(3)
SEEN = {
    name: [RNG.standard_normal((5, width)).astype(np.float32) for _ in range(3)]
    for name, width in WIDTHS.items()
}


def run(names: Sequence[str], observer: Observer) -> None:
    for window in range(3):
        for name in names:
            observer(name, SEEN[name][window])


def by_hand(name: str, factor: np.ndarray) -> np.ndarray:
    total = np.zeros((WIDTHS[name], WIDTHS[name]))
    for x in np.concatenate(SEEN[name]).astype(np.float64):
        total += np.outer(x * factor, x * factor) * x.size / (x @ x)
    return total


@pytest.mark.parametrize("budget", [0, BYTES["a"] + BYTES["b"], 10**6])
def test_any_budget_gives_the_same(budget: int) -> None:
    held = 0
    observed = Observed(run, WIDTHS, moments=True, budget=budget)
    factors = {name: RNG.uniform(0.1, 10, width) for name, width in WIDTHS.items()}
    for name, factor in factors.items():
        observed.ranges[name].rescale(factor.astype(np.float32))
    for name, factor in factors.items():
        statistics = observed.take(name)
        assert statistics is not None
        assert statistics.hessian is not None
        expected = by_hand(name, factor)
        assert np.abs(statistics.hessian - expected).max() <= 1e-5 * np.abs(expected).max()
        largest = np.abs(np.concatenate(SEEN[name])).max(axis=0) * factor
        np.testing.assert_allclose(statistics.abs_max, largest, rtol=1e-5)
        waiting = [s.hessian for s in observed.ranges.values() if s.hessian is not None]
        held = max(held, statistics.hessian.nbytes + sum(moments.nbytes for moments in waiting))
    assert held <= max(budget, *BYTES.values())


def test_without_moments_the_text_runs_once() -> None:
    runs = []
    observed = Observed(lambda names, observer: runs.append(list(names)), WIDTHS, moments=False)
    statistics = observed.take("a")
    assert statistics is not None
    assert statistics.hessian is None
    assert observed.take("a") is None
    assert runs == [list(WIDTHS)]
