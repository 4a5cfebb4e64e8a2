"""Chats saved, loaded, forked, rewound and begun from a shared prefix: each turn as transformers at once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chats import common, rendered
from support.runtime_models import HOT_CONTEXT, at_once, hot_package, loaded

from onnxlm.errors import InputError, OnnxlmError
from onnxlm.runtime import Chat, LanguageModel
from onnxlm.runtime.prefix_cache import PrefixCache

both = pytest.mark.parametrize("lowering", ["ort", "portable"])
SYSTEM = "You are a careful clerk who answers in few words."
WORDS = ("Hello", "And then?", "x")


def hot(lowering: str = "ort") -> LanguageModel:
    return loaded(hot_package(lowering).path)


def talk(chat: Chat, texts: Sequence[str] = WORDS) -> None:
    for text in texts:
        for _ in chat.send(text, max_new_tokens=7):
            pass


def assert_turn(chat: Chat, text: str, known: int | None = None) -> list[int]:
    """One turn is what transformers says of the whole conversation; of which `known` tokens are not run."""
    held = chat.token_ids
    reply = chat.send(text, max_new_tokens=7)
    "".join(reply)
    result = reply.result
    ids = rendered(chat.messages[:-1])
    assert result.prompt_tokens == len(ids) - min(common(held, ids), len(ids) - 1)
    if known is not None:
        assert len(ids) - result.prompt_tokens == known
    whole = at_once([*ids, *result.token_ids])
    assert result.token_ids == whole.argmax(-1)[len(ids) - 1 : -1].tolist()
    assert_cache(chat)
    return result.token_ids


def assert_cache(chat: Chat) -> None:
    """The cache holds these tokens and no others: what comes behind them is right."""
    ids = chat.token_ids
    logits = chat._batch.prefill_logits([[1]])[0]
    chat._batch.rewind(len(ids))
    theirs = at_once([*ids, 1])[-1].numpy()
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


# Files


@both
def test_a_loaded_chat_goes_on_where_it_was_saved(lowering: str, tmp_path: Path) -> None:
    model = hot(lowering)
    chat = model.chat(SYSTEM)
    talk(chat)
    chat.save(tmp_path / "chat.json")
    messages, ids = chat.messages, chat.token_ids
    again = model.load_chat(tmp_path / "chat.json")
    assert (again.messages, again.token_ids, again.system) == (messages, ids, SYSTEM)
    assert_cache(again)
    expected = assert_turn(chat, "more")
    assert assert_turn(again, "more", known=common(ids, rendered(again.messages))) == expected
    again.reset()
    assert again.messages == messages[:1]


def test_an_answer_that_still_runs_is_saved_as_far_as_it_has_come(tmp_path: Path) -> None:
    model = hot()
    chat = model.chat()
    reply = chat.send("Hello", max_new_tokens=30)
    pieces = [next(reply) for _ in range(3)]
    chat.save(tmp_path / "chat.json")
    again = model.load_chat(tmp_path / "chat.json")
    assert again.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert len("".join(reply)) > 0, "the first goes on"
    assert_turn(again, "more")


def test_settings_are_saved(tmp_path: Path) -> None:
    model = hot()
    chat = model.chat(tools=[{"name": "clock"}], variables={"place": "Köln"})
    chat.save(tmp_path / "chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert saved["settings"]["tools"] == [{"name": "clock"}]
    assert model.load_chat(tmp_path / "chat.json")._settings == chat._settings


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    chat = hot().chat()
    with pytest.raises(InputError, match=r"gone/c\.json: cannot be written; found No such file"):
        chat.save(tmp_path / "gone" / "c.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder: cannot be written"):
        chat.save(tmp_path / "folder")
    for value in (float, math.nan, "\udcff"):
        with pytest.raises(InputError, match="cannot be saved as JSON"):
            hot().chat(variables={"x": value}).save(tmp_path / "c.json")
    with pytest.raises(InputError, match="cannot be written; found embedded null byte"):
        chat.save(str(tmp_path / "c\0.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"format": 2}, "field 'format'; allowed: 1"),
        ({"messages": "x"}, "field 'messages'; allowed: a list of objects with 'role'"),
        ({"messages": [{"content": "x"}]}, "field 'messages'"),
        ({"token_ids": [1.5]}, "field 'token_ids'; allowed: a list of whole numbers"),
        ({"token_ids": [True]}, "field 'token_ids'"),
        ({"token_ids": None}, "field 'token_ids'"),
        ({"system": 3}, "field 'system'; allowed: text or null"),
        ({"settings": []}, "field 'settings'; allowed: an object"),
        ({"settings": {"tool": 1}}, "field 'settings'"),
        ({"settings": {"variables": [1]}}, "field 'settings'"),
        ({"settings": {"name": []}}, "field 'settings'"),
        ({"settings": {"tools": [3]}}, "field 'settings'"),
        ({"more": 1}, "field 'more'; allowed: none of that name"),
        ({"token_ids": [5, 10_000]}, "token id at position 1 is outside the vocabulary"),
        ({"token_ids": [5] * (HOT_CONTEXT + 1)}, f"found {HOT_CONTEXT + 1} positions"),
    ],
)
def test_a_file_that_is_no_chat(tmp_path: Path, change: dict[str, Any], shown: str) -> None:
    file = tmp_path / "chat.json"
    hot().chat().save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError) as caught:
        hot().load_chat(file)
    assert shown in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", None])
def test_a_file_that_is_no_json(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(OnnxlmError, match=r"c\.json: "):
        hot().load_chat(tmp_path / "c.json")


# Forks


@both
def test_forks_share_nothing(lowering: str) -> None:
    chat = hot(lowering).chat(SYSTEM)
    talk(chat)
    known = chat.token_ids
    fork = chat.fork()
    assert (fork.messages, fork.token_ids) == (chat.messages, known)
    one = assert_turn(chat, "left")
    other = assert_turn(fork, "right")
    fork.messages[0]["content"] = "changed"
    assert fork.messages[0] == chat.messages[0]
    assert_turn(chat, "left again")
    fork.reset()
    assert len(chat.messages) == 11
    assert_cache(chat)
    assert len(one) == len(other) == 7


def test_a_fork_of_an_answer_that_still_runs() -> None:
    chat = hot().chat()
    whole = "".join(chat.fork().send("Hello", max_new_tokens=20))
    reply = chat.send("Hello", max_new_tokens=20)
    start = [next(reply) for _ in range(4)]
    fork = chat.fork()
    assert fork.messages[-1]["content"] == "".join(start)
    assert_turn(fork, "enough")
    assert "".join([*start, *reply]) == whole


# Rewinding


@both
def test_rewound_to_every_message(lowering: str) -> None:
    chat = hot(lowering).chat(SYSTEM)
    talk(chat)
    messages = chat.messages
    for count in range(len(messages), -1, -1):
        fork = chat.fork()
        fork.rewind(messages=count)
        assert fork.messages == messages[:count]
        # Nothing of what stays is run again but where the answer's text is spelled in other tokens.
        assert_turn(fork, "other")


def test_an_answer_given_again_is_the_same_answer() -> None:
    chat = hot().chat(SYSTEM)
    talk(chat)
    messages = chat.messages
    chat.rewind(messages=len(messages) - 1)
    reply = chat.answer(max_new_tokens=7)
    assert "".join(reply) == messages[-1]["content"]
    assert reply.result.prompt_tokens == 1, "all of it was known"
    assert chat.messages == messages


def test_rewound_to_every_token() -> None:
    """What stays is what the first tokens of the conversation, by transformers, say in whole messages."""
    chat = hot().chat("Be brief.")
    talk(chat, WORDS[:2])
    messages = chat.messages
    ends = [len(rendered(messages[:n])) for n in range(1, len(messages) + 1)]
    for count in range(ends[-1] + 2):
        fork = chat.fork()
        fork.rewind(tokens=count)
        kept = fork.messages
        whole = sum(kept[:n] == messages[:n] for n in range(1, len(messages) + 1))
        assert kept[:whole] == messages[:whole]
        if len(kept) > whole:
            (part,) = kept[whole:]
            assert part["role"] == "assistant"
            assert messages[whole]["content"].startswith(part["content"])
            assert len(rendered(kept[:whole])) + len(part["content"]) == count
        elif kept:
            last = len(rendered(kept))
            opened = kept[-1]["role"] == "assistant"
            assert last - 2 * opened <= count, "an answer's end mark and the next turn's beginning"
    assert fork.messages == messages


def test_an_answer_that_was_cut_goes_on() -> None:
    chat = hot().chat("Be brief.")
    "".join(chat.send("Hello", max_new_tokens=12))
    messages = chat.messages
    answer = messages[-1]["content"].strip()
    chat.rewind(tokens=len(rendered(messages[:-1])) + 5)
    begun = chat.messages[-1]["content"]
    assert messages[-1]["content"].startswith(begun)
    assert len(begun) == 5
    reply = chat.answer(max_new_tokens=6)
    text = "".join(reply)
    assert chat.messages[-1]["content"] == begun + text
    ids = [*rendered(messages[:-1]), *chat._model.encode(begun.lstrip(), add_special_tokens=False)]
    whole = at_once([*ids, *reply.result.token_ids])
    assert reply.result.token_ids == whole.argmax(-1)[len(ids) - 1 : -1].tolist()
    assert answer


@pytest.mark.parametrize(
    ("to", "shown"),
    [
        ({}, "a chat is rewound to; allowed: a number of messages, or of tokens"),
        ({"messages": 1, "tokens": 1}, "a number of messages, or of tokens"),
        ({"messages": 2}, "messages that a chat is rewound to; found 2; allowed: 0 to 1"),
        ({"messages": -1}, "found -1"),
        ({"tokens": -1}, "tokens that a chat is rewound to; found -1; allowed: 0 or more"),
    ],
)
def test_rewound_to_what_is_not_there(to: dict[str, int], shown: str) -> None:
    chat = hot().chat(SYSTEM)
    with pytest.raises(InputError) as caught:
        chat.rewind(**to)
    assert shown in str(caught.value)


def test_nothing_to_answer() -> None:
    with pytest.raises(InputError, match="at least one message"):
        hot().chat().answer()
    chat = hot().chat()
    chat._messages = [{"role": "assistant", "tool_calls": []}]
    with pytest.raises(InputError, match="an answer without text; found None"):
        chat.answer()


# System messages and other roles


@pytest.mark.parametrize("before", [None, "Be brief."])
@pytest.mark.parametrize("after", [None, "Be long."])
def test_another_system_message(before: str | None, after: str | None) -> None:
    chat = hot().chat(before)
    talk(chat, WORDS[:1])
    turns = chat.messages[-2:]
    chat.system = after
    head = [] if after is None else [{"role": "system", "content": after}]
    assert chat.messages == [*head, *turns]
    assert_turn(chat, "more")
    chat.reset()
    assert (chat.messages, chat.system) == (head, after)


def test_a_message_of_another_role() -> None:
    chat = hot().chat()
    "".join(chat.send({"role": "user", "content": "Hello"}, max_new_tokens=3))
    "".join(chat.send({"role": "system", "content": "note"}, max_new_tokens=3))
    assert [message["role"] for message in chat.messages] == [
        "user",
        "assistant",
        "system",
        "assistant",
    ]


# Shared prefixes


@both
def test_a_shared_prefix_is_run_once(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hot(lowering)
    monkeypatch.setattr(model, "prefixes", PrefixCache(model.sessions))
    chats = [model.chat(SYSTEM, share_prefix=True) for _ in range(3)]
    assert len(model.prefixes) == 1
    prefix = (
        len(rendered([{"role": "system", "content": SYSTEM}])) - 1
    )  # <|assistant|> is no part of it
    for chat, text in zip(chats, WORDS, strict=True):
        # <|user|> comes behind it in every conversation.
        assert_turn(chat, text, known=prefix + 1)
    for chat in chats:
        assert_turn(chat, "again")
    chats[0].reset()
    assert_turn(chats[0], "Hello", known=prefix + 1)


def test_a_chat_without_a_system_message_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hot()
    monkeypatch.setattr(model, "prefixes", PrefixCache(model.sessions))
    assert_turn(model.chat(share_prefix=True), "Hello", known=0)
    assert len(model.prefixes) == 0


def test_few_prefixes_are_kept() -> None:
    model = hot()
    prefixes = PrefixCache(model.sessions, entries=2)
    for ids in ([1], [2], [1], [3]):
        assert prefixes.begin(ids).lengths.tolist() == [1]
    assert len(prefixes) == 2
    assert set(prefixes._held) == {(1,), (3,)}
    with pytest.raises(InputError, match="outside the vocabulary"):
        prefixes.begin([10_000])
    assert len(prefixes) == 2
