"""The Mann-Whitney test: by hand, by every deal, and for many rounds."""

from __future__ import annotations

import time
from itertools import combinations

import numpy as np
import pytest

from onnxlm.runtime import bench_rank_test
from onnxlm.runtime.bench_rank_test import mann_whitney


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        # All of one below all of the other: the two extreme ways of so many.
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
        ([1, 2, 3, 4], [9, 8, 7, 6], 2 / 70),
        ([1, 2, 3], [4, 5, 6], 2 / 20),
        # Ranks 1, 2, 4 sum to 7, 3.5 from their mean: so do 7 and 14 less, 2 + 2 of 20 ways.
        ([1, 2, 4], [3, 5, 6], 4 / 20),
        ([1, 3], [2, 4], 4 / 6),
        ([7, 7, 7], [7, 7, 7], 1.0),
    ],
)
def test_the_test_by_hand(a: list[float], b: list[float], p: float) -> None:
    assert mann_whitney(a, b) == pytest.approx(p)
    assert mann_whitney(b, a) == pytest.approx(p)


def test_the_test_against_every_deal() -> None:
    random = np.random.default_rng(0)
    for sizes in ((3, 5), (4, 4), (5, 2)):
        pooled = random.integers(0, 6, sum(sizes)).astype(float)  # with ties
        ranks = np.array([(pooled < v).sum() + ((pooled == v).sum() + 1) / 2 for v in pooled])
        mean = sizes[0] * (sum(sizes) + 1) / 2
        sums = [ranks[list(deal)].sum() for deal in combinations(range(sum(sizes)), sizes[0])]
        far = abs(ranks[: sizes[0]].sum() - mean)
        expected = np.mean(np.abs(np.array(sums) - mean) >= far - 1e-9)
        found = mann_whitney(pooled[: sizes[0]].tolist(), pooled[sizes[0] :].tolist())
        assert found == pytest.approx(float(expected))


def test_the_approximation_is_near_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    for size, shift, decimals in (
        (30, 0.3, 9),
        (24, 0.6, 1),
        (30, 0.0, 0),
    ):  # with ties, few and many
        a = np.round(random.normal(size=size), decimals).tolist()
        b = np.round(random.normal(size=size + 2) + shift, decimals).tolist()
        exact = mann_whitney(a, b)
        with monkeypatch.context() as patch:
            patch.setattr(bench_rank_test, "_COUNTABLE", 0)
            assert mann_whitney(a, b) == pytest.approx(exact, abs=0.01)


def test_many_rounds_take_no_time() -> None:
    random = np.random.default_rng(2)
    a, b = random.normal(size=(2, 300)).tolist()
    start = time.perf_counter()
    p = mann_whitney(a, b)
    assert 0 < p <= 1
    assert mann_whitney(a, [value + 9 for value in b]) < 1e-20
    assert mann_whitney([1.0] * 300, [1.0] * 300) == 1.0
    # Of two sides of which one is long, the short one is counted.
    assert mann_whitney(a, [9.0, 9.5]) == pytest.approx(2 / (302 * 301 / 2))
    assert time.perf_counter() - start < 5
