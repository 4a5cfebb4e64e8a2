"""Tokenizers rebuilt from GGUF metadata against the libraries that made them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFWriter, TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_writer import write_gguf
from support.hot import hot_model
from support.refusals import refusal
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from onnxlm.models.checkpoint import read
from onnxlm.models.checkpoint.gguf_tokenizer import (
    generation_ids,
    read_vocabulary,
    tokenizer_files,
)
from onnxlm.models.registry import find_architecture

TINY = dict(find_architecture("llama").tiny)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, 1234567890 times.\n\n  Then it rests.",
    "def main():\n\treturn [x ** 2 for x in range(10)]  # squares",
    "Voix ambiguë d'un cœur qui préfère les jattes de kiwis; I'll don't we've.",
    "東京の天気は晴れです。 🤗🚀",
] * 4
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces   three",
    "a  5 and 12 345\t6",
    "line\n\nline\r\n  end ",
    "don't we'll I'D",
    "東京 🤗👨‍👩‍👧 é e\u0301 \u00a0x",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<|im_start|> <|im_end|>y",
]
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
SPLITTERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def bpe(splitter: str) -> Tokenizer:
    """A byte-level BPE trained on the corpus, as a Hugging Face checkpoint would hold it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = SPLITTERS[splitter]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bpe_metadata(tokenizer: Tokenizer, splitter: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    control, normal = int(TokenType.CONTROL), int(TokenType.NORMAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": splitter,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [control if t in SPECIAL else normal for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }


def rebuild(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    vocabulary = read_vocabulary(metadata, "a.gguf")
    assert vocabulary is not None
    files = tokenizer_files(vocabulary, None)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    return tokenizer, json.loads(files["tokenizer_config.json"])


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_byte_level_bpe(splitter: str) -> None:
    original = bpe(splitter)
    rebuilt, config = rebuild(bpe_metadata(original, splitter))
    assert rebuilt.get_vocab_size() == original.get_vocab_size()
    for text in TEXTS:
        ids = rebuilt.encode(text).ids
        assert ids == original.encode(text).ids
        assert rebuilt.decode(ids, skip_special_tokens=False) == text
    assert rebuilt.encode("<|im_start|>").ids == [1]
    assert rebuilt.decode([1, 2, 0]) == ""  # special tokens are no text
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["pad_token"] == "<|end|>"


SMOLLM = bpe("smollm")
REBUILT, _ = rebuild(bpe_metadata(SMOLLM, "smollm"))


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_and_encodes_alike(text: str) -> None:
    ids = REBUILT.encode(text).ids
    assert ids == SMOLLM.encode(text).ids
    assert REBUILT.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("splitter", "pieces"),
    [
        ("llama-bpe", ["ab", "'S", " x", "123", "45", " ", " !?\n\n", "  ", " c", " \n\n", "d"]),
        ("qwen2", ["ab", "'S", " x", *"12345", " ", " !?\n\n", "  ", " c", " \n\n", "d"]),
        ("gpt-2", ["ab", "'", "S", " x", "12345", " ", " !?", "\n\n  ", " c", " \n", "\n", "d"]),
        ("smollm", ["ab", "'", "S", " x", *"12345", " ", " !?", "\n\n  ", " c", " \n", "\n", "d"]),
        ("bloom", ["ab'S", " x12345", "  !?\n\n  ", " c", " \n\n", "d"]),
        (
            "falcon",
            ["ab", "'", "S", " x", "123", "45", "  ", "!?", "\n\n  ", " c", " \n", "\n", "d"],
        ),
        ("gpt-4o", ["ab'S", " x", "123", "45", " ", " !?\n\n", "  ", " c", " \n\n", "d"]),
        ("kimi-k2", ["ab'S", " x", "123", "45", " ", " !?\n\n", "  ", " c", " \n\n", "d"]),
        ("deepseek-v3", ["ab", "'S", " x", "123", "45", " ", " !?\n\n", "  ", " c", " \n\n", "d"]),
        (
            "deepseek-llm",
            [
                "ab",
                "'",
                "S",
                " x",
                "12345",
                " ",
                " !?",
                "\n",
                "\n",
                "  ",
                " c",
                " ",
                "\n",
                "\n",
                "d",
            ],
        ),
    ],
)
def test_words_that_merges_never_cross(splitter: str, pieces: list[str]) -> None:
    """Split by hand with the published patterns."""
    rebuilt, _ = rebuild({**bpe_metadata(bpe("gpt-2"), "gpt-2"), "tokenizer.ggml.pre": splitter})
    text = "ab'S x12345  !?\n\n   c \n\nd"
    assert rebuilt.pre_tokenizer is not None
    spans = [span for _, span in rebuilt.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == pieces


@pytest.mark.parametrize(
    ("splitter", "pieces"),
    [
        ("gpt-4o", ["o", "Neil", " GPUs", "/\u6771\u4eac", " e\u0301a", "?\n/", "\u6771b"]),
        (
            "kimi-k2",
            ["o", "Neil", " GPUs", "/", "\u6771\u4eac", " e\u0301a", "?\n", "/", "\u6771", "b"],
        ),
        (
            "deepseek-v3",
            ["oNeil", " GPUs", "/", "\u6771\u4eac", " e\u0301a", "?\n", "/", "\u6771", "b"],
        ),
        (
            "deepseek-llm",
            [
                *("oNeil", " GPUs", "/", "\u6771\u4eac", " e", "\u0301", "a"),
                *("?", "\n", "/", "\u6771", "b"),
            ],
        ),
    ],
)
def test_words_of_capitals_and_of_characters(splitter: str, pieces: list[str]) -> None:
    text = "oNeil GPUs/\u6771\u4eac e\u0301a?\n/\u6771b"
    rebuilt, _ = rebuild({**bpe_metadata(bpe("gpt-2"), "gpt-2"), "tokenizer.ggml.pre": splitter})
    assert rebuilt.pre_tokenizer is not None
    spans = [span for _, span in rebuilt.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == pieces


def sentencepiece_model(prefix: bool) -> sentencepiece.SentencePieceProcessor:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=stream,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())


def sentencepiece_metadata(
    model: sentencepiece.SentencePieceProcessor, **fields: Any
) -> dict[str, Any]:
    def kind(index: int) -> int:
        if model.is_byte(index):
            return int(TokenType.BYTE)
        if model.is_unknown(index):
            return int(TokenType.UNKNOWN)
        if model.id_to_piece(index).startswith("<|im_"):
            return int(TokenType.USER_DEFINED)
        return int(TokenType.CONTROL if model.is_control(index) else TokenType.NORMAL)

    size = range(model.get_piece_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in size],
        "tokenizer.ggml.scores": [model.get_score(index) for index in size],
        "tokenizer.ggml.token_type": [kind(index) for index in size],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe(prefix: bool) -> None:
    model = sentencepiece_model(prefix)
    rebuilt, _ = rebuild(sentencepiece_metadata(model, add_space_prefix=prefix))
    plain = [text for text in TEXTS if "<|" not in text]
    for text in plain + CORPUS[:4]:
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        assert ids == model.encode(text)
        assert rebuilt.decode(ids) == text
    marker = model.piece_to_id("<|im_start|>")
    assert rebuilt.encode("<|im_start|>", add_special_tokens=False).ids == [marker]


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, [1, 9]),  # SentencePiece models of the Llama family start a text with bos
        ({"add_bos_token": False}, [9]),
        ({"add_eos_token": True}, [1, 9, 2]),
    ],
)
def test_tokens_around_a_text(fields: dict[str, bool], ids: list[int]) -> None:
    model = sentencepiece_model(prefix=False)
    rebuilt, _ = rebuild(sentencepiece_metadata(model, add_space_prefix=False, **fields))
    text = model.id_to_piece(300).replace("\u2581", " ")
    expected = [300 if index == 9 else index for index in ids]
    assert rebuilt.encode(text).ids == expected


def test_byte_level_models_start_with_bos_only_when_told() -> None:
    metadata = bpe_metadata(SMOLLM, "smollm")
    rebuilt, _ = rebuild({**metadata, "tokenizer.ggml.add_bos_token": True})
    assert rebuilt.encode("fox").ids == [1, *SMOLLM.encode("fox").ids]


@pytest.mark.parametrize("splitter", ["llama-bpe", "llama3", "llama-v3", "falcon3"])
@pytest.mark.parametrize(("told", "starts"), [(None, True), (True, True), (False, False)])
def test_llama_3_starts_with_bos_unless_told(
    splitter: str, told: bool | None, starts: bool
) -> None:
    """llama.cpp, `llama-vocab.cpp`: these splitters set add_bos; files of 2024 do not say it."""
    metadata = bpe_metadata(SMOLLM, splitter)
    if told is not None:
        metadata["tokenizer.ggml.add_bos_token"] = told
    rebuilt, _ = rebuild(metadata)
    assert (rebuilt.encode("fox").ids[0] == 1) == starts


def ends_of(tokens: dict[str, int], **ids: str) -> int | list[int]:
    """What ends a turn, by a vocabulary's (token, type)s and its metadata's ids, given as tokens."""
    names = list(tokens)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": list(tokens.values()),
        **{f"tokenizer.ggml.{key}": names.index(token) for key, token in ids.items()},
    }
    vocabulary = read_vocabulary(metadata, "a.gguf")
    assert vocabulary is not None
    found: int | list[int] = generation_ids(vocabulary).get("eos_token_id", [])
    return found


NORMAL, CONTROL, USER_DEFINED = (
    int(kind) for kind in (TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED)
)


def test_every_token_that_the_metadata_says_ends_a_turn() -> None:
    tokens = {"a": NORMAL, "b": CONTROL, "c": CONTROL, "d": CONTROL}
    assert ends_of(tokens, eos_token_id="b") == 1
    assert ends_of(tokens, eos_token_id="b", eot_token_id="b") == 1
    assert ends_of(tokens, eos_token_id="c", eot_token_id="b", eom_token_id="d") == [2, 1, 3]
    assert ends_of(tokens) == []


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
@pytest.mark.parametrize(
    "text",
    [
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "[EOT]", "[EOS]"),
    ],
)
def test_tokens_whose_text_ends_a_turn(text: str, kind: int) -> None:
    """llama.cpp, `llama-vocab.cpp`, special_eog_ids."""
    assert ends_of({"eos": CONTROL, "x": NORMAL, text: kind}, eos_token_id="eos") == [0, 2]
    assert ends_of({"eos": CONTROL, "x": NORMAL, text: NORMAL}, eos_token_id="eos") == 0


def test_a_message_that_ends_within_a_turn() -> None:
    """gpt-oss: `<|end|>` is followed by the next message; its generation_config has the other three."""
    texts = ("<|endoftext|>", "<|return|>", "<|end|>", "<|call|>")
    tokens = dict.fromkeys(texts, CONTROL)
    assert ends_of(tokens, eos_token_id="<|return|>") == [1, 0, 3]
    del tokens["<|call|>"]
    assert ends_of(tokens, eos_token_id="<|return|>") == [1, 0, 2]


def _write(path: Path, metadata: dict[str, Any]) -> Path:
    def edit(writer: GGUFWriter) -> None:
        for key, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_uint32(key, value)

    return write_gguf(path, hot_model({**TINY, "vocab_size": 400}), edit=edit)


def test_tokenizer_through_a_file(tmp_path: Path) -> None:
    metadata = bpe_metadata(SMOLLM, "smollm")
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    checkpoint = read(_write(tmp_path / "a.gguf", metadata))
    files = checkpoint.tokenizer_files
    assert files["chat_template.jinja"] == b"{{ messages }}"
    rebuilt = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert rebuilt.encode(CORPUS[3]).ids == SMOLLM.encode(CORPUS[3]).ids
    assert checkpoint.generation_config["eos_token_id"] == [2, 0]  # <|im_end|>, <|end|>
    assert checkpoint.raw_config["eos_token_id"] == [2, 0]


def test_file_without_a_tokenizer(tmp_path: Path) -> None:
    checkpoint = read(write_gguf(tmp_path / "a.gguf", hot_model(TINY)))
    assert dict(checkpoint.tokenizer_files) == {}
    assert checkpoint.generation_config == {}


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("model", "bert", r"tokenizer.ggml.model is not supported; found 'bert'; allowed: gpt2"),
        ("pre", "viking", "tokenizer.ggml.pre is not supported; found 'viking'; allowed: bloom"),
        ("eos_token_id", 400, "eos_token_id is outside the vocabulary; found 400; allowed: 0 to"),
        ("token_type", [1, 1], "token_type does not fit the tokens; found 2 entries"),
        ("merges", ["q\u0416 z"], "merges joins what is no token"),
    ],
)
def test_faults_are_named(tmp_path: Path, key: str, value: Any, text: str) -> None:
    metadata = {**bpe_metadata(SMOLLM, "smollm"), f"tokenizer.ggml.{key}": value}
    assert text in refusal(_write(tmp_path / "a.gguf", metadata))


def test_missing_field_is_named(tmp_path: Path) -> None:
    metadata = bpe_metadata(SMOLLM, "smollm")
    del metadata["tokenizer.ggml.merges"]
    message = refusal(_write(tmp_path / "a.gguf", metadata))
    assert "metadata key tokenizer.ggml.merges is missing" in message


def test_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    metadata = bpe_metadata(SMOLLM, "smollm")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "extra"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    message = refusal(_write(tmp_path / "a.gguf", metadata))
    assert "more tokens than the embedding has rows; found 401; allowed: at most 400" in message
