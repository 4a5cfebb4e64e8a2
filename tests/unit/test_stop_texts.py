"""Stop strings and stop tokens of a model: the text by hand, streams and batches alike, why it ended."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from support.runtime_models import ALPHABET, changed, counting_package, hot_package, loaded
from tokenizers import Tokenizer, decoders, models

from onnxlm.errors import InputError
from onnxlm.runtime import Generation, LanguageModel

# The counting model goes from each of these tokens to the next.
PIECES = [
    *("a", " quick", " br", "own f", "ox j", "umps", "\n", "Us", "er: ", "🤗", "🤗!", " END", "ab"),
    *("c", "d", "\nUse", " it"),
]
PIECES += [f"<{number}>" for number in range(len(PIECES), len(ALPHABET))]


@functools.cache
def words() -> LanguageModel:
    """Its tokens are these pieces of text; text cannot be encoded, ids can."""
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}))
    backend.decoder = decoders.Fuse()
    files = {"tokenizer.json": json.loads(backend.to_str())}
    return loaded(changed(counting_package(), files).path)


def letters() -> LanguageModel:
    return loaded(counting_package().path)


def streamed(model: LanguageModel, prompt: Any, **fields: Any) -> tuple[list[str], Generation]:
    stream = model.stream(prompt, **fields)
    return list(stream), stream.result


@pytest.mark.parametrize(
    ("first", "stops", "text", "tokens"),
    [
        (0, ["own fox"], " quick br", 4),
        (0, ["ick br"], " qu", 2),
        (0, "j", " quick brown fox ", 4),  # " j" and what is behind it are one token
        (0, ["fox jumped", "umps"], " quick brown fox j", 5),
        (4, ["\nUser:"], "umps", 4),
        (4, ["\nUse it"], "umps\nUser: 🤗🤗! ENDabcd", 12),
        (6, ["🤗🤗"], "User: ", 4),
        (6, ["er: 🤗"], "Us", 3),
        (11, ["ab", "abc"], "", 1),
        (11, ["abc", "bcd"], "", 2),
        (11, ["abcd"], "", 3),
        (11, ["abce", "d"], "abc", 3),
        (11, ["abcd\nUse it<17><18>"], "", 7),
        (0, ["a qui"], " quick brown fox jumps\nUser: ", 8),  # "a" is the prompt's
    ],
)
def test_text_ends_before_the_stop_string(first: int, stops: Any, text: str, tokens: int) -> None:
    fields = {"stop_strings": stops, "max_new_tokens": tokens + 2}
    if not any(stop in "".join(PIECES[first + 1 :]) for stop in stops):
        fields["max_new_tokens"] = tokens  # never comes: the limit ends it
    result = words().generate([[first]], **fields)[0]
    pieces, of_stream = streamed(words(), [first], **fields)
    for one in (result, of_stream):
        assert one.text == text
        assert one.token_ids == list(range(first + 1, first + 1 + tokens))
        assert one.finish_reason == ("stop" if fields["max_new_tokens"] > tokens else "length")
    assert "".join(pieces) == text
    assert "" not in pieces


def test_a_false_prefix_comes_as_soon_as_it_is_one() -> None:
    pieces, _ = streamed(words(), [5], stop_strings="\nUser! ", max_new_tokens=4)
    assert pieces == ["\nUser: ", "🤗"]


def test_text_that_is_held_comes_at_the_end_whatever_ends_it() -> None:
    held = {"stop_strings": ["\nUser: x"]}
    pieces, result = streamed(words(), [4], **held, max_new_tokens=4)
    assert (pieces, result.finish_reason) == (["umps", "\nUser: "], "length")
    pieces, result = streamed(words(), [4], **held, eos_token_id=8)
    assert (pieces, result.finish_reason) == (["umps", "\nUser: "], "eos")
    stream = words().stream([4], **held)
    assert next(stream) == "umps"
    stream.cancel()
    assert "".join(stream) == ""
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.text == "umps"


def test_a_stop_string_with_the_last_token_counts_as_one() -> None:
    for fields in ({"max_new_tokens": 3}, {"max_new_tokens": 9}):
        result = letters().generate("A", stop_strings="D", **fields)
        assert (result.text, result.finish_reason) == ("BC", "stop")
    full = letters().generate(ALPHABET[:14], stop_strings="P")
    assert (full.text, full.finish_reason) == ("O", "stop")
    ended = letters().generate("A", stop_strings="D", eos_token_id=3)
    assert (ended.text, ended.finish_reason) == ("BC", "eos")


def test_a_prompt_that_holds_it_does_not_end() -> None:
    result = letters().generate("ABCDE", stop_strings=["BC", "E", "DEF"], max_new_tokens=3)
    assert (result.text, result.finish_reason) == ("FGH", "length")


def test_rows_have_their_own() -> None:
    results = letters().generate(
        ["A", "A", "A", "A"],
        stop_strings=[["CD"], ["F", "EFG"], [], ["zz"]],
        stop_token_ids=[[], [], [6, 7], []],
        eos_token_id=[None, None, None, [2]],
        max_new_tokens=9,
    )
    assert [result.text for result in results] == ["B", "BCDE", "BCDEF", "BC"]
    assert [result.finish_reason for result in results] == ["stop", "stop", "stop", "eos"]
    assert [len(result.token_ids) for result in results] == [3, 5, 6, 2]


def test_a_stop_token_has_no_text() -> None:
    fields = {"stop_token_ids": [4, 9], "max_new_tokens": 9}
    result = letters().generate("A", **fields)
    pieces, of_stream = streamed(letters(), "A", **fields)
    both = letters().generate("A", **fields, stop_strings=["X"])
    for one in (result, of_stream, both):
        assert (one.text, one.token_ids, one.finish_reason) == ("BCD", [1, 2, 3, 4], "stop")
    assert pieces == ["B", "C", "D"]


def test_what_ends_a_text_may_be_chosen_by_the_caller() -> None:
    package = changed(counting_package(), {"config.json": {"eos_token_id": 4}})
    model = loaded(package.path)
    assert model.generate("A").finish_reason == "eos"
    assert model.generate("A", eos_token_id=2).token_ids == [1, 2]
    assert len(model.generate("A", eos_token_id=[], max_new_tokens=7).token_ids) == 7


@pytest.mark.parametrize("stops", ["", ["a", ""]])
def test_an_empty_stop_string_is_refused(stops: Any) -> None:
    message = "'stop_strings'; .* allowed: a text or a list of texts, none of them empty"
    for call in (letters().generate, letters().stream):
        with pytest.raises(InputError, match=message):
            call("A", stop_strings=stops)


def test_nothing_ends_a_text_too_early() -> None:
    model = loaded(changed(counting_package(), {"config.json": {"eos_token_id": [1, 2]}}).path)
    assert model.generate("A").token_ids == [1]
    result = model.generate("A", min_new_tokens=3, max_new_tokens=5)
    assert len(result.token_ids) > 3
    assert not {1, 2} & set(result.token_ids[:3])
    counted = model.generate("A", min_length=4, max_new_tokens=5)
    assert counted.token_ids[:3] == result.token_ids[:3]


def test_several_draws_of_one_prompt() -> None:
    model = loaded(hot_package().path)
    fields = {"temperature": 3.0, "max_new_tokens": 8}
    together = model.generate(["abc", "x"], **fields, seed=[3, 50], num_return_sequences=[3, 1])
    assert [len(result.alternatives) for result in together] == [2, 0]
    of_abc = [together[0], *together[0].alternatives]
    alone = [model.generate("abc", **fields, seed=seed) for seed in (3, 4, 5)]
    assert [one.token_ids for one in of_abc] == [one.token_ids for one in alone]
    assert together[1].token_ids == model.generate("x", **fields, seed=50).token_ids


def test_rules_see_what_earlier_turns_said() -> None:
    """A chat's cache holds it; the rules look at all of it."""
    model, fields = loaded(hot_package().path), {"max_new_tokens": 6}
    chat = model.chat()
    answer = "".join(chat.send("Hello", **fields)).strip()
    said = f"<|user|>Hello<|end|><|assistant|>{answer}<|end|><|user|>Why?<|end|><|assistant|>"
    rules = {"presence_penalty": 30.0, "no_repeat_ngram_size": 1}
    reply = "".join(chat.send("Why?", **fields, **rules))
    assert reply == model.generate(said, **fields, **rules).text
    assert not set(reply) & set("HelloWhy?")
