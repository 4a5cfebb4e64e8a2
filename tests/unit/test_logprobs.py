"""Log-probabilities by hand, against torch, and of the model's own distribution whatever is asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.distributions import PROBABILITIES, logits_of
from support.runtime_models import at_once, hot_package, loaded

from onnxlm.runtime.logprobs import log_normalizers, token_logprob


def test_by_hand() -> None:
    logits = logits_of(PROBABILITIES) + 7
    (normalizer,) = log_normalizers(logits)
    assert normalizer == pytest.approx(7)
    told = token_logprob(logits[0], normalizer, 4, 3)
    assert told.token_id == 4
    assert told.logprob == pytest.approx(math.log(0.1), rel=1e-5)
    assert [token for token, _ in told.top] == [1, 5, 3]
    assert [value for _, value in told.top] == pytest.approx(
        [math.log(0.3), math.log(0.25), math.log(0.2)], rel=1e-5
    )
    assert token_logprob(logits[0], normalizer, 4, 0).top == ()
    assert len(token_logprob(logits[0], normalizer, 4, 99).top) == 8


def test_as_torch_has_them() -> None:
    logits = (np.random.default_rng(0).normal(size=(3, 50_000)) * 4).astype(np.float32)
    expected = torch.logsumexp(torch.from_numpy(logits).double(), -1).numpy()
    np.testing.assert_allclose(log_normalizers(logits), expected, rtol=1e-7)


def test_huge_logits() -> None:
    logits = np.array([[3e38, 3e38, -3e38, -math.inf]], dtype=np.float32)
    with np.errstate(all="raise"):
        (normalizer,) = log_normalizers(logits)
    assert token_logprob(logits[0], normalizer, 3, 0).logprob == -math.inf
    assert token_logprob(logits[0], normalizer, 2, 0).logprob == pytest.approx(-6e38)
    close = np.array([[1e4, 1e4, 0.0]], dtype=np.float32)
    (normalizer,) = log_normalizers(close)
    assert token_logprob(close[0], normalizer, 1, 0).logprob == pytest.approx(-math.log(2))


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
