"""Selection against sorting."""

from __future__ import annotations

import numpy as np
import pytest

from onnxlm.runtime import selection
from onnxlm.runtime.selection import largest, least_keys_with_mass, top_columns


def values(width: int, seed: int = 1) -> np.ndarray:
    """Numbers with many ties, and one that is no candidate."""
    numbers = np.round(np.random.default_rng(seed).normal(size=width) * 3, 1)
    numbers[7] = -np.inf
    return numbers


@pytest.mark.parametrize("width", [50, 700, 20_000])
@pytest.mark.parametrize("count", [0, 1, 5, 40, 60])
def test_the_largest_are_the_first_of_a_stable_sort(width: int, count: int) -> None:
    numbers = values(width)
    order = sorted(range(width), key=lambda i: (-numbers[i], i))
    assert largest(numbers, count).tolist() == order[:count]
    assert top_columns(numbers, count).tolist() == sorted(order[:count])


@pytest.mark.parametrize("few", [2, 2048])
@pytest.mark.parametrize("width", [1, 40, 5000])
@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("digits", [0, 1, 6])
def test_the_least_keys_with_some_mass(
    monkeypatch: pytest.MonkeyPatch, few: int, width: int, share: float, digits: int
) -> None:
    monkeypatch.setattr(selection, "_SORTED", few)
    generator = np.random.default_rng(width + digits)
    keys = np.round(generator.normal(size=width), digits)
    mass = generator.integers(1, 1000, width).astype(np.float32)
    needed = max(1.0, share * float(mass.sum(dtype=np.float64)))
    key, missing = least_keys_with_mass(keys, mass, needed)
    before = float(mass[keys < key].sum(dtype=np.float64))
    through = float(mass[keys <= key].sum(dtype=np.float64))
    assert before < needed <= through
    assert missing == pytest.approx(needed - before)
