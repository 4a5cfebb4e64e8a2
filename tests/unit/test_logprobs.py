"""Log-probabilities by hand, against torch, and of the model's own distribution whatever is asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.distributions import PROBABILITIES, logits_of
from support.runtime_models import at_once, hot_package, loaded

from onnxlm.runtime.logprobs import largest, log_softmax, token_logprob


def test_by_hand() -> None:
    logprobs = log_softmax(logits_of(PROBABILITIES) + 7)[0]
    np.testing.assert_allclose(logprobs, np.log(PROBABILITIES), rtol=1e-5)
    told = token_logprob(logprobs, 4, 3)
    assert told.token_id == 4
    assert told.logprob == pytest.approx(math.log(0.1), rel=1e-5)
    assert [token for token, _ in told.top] == [1, 5, 3]
    assert [value for _, value in told.top] == pytest.approx(
        [math.log(0.3), math.log(0.25), math.log(0.2)], rel=1e-5
    )
    assert token_logprob(logprobs, 4, 0).top == ()
    assert len(token_logprob(logprobs, 4, 99).top) == 8


def test_huge_logits() -> None:
    logprobs = log_softmax(np.array([3e38, 3e38, -3e38, -math.inf], dtype=np.float32))
    assert logprobs[:2].tolist() == [-math.log(2)] * 2
    assert np.isfinite(logprobs[2])
    assert logprobs[3] == -math.inf


@pytest.mark.parametrize("count", [0, 1, 5, 40, 60])
def test_the_largest_are_the_first_of_a_stable_sort(count: int) -> None:
    values = np.round(np.random.default_rng(1).normal(size=50), 1)
    values[7] = -np.inf
    order = sorted(range(50), key=lambda i: (-values[i], i))
    assert largest(values, count).tolist() == order[:count]


PROMPTS = ["abc", "Hello, W"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": [0, 3.0], "seed": 5, "top_k": 30},
        {"repetition_penalty": 1.5, "suppress_tokens": [1, 2, 3], "no_repeat_ngram_size": 2},
        {"num_beams": 3},
    ],
    ids=["greedy", "drawn", "ruled", "beams"],
)
def test_the_models_own_before_any_rule(fields: dict[str, object]) -> None:
    """As torch has them from the whole sequence at once, in the order of the tokens."""
    model = loaded(hot_package().path)
    results = model.generate(PROMPTS, max_new_tokens=8, logprobs=[4, 0], **fields)
    for prompt, result, count in zip(PROMPTS, results, (4, 0), strict=True):
        ids = model.encode(prompt)
        rows = torch.log_softmax(at_once([*ids, *result.token_ids]).double(), -1)[len(ids) - 1 : -1]
        assert result.logprobs is not None
        assert [told.token_id for told in result.logprobs] == result.token_ids
        for told, row in zip(result.logprobs, rows, strict=True):
            assert told.logprob == pytest.approx(float(row[told.token_id]), abs=2e-3)
            best = row.topk(count)
            assert [value for _, value in told.top] == pytest.approx(best.values, abs=2e-3)
            assert all(float(row[t]) == pytest.approx(v, abs=2e-3) for t, v in told.top)


def test_they_change_no_token_and_are_told_of_only_where_asked() -> None:
    model = loaded(hot_package().path)
    plain = model.generate(PROMPTS, max_new_tokens=8)
    told = model.generate(PROMPTS, max_new_tokens=8, logprobs=[None, 1])
    assert [one.token_ids for one in told] == [one.token_ids for one in plain]
    assert [one.logprobs is None for one in (*plain, *told)] == [True, True, True, False]
    stream = model.stream(PROMPTS[0], max_new_tokens=3, logprobs=2)
    next(stream)
    assert stream.result.logprobs is not None
    assert len(stream.result.logprobs) == 1
