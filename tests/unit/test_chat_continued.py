"""Answers that go on: the text is one, whatever a decoder does at its beginning, and of whole characters."""

from __future__ import annotations

import json

from support.hot_packages import LETTERS
from support.runtime_models import changed, hot_package, loaded
from tokenizers import pre_tokenizers

from onnxlm.package import Package


def test_a_space_that_an_answer_goes_on_with_stays() -> None:
    """A decoder may drop the space that a text begins with, as Llama's does; this text has begun before."""
    spec = json.loads((hot_package().path / "tokenizer.json").read_text(encoding="utf-8"))
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    spec["decoder"] = {"type": "Sequence", "decoders": [{"type": "Fuse"}, strip]}
    model = loaded(changed(hot_package(), {"tokenizer.json": spec}).path)
    chat, space = model.chat(), LETTERS.index(" ")
    assert "".join(chat.send("Hello", max_new_tokens=1, logit_bias={5: 1e4})) == LETTERS[5]
    for fields in ({}, {"stop_strings": ["never"]}, {"num_beams": 2}):
        fork = chat.fork()
        reply = fork.answer(max_new_tokens=2, logit_bias={space: 1e4}, **fields)
        assert "".join(reply) == reply.result.text == "  "
        assert fork.messages[-1]["content"] == LETTERS[5] + "  "
    assert model.generate("Hello", max_new_tokens=2, logit_bias={space: 1e4}).text == " "


def bytes_package() -> Package:
    """The hot model with tokens of single bytes, of two characters of four bytes among them."""
    letters = [*LETTERS]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀🎉")
    for place, letter in enumerate(dict.fromkeys("".join(text for text, _ in spelled))):
        letters[-1 - place] = letter
    spec = json.loads((hot_package().path / "tokenizer.json").read_text(encoding="utf-8"))
    spec["model"]["vocab"] = {letter: index for index, letter in enumerate(letters)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    spec["pre_tokenizer"] = spec["decoder"] = byte_level | {"use_regex": False}
    return changed(hot_package(), {"tokenizer.json": spec})


def test_an_answer_is_cut_between_characters() -> None:
    """One that stays holds no part of a character, and no more tokens than were asked for."""
    model = loaded(bytes_package().path)
    answer = "a😀b🎉c"
    question = {"role": "user", "content": "x"}
    start = len(model.encode("<|user|>x<|end|><|assistant|>"))
    assert len(model.encode(answer)) == 11
    kept = []
    for count in range(start, start + 12):
        chat = model.chat()
        chat._messages = [question, {"role": "assistant", "content": answer}]
        chat.rewind(tokens=count)
        kept.append(chat.messages[1]["content"] if len(chat.messages) > 1 else "")
        assert len(model.encode(f"-{kept[-1]}")) <= 1 + count - start
    assert kept == ["", *["a"] * 4, "a😀", *["a😀b"] * 4, "a😀b🎉", answer]


def test_an_answer_that_ends_inside_a_character_goes_on_before_it() -> None:
    model = loaded(bytes_package().path)
    first = model.encode("😀")[0]
    chat = model.chat()
    "".join(chat.send("x", max_new_tokens=1, logit_bias={first: 1e4}))
    assert chat.messages[-1]["content"] == "\ufffd"
    letter = model.encode("a")[0]
    "".join(chat.answer(max_new_tokens=2, logit_bias={letter: 1e4}))
    assert chat.messages[-1]["content"] == "aa"
