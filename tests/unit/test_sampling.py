"""Draws: chi-square against hand-written distributions, and a row alone against the row in company."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support.distributions import PROBABILITIES, chi_square, logits_of

from onnxlm.errors import InputError
from onnxlm.runtime import sampling
from onnxlm.runtime.candidates import Candidates, draw, weights
from onnxlm.runtime.randomness import uniforms
from onnxlm.runtime.sampling import DrawSettings, check_logits
from onnxlm.runtime.sampling_params import SamplingParams


def sample(logits: np.ndarray, settings: DrawSettings, step: int) -> np.ndarray:
    """What rows draw in a step of theirs."""
    return sampling.sample(logits, settings, uniforms(settings.seeds, step))


def drawing(seeds: Any, **fields: Any) -> DrawSettings:
    """The same settings for a row of each seed."""
    one = DrawSettings.of([SamplingParams(do_sample=True, **fields)])
    alike = one.rows(np.zeros(len(seeds), dtype=np.int64))
    return dataclasses.replace(alike, seeds=np.asarray(seeds, dtype=np.uint64))


def test_one_token_with_all_the_mass_is_always_drawn() -> None:
    certain = np.repeat(logits_of([0, 0, 1, 0, 0, 0, 0, 0]), 100, axis=0)
    for fields in ({}, {"top_k": 5}, {"top_p": 0.0}, {"min_p": 1.0}, {"typical_p": 0.5}):
        assert set(sample(certain, drawing(range(100), **fields), 0)) == {2}


def test_impossible_tokens_are_never_drawn_even_when_top_k_asks_for_more() -> None:
    logits = np.repeat(logits_of([0, 0.5, 0, 0, 0.5, 0, 0, 0]), 5000, axis=0)
    assert set(sample(logits, drawing(range(5000), top_k=6), 0)) == {1, 4}


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-45])
def test_tiny_temperature_is_greedy_not_nan(temperature: float) -> None:
    logits = np.array([[1.0, 3.0, 2.9, -np.inf]] * 20, dtype=np.float32)
    assert set(sample(logits, drawing(range(20), temperature=temperature), 0)) == {1}


def test_huge_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, -3e38, 3e38]] * 50, dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        drawn = sample(logits, drawing(range(50)), 0)
    assert set(drawn) == {0, 2}


def test_weights_are_whole_numbers_whose_sums_are_exact() -> None:
    logits = (np.random.default_rng(0).normal(size=200_000) * 3).astype(np.float32)
    weight = weights(logits)
    assert (weight == np.rint(weight)).all()
    assert weight.max() == 2**34
    weight = weight.astype(np.float64)
    whole = int(sum(map(int, weight)))  # Python's integers have no limit
    assert whole < 2**53
    assert weight.sum() == weight[::-1].cumsum()[-1] == np.sort(weight).sum() == whole
    exact = np.exp(logits.astype(np.float64))
    np.testing.assert_allclose(weight / whole, exact / exact.sum(), rtol=1e-6, atol=0.6 / whole)


# Quantiles at 1 - 1e-6, of 7, 3, 2, 4 and 2 degrees of freedom.
@pytest.mark.parametrize(
    ("fields", "support", "limit"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7], 40.5),
        ({"top_k": 4}, [1, 3, 4, 5], 30.7),
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.85}, [1, 3, 5], 27.7),
        ({"min_p": 0.19}, [1, 3, 4, 5, 6], 33.4),
        ({"typical_p": 0.46}, [1, 3, 5], 27.7),
    ],
)
def test_draws_follow_the_distribution(
    fields: dict[str, Any], support: list[int], limit: float
) -> None:
    rows = 200_000
    wide = np.broadcast_to(logits_of(PROBABILITIES), (rows, 8))
    drawn = sample(wide, drawing(range(11, 11 + rows), **fields), 3)
    powered = PROBABILITIES ** (1 / fields.get("temperature", 1.0))
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


COMPANY = (np.random.default_rng(8).normal(size=(5, 300)) * 2).astype(np.float32)
SEEDS = [7, 7, 123, 0, 2**64 - 1]
# One setting for all rows, and one for each.
SETTINGS: list[list[dict[str, Any]]] = [
    [{}] * 5,
    [{"top_k": 20}] * 5,
    [{"top_p": 0.8}] * 5,
    [{"top_k": 40, "top_p": 0.9, "temperature": 1.3}] * 5,
    [{"typical_p": 0.9}] * 5,
    [{"temperature": 0}, {"top_k": 20}, {}, {"top_p": 0.9, "min_p": 0.01}, {"typical_p": 0.7}],
]


@pytest.mark.parametrize("fields", SETTINGS)
@pytest.mark.parametrize("width", [300, 9000])
def test_a_row_draws_alone_what_it_draws_in_company(
    fields: list[dict[str, Any]], width: int
) -> None:
    """The same seed twice, other settings beside it, in any order."""
    params = [
        SamplingParams(do_sample=True, seed=seed, **own)
        for seed, own in zip(SEEDS, fields, strict=True)
    ]
    logits = np.tile(COMPANY, (1, width // 300)) + np.linspace(0, 1, width, dtype=np.float32)
    settings, backwards = DrawSettings.of(params), np.arange(5)[::-1]
    for step in range(20):
        together = sample(logits, settings, step)
        for row in range(5):
            alone = sample(logits[row : row + 1], DrawSettings.of([params[row]]), step)
            assert alone[0] == together[row]
        reversed_rows = sample(logits[backwards], settings.rows(backwards), step)
        assert reversed_rows[::-1].tolist() == together.tolist()


def test_a_row_without_a_seed_gets_a_fresh_one() -> None:
    settings = DrawSettings.of([SamplingParams(do_sample=True)] * 50)
    assert len(set(settings.seeds.tolist())) == 50


THREADS = """
import numpy as np
from onnxlm.runtime.randomness import uniforms
from onnxlm.runtime.sampling import DrawSettings, sample
from onnxlm.runtime.sampling_params import SamplingParams
x = (np.random.default_rng(1).normal(size=(4, 5000)) * 3).astype(np.float32)
s = DrawSettings.of([SamplingParams(do_sample=True, top_p=0.9, seed=5 + r) for r in range(4)])
print([sample(x, s, uniforms(s.seeds, t)).tolist() for t in range(30)])
"""


def test_thread_count_does_not_change_draws() -> None:
    outputs = set()
    for threads in ("1", "2"):
        environment = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        run = subprocess.run(
            [sys.executable, "-c", THREADS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    logits = (np.random.default_rng(1).normal(size=(4, 5000)) * 3).astype(np.float32)
    here = [sample(logits, drawing(range(5, 9), top_p=0.9), t).tolist() for t in range(30)]
    assert outputs == {f"{here}\n"}  # and what the process did before does not matter


# Greedy, and rows that cannot be sampled


@pytest.mark.parametrize(
    "fields", [{}, {"do_sample": True, "temperature": 0}, {"do_sample": True, "top_k": 1}]
)
def test_greedy_takes_the_first_of_the_largest(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert params.greedy
    logits = np.array([[0, 2, 2, 1], [5, -np.inf, 1, 5]], dtype=np.float32)
    assert sample(logits, DrawSettings.of([params] * 2), 0).tolist() == [1, 0]
    beside = SamplingParams(do_sample=True, seed=1)
    three = np.concatenate([logits, logits[:1]])
    for step in range(20):  # and so beside a row that is drawn
        assert sample(three, DrawSettings.of([params, params, beside]), step)[:2].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("row", "shown"), [([0, np.nan, 1], "nan"), ([np.inf, 0, 0], "inf"), ([-np.inf] * 3, "-inf")]
)
def test_unusable_logits_are_refused(row: list[float], shown: str) -> None:
    logits = np.array([[0, 1, 2], row], dtype=np.float32)
    with pytest.raises(InputError, match=f"logits of row 1 .* found a largest value of {shown};"):
        check_logits(logits)
