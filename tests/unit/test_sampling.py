"""Sampling against hand-written distributions, the brute-force rule, transformers' warpers and chi-square."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxlm.errors import InputError
from onnxlm.runtime import sampling
from onnxlm.runtime.sampling import (
    Candidates,
    draw,
    filters,
    keep_top_k,
    keep_top_p,
    philox4x32,
    row_seeds,
    sample,
    scale_temperature,
    uniforms,
)
from onnxlm.runtime.sampling_params import SamplingParams

# Eight tokens whose probabilities are known; ids out of order on purpose.
PROBABILITIES = np.array([0.05, 0.30, 0.02, 0.20, 0.10, 0.25, 0.06, 0.02])


def logits_of(probabilities: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.atleast_2d(np.asarray(probabilities, dtype=np.float64))).astype(np.float32)


def probabilities_of(candidates: Candidates, width: int) -> np.ndarray:
    """float64 [rows, width]: what a draw would follow, by token."""
    exponentials = np.exp(candidates.logits.astype(np.float64))
    table = np.zeros((len(exponentials), width))
    ids = candidates.ids
    if ids is None:
        ids = np.broadcast_to(np.arange(width), exponentials.shape)
    for row, columns in enumerate(ids):
        np.add.at(table[row], columns, exponentials[row])
    return table / table.sum(axis=1, keepdims=True)


def kept(candidates: Candidates) -> list[set[int]]:
    """The tokens that each row may draw."""
    width = candidates.logits.shape[1] if candidates.ids is None else int(candidates.ids.max()) + 1
    return [set(np.flatnonzero(row).tolist()) for row in probabilities_of(candidates, width)]


def narrowed(logits: np.ndarray, **fields: Any) -> Candidates:
    candidates = Candidates(logits)
    for apply in filters(SamplingParams(do_sample=True, **fields)):
        candidates = apply(candidates)
    return candidates


# Support and mass, by hand


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
    ],
)
def test_support_by_hand(fields: dict[str, Any], support: set[int]) -> None:
    candidates = narrowed(logits_of(PROBABILITIES), **fields)
    assert kept(candidates) == [support]
    powered = PROBABILITIES ** (1 / fields.get("temperature", 1.0))
    expected = np.where([i in support for i in range(8)], powered, 0)
    np.testing.assert_allclose(
        probabilities_of(candidates, 8)[0], expected / expected.sum(), rtol=1e-5
    )


def test_equal_tokens_share_and_the_lower_ids_stay() -> None:
    even = logits_of(np.full(8, 1 / 8))
    assert kept(narrowed(even, top_k=3)) == [{0, 1, 2}]
    assert kept(narrowed(even, top_p=0.5)) == [{0, 1, 2, 3}]
    assert kept(narrowed(even, top_k=2, top_p=0.5)) == [{0}]
    np.testing.assert_allclose(probabilities_of(narrowed(even, top_k=4), 8)[0, :4], 0.25)


def test_one_token_with_all_the_mass_is_always_drawn() -> None:
    certain = np.repeat(logits_of([0, 0, 1, 0, 0, 0, 0, 0]), 100, axis=0)
    for fields in ({}, {"top_k": 5}, {"top_p": 0.0}, {"top_p": 0.9}, {"top_k": 5, "top_p": 1.0}):
        params = SamplingParams(do_sample=True, **fields)
        assert set(sample(certain, params, row_seeds(0, 100), 0)) == {2}


def test_impossible_tokens_are_never_drawn_even_when_top_k_asks_for_more() -> None:
    logits = np.repeat(logits_of([0, 0.5, 0, 0, 0.5, 0, 0, 0]), 5000, axis=0)
    drawn = sample(logits, SamplingParams(do_sample=True, top_k=6), row_seeds(3, 5000), 0)
    assert set(drawn) == {1, 4}


def test_rows_with_supports_of_different_size() -> None:
    rows = np.concatenate([logits_of(PROBABILITIES), logits_of(np.full(8, 1 / 8))])
    assert kept(narrowed(rows, top_p=0.5)) == [{1, 5}, {0, 1, 2, 3}]
    assert kept(narrowed(rows, top_p=0.1)) == [{1}, {0}]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-45])
def test_tiny_temperature_is_greedy_not_nan(temperature: float) -> None:
    logits = np.array([[1.0, 3.0, 2.9, -np.inf]], dtype=np.float32)
    params = SamplingParams(do_sample=True, temperature=temperature)
    assert [int(sample(logits, params, row_seeds(s, 1), 0)[0]) for s in range(20)] == [1] * 20


def test_huge_temperature_is_uniform() -> None:
    table = probabilities_of(scale_temperature(Candidates(logits_of(PROBABILITIES)), 1e30), 8)
    np.testing.assert_allclose(table[0], 1 / 8, rtol=1e-6)


def test_huge_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, -3e38, 3e38]], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        drawn = sample(
            np.repeat(logits, 50, 0), SamplingParams(do_sample=True), row_seeds(1, 50), 0
        )
    assert set(drawn) == {0, 2}


# The rule, brute force


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


@pytest.mark.parametrize("selection", [False, True])
@settings(max_examples=300, deadline=None)
@given(logits=rows_of_logits(40), p=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-9, 1.0])))
def test_top_p_is_the_shortest_head_of_a_stable_sort(
    selection: bool, logits: np.ndarray, p: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if selection:  # the way of wide rows, on rows small enough to sort by hand
            patch.setattr(sampling, "_SORTED_WIDTH", 3)
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


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}])
def test_same_distribution_as_transformers(fields: dict[str, Any]) -> None:
    import torch
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = (np.random.default_rng(7).normal(size=(6, 50)) * 2).astype(np.float32)
    scores = TemperatureLogitsWarper(0.7)(None, torch.from_numpy(logits))
    if "top_k" in fields:
        scores = TopKLogitsWarper(fields["top_k"])(None, scores)
    if "top_p" in fields:
        scores = TopPLogitsWarper(fields["top_p"])(None, scores)
    expected = torch.softmax(scores.double(), dim=-1).numpy()
    got = probabilities_of(narrowed(logits, temperature=0.7, **fields), 50)
    np.testing.assert_allclose(got, expected, atol=1e-6)


# Draws


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


# Quantiles at 1 - 1e-6, of 7, 3 and 2 degrees of freedom.
@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 40.5),
        ({"top_k": 4}, 30.7),
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.85}, 27.7),
    ],
)
def test_draws_follow_the_distribution(fields: dict[str, Any], limit: float) -> None:
    rows = 200_000
    candidates = narrowed(logits_of(PROBABILITIES), **fields)
    wide = np.broadcast_to(candidates.logits, (rows, candidates.logits.shape[1]))
    ids = candidates.ids
    ids = None if ids is None else np.broadcast_to(ids, wide.shape)
    drawn = draw(Candidates(wide, ids), uniforms(row_seeds(11, rows), 3))
    powered = PROBABILITIES ** (1 / fields.get("temperature", 1.0))
    support = sorted(kept(candidates)[0])
    expected = powered[support] / powered[support].sum() * rows
    counts = np.bincount(drawn, minlength=8)
    assert counts.sum() == counts[support].sum() == rows
    assert chi_square(counts[support], expected) < limit


def test_draws_of_one_seed_over_steps_follow_the_distribution() -> None:
    steps = np.arange(200_000)
    wide = np.broadcast_to(logits_of(PROBABILITIES), (steps.size, 8))
    drawn = draw(Candidates(wide), uniforms(np.full(steps.size, 9, np.uint64), steps))
    counts = np.bincount(drawn, minlength=8)
    assert chi_square(counts, PROBABILITIES * steps.size) < 40.5
    pairs = np.bincount(drawn[:-1] * 8 + drawn[1:], minlength=64)  # neighbours are independent
    expected = np.outer(PROBABILITIES, PROBABILITIES).ravel() * (steps.size - 1)
    assert chi_square(pairs, expected) < 128.6  # 63 degrees of freedom, 1 - 1e-6


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_generator_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    """The known-answer vectors that its authors publish (Random123, kat_vectors)."""

    def words(text: str) -> tuple[np.ndarray, ...]:
        return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())

    got = philox4x32(words(counter), words(key))
    assert [f"{int(word[0]):08x}" for word in got] == expected.split()


def test_uniforms_use_all_bits_of_seed_and_step() -> None:
    seeds = np.array([1, 2, 1 + (1 << 32), 1 << 63, 1, 1], dtype=np.uint64)
    steps = np.array([0, 0, 0, 0, 1, 1 << 32])
    numbers = uniforms(seeds, steps)
    assert len(set(numbers)) == 6
    assert ((numbers >= 0) & (numbers < 1)).all()


COMPANY = (np.random.default_rng(8).normal(size=(5, 300)) * 2).astype(np.float32)


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.9, "temperature": 1.3}]
)
@pytest.mark.parametrize("width", [300, 9000])
def test_a_row_draws_alone_what_it_draws_in_company(fields: dict[str, Any], width: int) -> None:
    params = SamplingParams(do_sample=True, **fields)
    logits = np.tile(COMPANY, (1, width // 300)) + np.linspace(0, 1, width, dtype=np.float32)
    seeds = np.array([7, 7, 123, 0, 2**64 - 1], dtype=np.uint64)
    for step in range(20):
        together = sample(logits, params, seeds, step)
        for row in range(5):
            alone = sample(logits[row : row + 1], params, seeds[row : row + 1], step)
            assert alone[0] == together[row]
        reversed_rows = sample(logits[::-1].copy(), params, seeds[::-1].copy(), step)
        assert reversed_rows[::-1].tolist() == together.tolist()


def test_rows_of_one_seed_differ_and_continue_the_solo_run_of_the_next_seed() -> None:
    assert row_seeds(40, 3).tolist() == [40, 41, 42]
    assert row_seeds(40, 3)[2] == row_seeds(42, 1)[0]
    assert row_seeds(2**64 - 1, 2).tolist() == [2**64 - 1, 0]
    fresh = row_seeds(None, 50)
    assert len(set(fresh.tolist())) == 50
    assert set(fresh.tolist()) != set(row_seeds(None, 50).tolist())


def test_thread_count_does_not_change_draws() -> None:
    code = (
        "import numpy as np\n"
        "from onnxlm.runtime.sampling import row_seeds, sample\n"
        "from onnxlm.runtime.sampling_params import SamplingParams\n"
        "x = (np.random.default_rng(1).normal(size=(4, 5000)) * 3).astype(np.float32)\n"
        "p = SamplingParams(do_sample=True, top_p=0.9)\n"
        "print([sample(x, p, row_seeds(5, 4), t).tolist() for t in range(30)])\n"
    )
    outputs = set()
    for threads in ("1", "2"):
        environment = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    logits = (np.random.default_rng(1).normal(size=(4, 5000)) * 3).astype(np.float32)
    params = SamplingParams(do_sample=True, top_p=0.9)
    here = [sample(logits, params, row_seeds(5, 4), t).tolist() for t in range(30)]
    assert outputs == {f"{here}\n"}  # and what the process did before does not matter


# Greedy, and rows that cannot be sampled


@pytest.mark.parametrize(
    "fields", [{}, {"do_sample": True, "temperature": 0}, {"do_sample": True, "top_k": 1}]
)
def test_greedy_takes_the_first_of_the_largest(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert params.greedy
    logits = np.array([[0, 2, 2, 1], [5, -np.inf, 1, 5]], dtype=np.float32)
    assert sample(logits, params, row_seeds(None, 2), 0).tolist() == [1, 0]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("row", "shown"), [([0, np.nan, 1], "nan"), ([np.inf, 0, 0], "inf"), ([-np.inf] * 3, "-inf")]
)
def test_unusable_logits_are_refused(row: list[float], shown: str, do_sample: bool) -> None:
    logits = np.array([[0, 1, 2], row], dtype=np.float32)
    with pytest.raises(InputError, match=f"logits of row 1 .* found a largest value of {shown};"):
        sample(logits, SamplingParams(do_sample=do_sample), row_seeds(1, 2), 0)
