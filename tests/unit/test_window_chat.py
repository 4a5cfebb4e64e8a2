"""Chats of a model whose caches lose tokens: a turn runs what is new, and what a rewind does not find."""

from __future__ import annotations

import pytest
from support.chats import rendered
from support.hot import oracle_logits
from support.runtime_models import WINDOW, loaded, windowed_oracle, windowed_package

from onnxlm.runtime import Chat, load
from onnxlm.runtime.state_buffers import ROOM, tokens_kept

both = pytest.mark.parametrize("lowering", ["ort", "portable"])
LONG = "A long story. " * 30  # 420 tokens: more than caches hold


def new_chat(lowering: str) -> Chat:
    return Chat(loaded(windowed_package(lowering).path), "Be brief.")


def answer(chat: Chat, text: str, **fields: object) -> int:
    """How many tokens of the conversation a turn runs; its answer is that of transformers, at once."""
    reply = chat.send(text, max_new_tokens=7, **fields)
    "".join(reply)
    ids = rendered(chat.messages[:-1])
    whole = oracle_logits(windowed_oracle(), [*ids, *reply.result.token_ids])
    assert reply.result.token_ids == whole.argmax(-1)[len(ids) - 1 : -1].tolist()
    return reply.result.prompt_tokens


@both
def test_turns_run_their_own_tokens(lowering: str) -> None:
    chat = new_chat(lowering)
    assert answer(chat, LONG) > tokens_kept(WINDOW) + ROOM
    for text in ("And then?", "x", "Go on."):
        assert answer(chat, text) < 30
    windowed = chat._batch.cache.buffers["past_key_values.0.key"].shape()[2]
    assert windowed <= tokens_kept(WINDOW) + ROOM


@both
def test_a_rewind_beyond_what_is_held_runs_all_again(lowering: str) -> None:
    chat = new_chat(lowering)
    answer(chat, "Hello")
    answer(chat, LONG)
    chat.rewind(messages=3)
    assert answer(chat, "And then?") > 30
    assert answer(chat, "x") < 30


@both
def test_a_full_cache_keeps_what_a_rewind_needs(lowering: str) -> None:
    chat = Chat(load(windowed_package(lowering).path, threads=1, full_cache=True), "Be brief.")
    answer(chat, "Hello")
    answer(chat, LONG)
    chat.rewind(messages=3)
    assert answer(chat, "And then?") < 30


@both
def test_a_short_rewind_does_not(lowering: str) -> None:
    chat = new_chat(lowering)
    answer(chat, LONG)
    answer(chat, "x")
    other = chat.fork()
    chat.rewind(messages=3)
    assert answer(chat, "Why?") < 40
    assert answer(other, "Why?") < 30


@both
def test_beams_come_back_to_the_prompt(lowering: str) -> None:
    """A search ends by undoing what it ran, which may be more than is held."""
    chat = new_chat(lowering)
    answer(chat, LONG)
    "".join(chat.send("x", num_beams=3, max_new_tokens=80))
    answer(chat, "And then?")
