"""Beam search: by hand, against transformers, without a cache, and in a batch against alone."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.runtime_models import (
    COUNTING_CONTEXT,
    END,
    HOT_CONTEXT,
    at_once,
    counting_package,
    hot_oracle,
    hot_package,
    loaded,
)

from onnxlm.errors import InputError
from onnxlm.runtime import Generation, LanguageModel
from onnxlm.runtime.beam import BeamSearch, BeamSettings

PROMPTS = ["abc", "Hello, W", "x"]


def hot(lowering: str = "ort") -> LanguageModel:
    return loaded(hot_package(lowering).path)


# By hand: a table of the next token's probabilities by the last token.
#          0    1    2 (ends)
TABLE = [
    [0.50, 0.40, 0.10],  # after 0
    [0.05, 0.05, 0.90],  # after 1
    [0.00, 0.00, 1.00],
]


def searched(first: int = 0, **fields: Any) -> BeamSearch:
    """A search over the table, behind token `first`; the cache is the last token of each row."""
    with np.errstate(divide="ignore"):
        table = np.log(np.array(TABLE))
    search = BeamSearch(BeamSettings(beams=2, ends={2}, **fields))
    last = [first, first]
    while not search.done:
        logprobs = table[last]
        sources, last = search.advance(logprobs)
        assert [last[beam.row] for beam in search.running] == [
            beam.token_ids[-1] for beam in search.running
        ]
        assert len(sources) == 2
    return search


def test_two_tokens_by_hand() -> None:
    """0.5*0.5, 0.5*0.4 and 0.4*0.9: the greedy first token loses to the other."""
    search = searched(limit=2, length_penalty=0.0)
    assert [beam.token_ids for beam in search.complete] == [(1, 2), (0, 0)]
    assert [math.exp(beam.score) for beam in search.complete] == pytest.approx([0.36, 0.25])


def test_scores_are_over_length() -> None:
    search = searched(limit=3, length_penalty=1.0)
    by_length = {
        beam.token_ids: math.exp(beam.score * len(beam.token_ids)) for beam in search.complete
    }
    assert by_length == pytest.approx({(1, 2): 0.36, (0, 1, 2): 0.5 * 0.4 * 0.9})
    # 0.36 ** (1 / 2) is 0.6 and 0.18 ** (1 / 3) is 0.56.
    assert list(by_length) == [(1, 2), (0, 1, 2)]
    # ln 0.18 / 27 is -0.064, ln 0.125 / 27 is -0.077, ln 0.36 / 8 is -0.128.
    longer = searched(limit=3, length_penalty=3.0)
    assert [beam.token_ids for beam in longer.complete] == [(0, 1, 2), (0, 0, 0)]


@pytest.mark.parametrize("penalty", [-100.0, -6.0, 100.0])
@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_extreme_length_penalties(penalty: float, early_stopping: bool | str) -> None:
    """Powers beyond what a double holds, and means below any that stands for none."""
    search = searched(limit=1500, length_penalty=penalty, early_stopping=early_stopping)
    assert len(search.complete) == 2
    scores = [beam.score for beam in search.complete]
    assert scores == sorted(scores, reverse=True)
    # Long texts win over a power above 0, short ones over one below.
    lengths = [len(beam.token_ids) for beam in search.complete]
    assert min(lengths) > 1000 if penalty > 0 else max(lengths) < 10


def test_another_thread_sees_whole_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    search = BeamSearch(BeamSettings(beams=64, limit=400, ends={2}))
    seen: set[int] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen.add(len(search.running))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        table = np.log(np.full((64, 100), 0.01))
        for _ in range(200):
            search.advance(table)
    finally:
        ended.set()
        looking.join()
        sys.setswitchinterval(before)
    assert seen == {64}


def test_a_row_keeps_one_of_its_beams() -> None:
    """Both beams go on from row 0: one stays there, and row 1 is the only one that is copied."""
    table = np.log(np.array(TABLE[:1] * 2))
    search = BeamSearch(BeamSettings(beams=2, limit=9, ends={2}))
    assert search.advance(table) == ([0, 0], [0, 1])
    assert [beam.row for beam in search.running] == [0, 1]
    table = np.log(np.array([[0.1, 0.1, 0.8], [0.45, 0.45, 0.1]]))
    sources, tokens = search.advance(table)
    assert (sources, sorted(tokens)) == ([1, 1], [0, 1])
    assert {beam.token_ids for beam in search.running} == {(1, 0), (1, 1)}


# Against transformers


def theirs(prompt: str, **fields: Any) -> tuple[list[list[int]], list[float]]:
    """New ids, each up to what ended it, and scores of transformers, best first."""
    ids = hot().encode(prompt)
    ends = fields.get("eos_token_id", END)
    made = hot_oracle().generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        pad_token_id=ends if isinstance(ends, int) else ends[0],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **fields,
    )
    ends = {ends} if isinstance(ends, int) else set(ends)
    rows = []
    for row in made.sequences[:, len(ids) :].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        rows.append(row[: stop + 1])
    return rows, made.sequences_scores.tolist()


def sequences(result: Generation) -> list[Generation]:
    return [result, *result.alternatives]


CASES: list[dict[str, Any]] = [
    {"num_beams": 2, "max_new_tokens": 12},
    {"num_beams": 5, "max_new_tokens": 9, "num_return_sequences": 5},
    {"num_beams": 3, "max_new_tokens": 1, "num_return_sequences": 3},
    # Letters that come often end the texts: sequences of different lengths compete.
    *(
        {
            "num_beams": 4,
            "max_new_tokens": 14,
            "num_return_sequences": 4,
            "eos_token_id": [5, 17, 40, 66, 80],
            "early_stopping": early,
            "length_penalty": penalty,
        }
        for early in (False, True, "never")
        for penalty in (0.0, 1.0, 2.0, -1.0)
    ),
    {"num_beams": 3, "max_new_tokens": 10, "repetition_penalty": 1.4, "num_return_sequences": 2},
    {"num_beams": 3, "max_new_tokens": 10, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    {
        "num_beams": 3,
        "max_new_tokens": 10,
        "bad_words_ids": [[3], [20, 21]],
        "sequence_bias": [[[40], 3.0], [[7, 8], -9.0]],
        "suppress_tokens": [11, 12],
    },
    # No token is left behind an "a": beams with one end there.
    {
        "num_beams": 4,
        "max_new_tokens": 6,
        "bad_words_ids": [[letter, i] for letter in (3, 4, 7, 20) for i in range(END + 1)],
    },
]


@pytest.mark.parametrize("fields", CASES)
@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_sequences_and_scores_are_those_of_transformers(
    lowering: str, fields: dict[str, Any]
) -> None:
    """One batch of ours against one prompt at a time of theirs."""
    results = hot(lowering).generate(PROMPTS, **fields)
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids, scores = theirs(prompt, **fields)
        assert [one.token_ids for one in sequences(result)] == ids
        assert [one.score for one in sequences(result)] == pytest.approx(scores, rel=1e-3)
        for one in sequences(result):
            ended = one.token_ids[-1] in fields.get("eos_token_id", [END])
            assert one.finish_reason == ("eos" if ended else "length")
            assert one.text == hot().tokenizer.decode(one.token_ids)


def test_the_letters_that_end_texts_do_end_some() -> None:
    """Or the cases above would not compare what they are for."""
    fields = CASES[3]
    lengths = {
        len(one.token_ids)
        for result in hot().generate(PROMPTS, **fields)
        for one in sequences(result)
    }
    assert len(lengths) > 2


# Without a cache


def without_a_cache(prompt: list[int], beams: int, steps: int) -> list[tuple[list[int], float]]:
    """The plain definition, with every sequence run at once; nothing ends before the last step."""
    running: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(steps):
        candidates = []
        for ids, score in running:
            row = torch.log_softmax(at_once([*prompt, *ids])[-1].double(), -1)
            best = row.topk(beams)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            candidates += [([*ids, token], score + value) for token, value in pairs]
        running = sorted(candidates, key=lambda pair: -pair[1])[:beams]
    return running


@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_the_cache_follows_its_beam(lowering: str) -> None:
    model = hot(lowering)
    fields = {"num_beams": 4, "num_return_sequences": 4, "eos_token_id": [], "length_penalty": 0}
    for prompt, result in zip(
        PROMPTS, model.generate(PROMPTS, max_new_tokens=10, **fields), strict=True
    ):
        expected = without_a_cache(model.encode(prompt), 4, 10)
        assert [one.token_ids for one in sequences(result)] == [ids for ids, _ in expected]
        scores = [one.score for one in sequences(result)]
        assert scores == pytest.approx([score for _, score in expected], rel=1e-3)


# Around it


def test_a_batch_gives_what_each_prompt_gives_alone() -> None:
    """Each with limits, an end and penalties of its own."""
    own: dict[str, list[Any]] = {
        "max_new_tokens": [3, 12, 0],
        "eos_token_id": [[5], [17, 40], [66]],
        "length_penalty": [0.0, 1.0, 2.0],
        "early_stopping": [True, False, "never"],
        "num_return_sequences": [1, 3, 2],
        "repetition_penalty": [1.0, 1.3, 1.0],
    }
    together = hot().generate(PROMPTS, num_beams=3, **own)
    for row, prompt in enumerate(PROMPTS):
        alone = hot().generate(prompt, num_beams=3, **{k: v[row] for k, v in own.items()})
        for one, other in zip(sequences(alone), sequences(together[row]), strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            assert (one.score or 0) == pytest.approx(other.score or 0, rel=1e-4)
            assert (one.score is None) == (other.score is None) == (prompt == PROMPTS[2])
    assert (together[2].token_ids, together[2].finish_reason) == ([], "length")


def test_one_beam_is_greedy() -> None:
    one = hot().generate(PROMPTS, num_beams=1, max_new_tokens=6)
    greedy = hot().generate(PROMPTS, max_new_tokens=6)
    assert [result.token_ids for result in one] == [result.token_ids for result in greedy]
    assert one[0].score is None


def test_the_end_of_the_context() -> None:
    model = loaded(counting_package().path)
    results = model.generate(["ABCDEFGHIJKLM", "ABCDEFGHIJKLMNOP", "A"], num_beams=2)
    assert [result.text for result in results] == ["NOP", "", "BCDEFGHIJKLMNOP"]
    assert {result.finish_reason for result in results} == {"context"}
    assert len(results[2].token_ids) == COUNTING_CONTEXT - 1
    assert HOT_CONTEXT > 256  # a buffer that grows while beams run, below
    long = hot().generate([list(range(90)) * 2 + list(range(70))], num_beams=2, max_new_tokens=20)
    assert len(long[0].token_ids) > 6


def test_a_stop_token_ends_a_sequence_and_has_no_text() -> None:
    ids = [17, 40, 66, 80]
    result = hot().generate(PROMPTS[0], num_beams=3, max_new_tokens=12, stop_token_ids=ids)
    same = hot().generate(PROMPTS[0], num_beams=3, max_new_tokens=12, eos_token_id=[*ids, END])
    assert result.token_ids == same.token_ids
    assert (result.finish_reason, same.finish_reason) == ("stop", "eos")
    assert result.text == same.text[:-1]


def test_a_stream_gives_the_text_at_the_end() -> None:
    whole = hot().generate("abc", num_beams=3, max_new_tokens=8)
    stream = hot().stream("abc", num_beams=3, max_new_tokens=8)
    assert list(stream) == [whole.text]
    assert stream.result.token_ids == whole.token_ids


def test_a_chat_goes_on_behind_beams() -> None:
    """The batch holds the prompt again and nothing of any beam: the next turn runs the answer."""
    chat = hot().chat()
    answer = "".join(chat.send("Hello", num_beams=3, max_new_tokens=6)).strip()
    said = f"<|user|>Hello<|end|><|assistant|>{answer}<|end|><|user|>Why?<|end|><|assistant|>"
    reply = chat.send("Why?", max_new_tokens=6)
    assert "".join(reply) == hot().generate(said, max_new_tokens=6).text
    first = len(hot().encode("<|user|>Hello<|end|><|assistant|>"))
    assert reply.result.prompt_tokens == len(hot().encode(said)) - first


def test_it_can_be_cancelled() -> None:
    stream = hot().stream("abc", num_beams=3, max_new_tokens=8)
    stream.cancel()
    assert list(stream) == [""]
    assert stream.result.finish_reason == "cancelled"


def test_prompts_that_want_different_beams() -> None:
    with pytest.raises(InputError, match="'num_beams'; found 3; allowed: 2, as for the first"):
        hot().generate(PROMPTS, num_beams=[2, 3, 2])
