"""What may be drawn: hand-written distributions, the brute-force rule, and transformers' warpers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.distributions import PROBABILITIES, kept, logits_of, probabilities_of

from onnxlm.runtime import selection, truncation
from onnxlm.runtime.candidates import Candidates
from onnxlm.runtime.sampling import DrawSettings, narrowed
from onnxlm.runtime.sampling_params import SamplingParams
from onnxlm.runtime.truncation import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    scale_temperature,
)


def left(logits: np.ndarray, **fields: Any) -> Candidates:
    """What every row may draw by these settings."""
    params = [SamplingParams(do_sample=True, **fields)] * len(logits)
    return narrowed(Candidates(logits), DrawSettings.of(params))


@pytest.mark.parametrize(
    ("fields", "support"),
    [
        ({}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 5, 3}),
        ({"top_k": 8}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"top_k": 1000}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"top_k": 7}, {0, 1, 2, 3, 4, 5, 6}),  # 2 and 7 tie: the lower id stays
        ({"top_p": 0.0}, {1}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.29}, {1}),
        ({"top_p": 0.31}, {1, 5}),
        ({"top_p": 0.74}, {1, 5, 3}),
        ({"top_p": 0.76}, {1, 5, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4, 5, 6, 7}),
        # 0.30 and 0.25 become 0.545 and 0.455: one is enough for a half, two are needed without.
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"top_p": 0.5}, {1, 5}),
        # Temperature comes first: halved, the shares of the squares are 0.432 and 0.300.
        ({"temperature": 0.5, "top_p": 0.42}, {1}),
        ({"temperature": 0.5, "top_p": 0.44}, {1, 5}),
        ({"min_p": 0.0}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"min_p": 0.19}, {1, 5, 3, 4, 6}),  # 0.057 and more
        ({"min_p": 0.5}, {1, 5, 3}),
        ({"min_p": 1.0}, {1}),
        # The squares are 0.09, 0.0625, 0.04, 0.01: of 0.09, 0.45 is 0.0405.
        ({"temperature": 0.5, "min_p": 0.45}, {1, 5}),
        # Surprises: 3.00 1.20 3.91 1.61 2.30 1.39 2.81 3.91; their mean, the entropy, is 1.74. Nearest
        # first: 3, 5, 1, 4, 6, 0, then 2 and 7.
        ({"typical_p": 1e-9}, {3}),
        ({"typical_p": 0.21}, {3, 5}),
        ({"typical_p": 0.44}, {3, 5}),
        ({"typical_p": 0.46}, {3, 5, 1}),
        ({"typical_p": 0.76}, {3, 5, 1, 4}),
        ({"typical_p": 0.97}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"typical_p": 1.0}, {0, 1, 2, 3, 4, 5, 6, 7}),
        # Of 0.30, 0.25 and 0.20 the shares are 0.40, 0.33, 0.27: min_p and typical_p see what top_k left.
        ({"top_k": 3, "typical_p": 0.3}, {5}),
        ({"top_k": 3, "typical_p": 0.5}, {5, 1}),
        ({"top_k": 3, "top_p": 0.7, "min_p": 0.9}, {1}),
    ],
)
def test_support_by_hand(fields: dict[str, Any], support: set[int]) -> None:
    candidates = left(logits_of(PROBABILITIES), **fields)
    assert kept(candidates) == [support]
    powered = PROBABILITIES ** (1 / fields.get("temperature", 1.0))
    expected = np.where([i in support for i in range(8)], powered, 0)
    np.testing.assert_allclose(
        probabilities_of(candidates, 8)[0], expected / expected.sum(), rtol=1e-5
    )


def test_equal_tokens_share_and_the_lower_ids_stay() -> None:
    even = logits_of(np.full(8, 1 / 8))
    assert kept(left(even, top_k=3)) == [{0, 1, 2}]
    assert kept(left(even, top_p=0.5)) == [{0, 1, 2, 3}]
    assert kept(left(even, top_k=2, top_p=0.5)) == [{0}]
    np.testing.assert_allclose(probabilities_of(left(even, top_k=4), 8)[0, :4], 0.25)


def test_every_row_has_a_setting_of_its_own() -> None:
    rows = np.repeat(logits_of(PROBABILITIES), 4, axis=0)
    everything = set(range(8))
    assert kept(keep_top_k(Candidates(rows), [0, 1, 3, 99])) == [
        everything,
        {1},
        {1, 5, 3},
        everything,
    ]
    assert kept(keep_top_p(Candidates(rows), [1.0, 0.0, 0.5, 0.76])) == [
        everything,
        {1},
        {1, 5},
        {1, 5, 3, 4},
    ]
    assert kept(keep_min_p(Candidates(rows), [0.0, 1.0, 0.5, 0.19])) == [
        everything,
        {1},
        {1, 5, 3},
        {1, 5, 3, 4, 6},
    ]
    assert kept(keep_typical(Candidates(rows), [1.0, 1e-9, 0.46, 0.76])) == [
        everything,
        {3},
        {3, 5, 1},
        {3, 5, 1, 4},
    ]
    table = probabilities_of(scale_temperature(Candidates(rows), [1.0, 0.5, 2.0, 1e30]), 8)
    for row, power in zip(table, (1.0, 2.0, 0.5, 0.0), strict=True):
        np.testing.assert_allclose(
            row, PROBABILITIES**power / (PROBABILITIES**power).sum(), rtol=1e-5
        )


def test_impossible_tokens_are_no_candidates() -> None:
    rows = logits_of([0, 0.5, 0, 0.3, 0.2, 0, 0, 0])
    for fields in ({"typical_p": 0.99}, {"min_p": 1e-9}, {"top_k": 6}, {"top_p": 0.999}):
        assert kept(left(rows, **fields)) == [{1, 3, 4}]


def test_rows_with_supports_of_different_size() -> None:
    rows = np.concatenate([logits_of(PROBABILITIES), logits_of(np.full(8, 1 / 8))])
    assert kept(left(rows, top_p=0.5)) == [{1, 5}, {0, 1, 2, 3}]
    assert kept(left(rows, top_p=0.1)) == [{1}, {0}]


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1.7e308])
def test_huge_temperature_is_uniform(temperature: float) -> None:
    """Above what float32 holds as well; what rules have banned stays banned."""
    logits = logits_of(PROBABILITIES)
    banned = np.where(np.arange(8) == 3, np.float32(-np.inf), logits)
    left = probabilities_of(scale_temperature(Candidates(banned), temperature), 8)
    np.testing.assert_allclose(left[0], np.where(np.arange(8) == 3, 0, 1 / 7), rtol=1e-6)
    table = probabilities_of(scale_temperature(Candidates(logits), temperature), 8)
    np.testing.assert_allclose(table[0], 1 / 8, rtol=1e-6)


def rows_of_logits(width: int) -> st.SearchStrategy[np.ndarray]:
    values = st.one_of(
        st.integers(-4, 4).map(float), st.floats(-8, 8, width=32), st.just(-math.inf)
    )
    return st.lists(values, min_size=width, max_size=width).map(
        lambda row: np.array([[*row, 0.0]], dtype=np.float32)
    )


@settings(max_examples=300, deadline=None)
@given(logits=rows_of_logits(40), k=st.integers(0, 60))
def test_top_k_is_the_first_k_of_a_stable_sort(logits: np.ndarray, k: int) -> None:
    order = sorted(range(logits.shape[1]), key=lambda i: (-logits[0, i], i))
    finite = set(np.flatnonzero(np.isfinite(logits[0])).tolist())
    assert kept(keep_top_k(Candidates(logits), k)) == [set(order[: k or None]) & finite]


@pytest.mark.parametrize("wide", [False, True])
@settings(max_examples=300, deadline=None)
@given(logits=rows_of_logits(40), p=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-9, 1.0])))
def test_top_p_is_the_shortest_head_of_a_stable_sort(
    wide: bool, logits: np.ndarray, p: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if wide:  # the way of wide rows, on rows small enough to sort by hand
            patch.setattr(truncation, "_SORTED_WIDTH", 3)
            patch.setattr(selection, "_SORTED", 3)
        got = kept(keep_top_p(Candidates(logits), p))[0]
    weights = [math.exp(float(x) - float(logits.max())) for x in logits[0]]
    order = sorted(range(len(weights)), key=lambda i: (-logits[0, i], i))
    total = sum(weights)
    assert got == set(order[: len(got)])
    assert sum(weights[i] for i in got) >= (p - 1e-6) * total
    if len(got) > 1 and p < 1:
        assert sum(weights[i] for i in order[: len(got) - 1]) <= (p + 1e-6) * total


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 5.0])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 0.999])
def test_top_p_of_a_wide_row(scale: float, p: float) -> None:
    """Flat to peaked, 20,000 wide: selection keeps what a float64 sort keeps."""
    logits = (np.random.default_rng(5).normal(size=(2, 20_000)) * scale).astype(np.float32)
    candidates = keep_top_p(Candidates(logits), p)
    for row, got in enumerate(kept(candidates)):
        weights = np.sort(np.exp(logits[row].astype(np.float64)))[::-1]
        shares = weights.cumsum() / weights.sum()
        expected = 1 + int(np.searchsorted(shares, p))
        assert abs(len(got) - min(expected, 20_000)) <= 1  # float32 weights at the very edge
        least = min(logits[row, sorted(got)])
        assert (logits[row] > least).sum() <= len(got)


@pytest.mark.parametrize("width", [63, 1000, 20_000])
@pytest.mark.parametrize("k", [1, 7, 50, 400])
def test_top_k_of_a_wide_row(width: int, k: int) -> None:
    values = np.random.default_rng(6).normal(size=(3, width)).astype(np.float32)
    values[1] = np.round(values[1])  # ties everywhere
    for row, got in enumerate(kept(keep_top_k(Candidates(values), k))):
        assert got == set(np.argsort(-values[row], kind="stable")[:k].tolist())


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 9, "top_p": 0.8},
        {"min_p": 0.05},
        {"typical_p": 0.6},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8},
    ],
)
@pytest.mark.parametrize("width", [50, 5000])
def test_same_distribution_as_transformers(fields: dict[str, Any], width: int) -> None:
    import torch
    from transformers import generation

    warpers = {
        "top_k": generation.TopKLogitsWarper,
        "top_p": generation.TopPLogitsWarper,
        "min_p": generation.MinPLogitsWarper,
        "typical_p": generation.TypicalLogitsWarper,
    }
    logits = (np.random.default_rng(7).normal(size=(6, width)) * 2).astype(np.float32)
    scores = generation.TemperatureLogitsWarper(0.7)(None, torch.from_numpy(logits))
    for name, value in fields.items():
        scores = warpers[name](value)(None, scores)
    expected = torch.softmax(scores.double(), dim=-1).numpy()
    got = probabilities_of(left(logits, temperature=0.7, **fields), width)
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("width", [300, 6000])
def test_what_a_row_may_draw_does_not_depend_on_its_neighbours(width: int) -> None:
    """Its candidates lie elsewhere, between impossible ones: every sum over them is exact."""
    logits = (np.random.default_rng(2).normal(size=(6, width)) * 2).astype(np.float32)
    params = [
        SamplingParams(do_sample=True, top_k=k, top_p=p, min_p=m, typical_p=t)
        for k, p, m, t in (
            (0, 0.9, 0, 1),
            (30, 0.7, 0, 0.9),
            (5, 1, 0.1, 1),
            (0, 1, 0, 0.5),
            (290, 0.99, 0.01, 0.95),
            (1, 1, 0, 1),
        )
    ]
    together = kept(narrowed(Candidates(logits), DrawSettings.of(params)))
    for row, one in enumerate(params):
        alone = kept(narrowed(Candidates(logits[row : row + 1]), DrawSettings.of([one])))
        assert alone == [together[row]]
