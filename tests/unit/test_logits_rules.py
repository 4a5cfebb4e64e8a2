"""Rules on what a row holds: by hand, against transformers' processors, and a row alone against a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import generation

from onnxlm.errors import InputError
from onnxlm.runtime.bans import ban, completed, repeated_ngrams
from onnxlm.runtime.logits_rules import LogitsRules, apply_rules, check_left
from onnxlm.runtime.penalties import add_biases, ends_with, penalize_counts, penalize_repetition
from onnxlm.runtime.row_history import RowHistory
from onnxlm.runtime.sampling_params import SamplingParams

WIDTH = 40
LOGITS = np.array([[4.0, -2.0, 0.0, 1.0, -0.5, 3.0, 0.25, -8.0]], dtype=np.float32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


# By hand


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    got = penalize_repetition(LOGITS, [ids(0, 1, 2)], [2.0])
    assert got.tolist() == [[2.0, -4.0, 0.0, 1.0, -0.5, 3.0, 0.25, -8.0]]
    likelier = penalize_repetition(LOGITS, [ids(0, 1)], [0.5])
    assert likelier.tolist() == [[8.0, -1.0, 0.0, 1.0, -0.5, 3.0, 0.25, -8.0]]
    assert LOGITS[0, 0] == 4.0


def test_counts_are_taken_away_whatever_the_sign() -> None:
    held = [(ids(0, 1, 5), ids(1, 3, 2))]
    got = penalize_counts(LOGITS, held, [0.5], [0.25])
    assert got.tolist() == [[3.25, -3.25, 0.0, 1.0, -0.5, 2.0, 0.25, -8.0]]
    assert penalize_counts(LOGITS, held, [0.0], [-1.0])[0, :2].tolist() == [5.0, 1.0]


def test_a_bias_is_for_a_token_or_for_the_end_of_a_sequence() -> None:
    pairs = [((3,), 2.0), ((7, 1, 0), -1.0), ((9, 5), 50.0), ((1, 2, 1, 4), 50.0), ((2, 3), 1.0)]
    got = add_biases(LOGITS, [ids(2, 7, 1)], [pairs])
    assert got.tolist() == [[3.0, -2.0, 0.0, 3.0, -0.5, 3.0, 0.25, -8.0]]
    assert add_biases(LOGITS, [ids()], [[((1,), -math.inf)]])[0, 1] == -math.inf


def test_the_end_of_a_row() -> None:
    assert ends_with(ids(1, 2, 3), (2, 3))
    assert ends_with(ids(1, 2, 3), ())
    assert ends_with(ids(), ())
    assert not ends_with(ids(1, 2, 3), (1, 2))
    assert not ends_with(ids(2, 3), (1, 2, 3))
    assert completed(ids(1, 2), [(3,), (2, 4), (1, 5), (1, 2, 6), (0, 1, 2, 7)]) == [3, 4, 6]


@pytest.mark.parametrize(
    ("held", "size", "banned"),
    [
        ([1, 2, 3, 1, 2], 3, {3}),
        ([1, 2, 3, 1, 2, 4, 1, 2], 3, {3, 4}),
        ([1, 2, 3, 1], 2, {2}),
        ([1, 2, 3], 1, {1, 2, 3}),
        ([1, 1], 2, {1}),
        ([1], 2, set()),
        ([], 1, set()),
        ([1, 2], 5, set()),
        ([5, 6, 7], 3, set()),
    ],
)
def test_sequences_do_not_come_twice(held: list[int], size: int, banned: set[int]) -> None:
    assert set(repeated_ngrams(ids(*held), size).tolist()) == banned


def test_bans_are_by_row() -> None:
    logits = np.zeros((3, 4), dtype=np.float32)
    got = ban(logits, [[1], [], ids(0, 3, 3)])
    assert np.isinf(got).tolist() == [
        [False, True, False, False],
        [False] * 4,
        [True, False, False, True],
    ]
    assert not np.isinf(logits).any()


def test_a_history_counts_what_it_holds() -> None:
    history = RowHistory([3, 5, 3])
    for token in [7, 3, *range(100, 180)]:
        history.append(token)
    assert history.ids.tolist() == [3, 5, 3, 7, 3, *range(100, 180)]
    assert (history.prompt_length, history.new_tokens) == (3, 82)
    assert dict(zip(*(part.tolist() for part in history.counts()), strict=True))[3] == 3
    longer = history.extended(3)
    assert (longer.new_tokens, longer.prompt_length, longer.ids[-1]) == (83, 3, 3)
    assert history.new_tokens == 82
    assert history.ids[-1] == 179
    empty = RowHistory(())
    empty.append(4)
    assert empty.ids.tolist() == [4]


# Against transformers


def processors(prompt: int, end: list[int], fields: dict[str, Any]) -> Any:
    """What transformers makes of the same fields, in its own order."""
    made = {
        "sequence_bias": generation.SequenceBiasLogitsProcessor,
        "repetition_penalty": generation.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": generation.NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda v: generation.NoBadWordsLogitsProcessor(v, end),
        "min_length": lambda v: generation.MinLengthLogitsProcessor(v, end),
        "min_new_tokens": lambda v: generation.MinNewTokensLengthLogitsProcessor(prompt, v, end),
        "suppress_tokens": generation.SuppressTokensLogitsProcessor,
        "begin_suppress_tokens": lambda v: generation.SuppressTokensAtBeginLogitsProcessor(
            v, prompt
        ),
    }
    return generation.LogitsProcessorList([made[k](fields[k]) for k in made if k in fields])


FIELDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"sequence_bias": [[[3], 4.0], [[1, 2], -6.0], [[2, 1, 0], 5.0], [[1, 2, 3, 0, 2, 1], 1.0]]},
    {"bad_words_ids": [[2], [0, 1], [1, 2, 3], [4, 4, 4, 4], [5]]},
    {"suppress_tokens": [0, 7, 39]},
    {"begin_suppress_tokens": [1, 2, 3]},
    {"min_length": 9},
    {"min_new_tokens": 4},
    {
        "sequence_bias": [[[3], 4.0], [[2, 1], -6.0]],
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[2, 3], [5]],
        "min_length": 8,
        "min_new_tokens": 2,
        "suppress_tokens": [8],
        "begin_suppress_tokens": [1],
    },
]


@pytest.mark.parametrize("fields", FIELDS, ids="+".join)
def test_same_logits_as_transformers(fields: dict[str, Any]) -> None:
    """A vocabulary where everything repeats, six new tokens behind a prompt of five."""
    end, generator = [5, 6], np.random.default_rng(3)
    rules = LogitsRules(SamplingParams(**fields), end, WIDTH)
    for _ in range(20):
        prompt = generator.integers(0, 5, 5).tolist()
        history, row = RowHistory(prompt), list(prompt)
        oracle = processors(len(prompt), end, fields)
        for _ in range(6):
            logits = (generator.normal(size=(1, WIDTH)) * 3).astype(np.float32)
            got = apply_rules(logits, [rules], [history])
            theirs = oracle(torch.tensor([row]), torch.from_numpy(logits.copy()))
            np.testing.assert_allclose(got, theirs.numpy(), rtol=1e-6)
            token = int(generator.integers(0, 5))
            history.append(token)
            row.append(token)


# Rows of a batch


def test_a_row_is_changed_alone_as_in_company() -> None:
    """Other lengths, other fields, no rule at all beside it."""
    generator = np.random.default_rng(4)
    fields = [*FIELDS, {}, {"presence_penalty": 0.7}, {"frequency_penalty": -0.4}]
    fields.append({"logit_bias": {3: -math.inf, 4: 2.0}})
    rules = [LogitsRules(SamplingParams(**own), [5, 6], WIDTH) for own in fields]
    rows = [RowHistory(generator.integers(0, 5, 1 + row).tolist()) for row in range(len(rules))]
    for history in rows[::2]:
        history.append(2)
    logits = generator.normal(size=(len(rules), WIDTH)).astype(np.float32)
    together = apply_rules(logits, rules, rows)
    for row, (rule, history) in enumerate(zip(rules, rows, strict=True)):
        alone = apply_rules(logits[row : row + 1], [rule], [history])
        np.testing.assert_array_equal(alone[0], together[row])
    np.testing.assert_array_equal(together[len(FIELDS)], logits[len(FIELDS)])


def test_the_prompt_counts_and_nothing_else_does() -> None:
    """No padding and no other row: token 0, which fills up prompts, is as it was."""
    fields = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 2.0}
    rules = [LogitsRules(SamplingParams(**fields), (), 4)] * 2
    rows = [RowHistory([1]), RowHistory([2, 2, 2])]
    got = apply_rules(np.full((2, 4), 4.0, dtype=np.float32), rules, rows)
    assert got.tolist() == [[4.0, 0.5, 4.0, 4.0], [4.0, 4.0, -0.5, 4.0]]


def test_nothing_is_copied_where_no_rule_changes_anything() -> None:
    rules = LogitsRules(SamplingParams(do_sample=True, min_new_tokens=3), (), 8)
    assert rules.idle
    assert apply_rules(LOGITS, [rules], [RowHistory([1])]) is LOGITS


@pytest.mark.parametrize("field", ["min_new_tokens", "min_length"])
def test_no_stop_token_comes_too_early_either(field: str) -> None:
    rules = LogitsRules(SamplingParams(**{field: 2}), [5, 6], 8)
    history = RowHistory(())
    for step in range(4):
        got = apply_rules(LOGITS, [rules], [history])
        assert np.isinf(got[0, [5, 6]]).tolist() == [step < 2] * 2
        history.append(0)


def test_no_token_left() -> None:
    rules = LogitsRules(SamplingParams(suppress_tokens=list(range(8))), (), 8)
    history = RowHistory([1])
    ruled = apply_rules(LOGITS, [rules], [history])
    message = "leave no token to choose from; found all banned at token 0; ban fewer tokens"
    with pytest.raises(InputError, match=message):
        check_left(np.concatenate((LOGITS, ruled)), [RowHistory(()), history])


def test_an_end_that_the_vocabulary_has_not() -> None:
    """Some config.json names one."""
    rules = LogitsRules(SamplingParams(min_new_tokens=2), [5, 8, 900], 8)
    assert np.isinf(apply_rules(LOGITS, [rules], [RowHistory(())])[0]).nonzero()[0].tolist() == [5]


@pytest.mark.parametrize(
    "fields",
    [
        {"sequence_bias": [[[1, 8], 1.0]]},
        {"logit_bias": {8: 1.0}},
        {"bad_words_ids": [[0], [8]]},
        {"suppress_tokens": [8]},
        {"begin_suppress_tokens": [0, 8]},
        {"eos_token_id": 8},
        {"stop_token_ids": [8]},
    ],
)
def test_tokens_outside_the_vocabulary_are_refused_by_field(fields: dict[str, Any]) -> None:
    (name,) = fields
    message = f"generation field '{name}'; found 8; allowed: token ids from 0 to 7"
    with pytest.raises(InputError, match=message):
        LogitsRules(SamplingParams(**fields), (), 8)
