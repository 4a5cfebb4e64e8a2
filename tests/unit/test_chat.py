"""Turns over one cache: as if each had run the whole conversation anew, for the price of its new tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.chats import common, rendered
from support.runtime_models import (
    END,
    HOT_CONTEXT,
    at_once,
    changed,
    counting_package,
    hot_package,
    loaded,
)

from onnxlm.errors import InputError
from onnxlm.runtime import LanguageModel, TextIterator
from onnxlm.runtime.chat import Chat

both = pytest.mark.parametrize("lowering", ["ort", "portable"])


class Watched:
    """A chat whose every turn is held against the whole conversation, run at once by transformers."""

    def __init__(self, model: LanguageModel, system: str | None = None) -> None:
        self.model = model
        self.chat = model.chat(system)
        self.held: list[int] = []

    def turn(self, text: str, take: int = 1000, **fields: object) -> TextIterator:
        """One turn, of whose answer `take` pieces are read."""
        reply = self.chat.send(text, **fields)
        ids = rendered(self.chat.messages[:-1])
        for _ in zip(range(take), reply, strict=False):
            pass
        if reply.result.finish_reason is None:
            reply.close()
        result = reply.result
        assert result.prompt_tokens == len(ids) - min(common(self.held, ids), len(ids) - 1)
        whole = [*ids, *result.token_ids]
        greedy = at_once(whole).argmax(-1)[len(ids) - 1 : -1].tolist() if result.token_ids else []
        assert result.token_ids == greedy
        self.held = whole[: int(self.chat._batch.lengths[0])]
        # The cache holds these tokens and no others: what comes behind them is right.
        logits = self.chat._batch.prefill_logits([[1]])[0]
        theirs = at_once([*self.held, 1])[-1].numpy()
        np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
        self.chat._batch.rewind(len(self.held))
        return reply


def stopping_early() -> LanguageModel:
    """The hot model, for which a token that it soon gives ends an answer."""
    model = loaded(hot_package().path)
    made = model.chat("Be brief.").send("Hello", max_new_tokens=20)
    "".join(made)
    fifth = made.result.token_ids[4]
    return loaded(changed(hot_package(), {"config.json": {"eos_token_id": [fifth, END]}}).path)


@both
def test_turns_that_end_by_length(lowering: str) -> None:
    watched = Watched(loaded(hot_package(lowering).path), "Be brief.")
    for text in ("Hello", "And then?", "x", "Once more, please"):
        reply = watched.turn(text, max_new_tokens=9)
        assert reply.result.finish_reason in ("length", "eos")
    assert [m["role"] for m in watched.chat.messages] == ["system"] + ["user", "assistant"] * 4


def test_turns_that_end_by_id() -> None:
    watched = Watched(stopping_early(), "Be brief.")
    assert watched.turn("Hello").result.finish_reason == "eos"
    assert watched.turn("And then?", max_new_tokens=30).result.prompt_tokens < 40


@both
@pytest.mark.parametrize(
    "fields",
    [
        {"stop_strings": "letters"},
        {"stop_token_ids": "ids"},
        {"num_beams": 3, "num_return_sequences": 2},
        {"temperature": 2.0, "seed": 5},
        {"num_return_sequences": 3, "temperature": 2.0},
        {"prompt_lookup_num_tokens": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_turns_that_end_or_choose_otherwise(lowering: str, fields: dict[str, object]) -> None:
    """Whatever a turn has left in the cache, the next one is as if the conversation had run at once."""
    watched = Watched(loaded(hot_package(lowering).path), "Be brief.")
    plain = watched.turn("Hello", max_new_tokens=12).result
    if fields.get("stop_strings"):
        fields = {"stop_strings": plain.text[4:6]}
    if fields.get("stop_token_ids"):
        fields = {"stop_token_ids": [plain.token_ids[4]]}
    watched.chat.reset()
    watched.held = []
    chat = watched.chat
    for text in ("Hello", "And then?"):
        reply = chat.send(text, max_new_tokens=12, **fields)
        "".join(reply)
        if "stop_strings" in fields or "stop_token_ids" in fields:
            assert reply.result.finish_reason == "stop"
            assert plain.text.startswith(reply.result.text)
            assert len(reply.result.text) < len(plain.text)
            fields = {}
    assert chat.messages[-1]["content"] == reply.result.text
    watched.held = chat.token_ids
    watched.turn("Once more", max_new_tokens=8)
    assert [m["role"] for m in chat.messages] == ["system"] + ["user", "assistant"] * 3


@both
@pytest.mark.parametrize("take", [0, 1, 4])
def test_turns_whose_answer_is_left(lowering: str, take: int) -> None:
    watched = Watched(loaded(hot_package(lowering).path))
    first = watched.turn("Hello", take=take, max_new_tokens=50)
    assert first.result.finish_reason == "cancelled"
    assert len(first.result.token_ids) <= take + 1
    second = watched.turn("And then?", max_new_tokens=5)
    assert list(first) == []  # it ended when the next began
    assert watched.chat.messages == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.result.text},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": second.result.text},
    ]


def test_only_new_tokens_are_run() -> None:
    """Of a long first message nothing is run again."""
    chat = loaded(hot_package().path).chat()
    first = chat.send("a" * 300, max_new_tokens=4)
    "".join(first)
    assert first.result.prompt_tokens == 303
    second = chat.send("b", max_new_tokens=4)
    "".join(second)
    # The answer's last token, which no step has run, <|end|>, <|user|>, b, <|end|>, <|assistant|>; all of the
    # answer again where its text begins or ends with spaces, which the template takes away.
    answer = first.result.text
    assert second.result.prompt_tokens <= (6 if answer == answer.strip() else 6 + len(answer))


def test_of_a_prompt_that_is_all_known_the_last_token_is_run() -> None:
    """What a template makes of a conversation is its own affair."""
    config = {"eos_token": "<|end|>", "chat_template": "Hello"}
    files = {"chat_template.jinja": None, "tokenizer_config.json": config}
    model = loaded(changed(hot_package(), files).path)
    expected = model.generate("Hello", max_new_tokens=6).text
    chat = model.chat()
    first = chat.send("a", max_new_tokens=6)
    assert ("".join(first), first.result.prompt_tokens) == (expected, 5)
    second = chat.send("b", max_new_tokens=6)
    assert ("".join(second), second.result.prompt_tokens) == (expected, 1)


def test_messages_are_copies() -> None:
    chat = loaded(hot_package().path).chat("s")
    chat.messages.append({"role": "user", "content": "x"})
    chat.messages[0]["content"] = "changed"
    assert chat.messages == [{"role": "system", "content": "s"}]


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_reset(system: str | None) -> None:
    watched = Watched(loaded(hot_package().path), system)
    first = watched.turn("Hello", max_new_tokens=5).result
    watched.chat.reset()
    watched.held = []
    assert watched.chat.messages == ([{"role": "system", "content": system}] if system else [])
    assert watched.turn("Hello", max_new_tokens=5).result.token_ids == first.token_ids


def refuse_length(chat: Chat) -> None:
    with pytest.raises(
        InputError, match=f"longer than the context; found .*; allowed: up to {HOT_CONTEXT}"
    ):
        chat.send("x" * HOT_CONTEXT)


def refuse_field(chat: Chat) -> None:
    with pytest.raises(InputError, match="generation field 'top_q'"):
        chat.send("more", top_q=1)


@pytest.mark.parametrize("refuse", [refuse_length, refuse_field])
def test_a_message_that_is_refused_was_never_said(refuse: Callable[[Chat], None]) -> None:
    watched = Watched(loaded(hot_package().path))
    watched.turn("Hello", max_new_tokens=5)
    before = watched.chat.messages
    refuse(watched.chat)
    assert watched.chat.messages == before
    watched.turn("And then?", max_new_tokens=5)


def test_an_answer_goes_on_when_the_next_message_is_refused() -> None:
    chat = loaded(hot_package().path).chat()
    whole = "".join(chat.send("Hello", max_new_tokens=12))
    chat.reset()
    reply = chat.send("Hello", max_new_tokens=12)
    start = next(reply)
    refuse_length(chat)
    assert start + "".join(reply) == whole


def test_an_answer_that_fills_the_context() -> None:
    """What earlier turns hold counts."""
    watched = Watched(loaded(hot_package().path))
    watched.turn("x" * (HOT_CONTEXT - 40), max_new_tokens=5)
    result = watched.turn("y").result
    prompt = rendered(watched.chat.messages[:-1])
    assert result.prompt_tokens < 20
    assert len(prompt) + len(result.token_ids) == HOT_CONTEXT
    assert result.finish_reason == "context"


def test_a_conversation_that_fills_the_context() -> None:
    chat = loaded(hot_package().path).chat()
    reply = chat.send("x" * (HOT_CONTEXT - 3))
    assert list(reply) == []
    assert (reply.result.finish_reason, reply.result.token_ids) == ("context", [])


def test_a_package_without_a_template() -> None:
    package = counting_package()
    with pytest.raises(InputError) as raised:
        loaded(package.path).chat()
    expected = f"{package.path}: has no chat template; generate from plain text"
    assert str(raised.value) == expected
