"""Token ids in and out: bounds, special tokens added once, files that are missing or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from onnxlm.errors import InputError, PackageError
from onnxlm.runtime.tokenizer import Tokenizer, check_token_ids


def byte_level(post_processor: Any = None) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<pad>"],
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    if post_processor is not None:
        backend.post_processor = post_processor
    return backend


def template(single: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])


def sentencepiece_style() -> Backend:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": b + 3 for b in range(256)}
    for piece in ["▁", "▁f", "▁fo", "▁fox", "f", "o", "x"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "f"), ("▁f", "o"), ("▁fo", "x")]
    backend = Backend(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "pad_token": "<pad>",
}


# Bounds


@pytest.mark.parametrize(
    ("ids", "position", "value"),
    [([-1], 0, -1), ([0, 9, 10], 2, 10), ([0, 15, -1], 1, 15), ([2**40], 0, 2**40)],
)
def test_ids_outside_are_refused_with_position_and_value(
    ids: list[int], position: int, value: int
) -> None:
    message = (
        f"token id at position {position} is outside the vocabulary; found {value}; allowed: 0 to 9"
    )
    for given_ids in (ids, np.array(ids), tuple(ids)):
        with pytest.raises(InputError) as caught:
            check_token_ids(given_ids, 10)
        assert str(caught.value) == message


@pytest.mark.parametrize("ids", [[0.5], [[1, 2]], ["1"], [True], [None], [1, [2]]])
def test_what_is_no_list_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(InputError, match="allowed: a flat list of integers"):
        check_token_ids(ids, 10)


@given(st.lists(st.integers(0, 9)))
def test_ids_inside_pass_unchanged(ids: list[int]) -> None:
    checked = check_token_ids(ids, 10)
    assert checked.dtype == np.int64
    assert checked.tolist() == ids
    assert check_token_ids(np.array(ids, dtype=np.uint16), 10).tolist() == ids


def test_decode_holds_the_bounds_of_the_model() -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    ids = backend.encode("the fox").ids
    padded = Tokenizer(backend, CONFIG, vocab_size=size + 10)
    assert padded.decode([*ids, size + 9]) == "the fox"  # a row of the table without a token
    for bad in (-1, size + 10):
        with pytest.raises(
            InputError, match=f"position {len(ids)} .*found {bad}; allowed: 0 to {size + 9}"
        ):
            padded.decode([*ids, bad])
    assert Tokenizer(backend, CONFIG).vocab_size == size


def test_encode_refuses_tokens_beyond_the_table() -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    backend.add_tokens([AddedToken("<extra>")])
    small = Tokenizer(backend, CONFIG, vocab_size=size)
    assert small.decode(small.encode("the fox")) == "the fox"
    with pytest.raises(
        InputError, match=f"token id at position 1 .*found {size}; allowed: 0 to {size - 1}"
    ):
        small.encode("a<extra>")
    assert Tokenizer(backend, CONFIG).encode("<extra>") == [size]


# Special tokens


def test_special_ids_from_strings_objects_and_nothing() -> None:
    tokenizer = Tokenizer(byte_level(), CONFIG)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    bare = Tokenizer(byte_level(), {"bos_token": None, "eos_token": "<absent>"})
    assert (bare.bos_token_id, bare.eos_token_id, bare.pad_token_id) == (None, None, None)


@pytest.mark.parametrize("value", [3, ["</s>"], {"id": 3, "content": 7}])
def test_special_token_of_a_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(PackageError, match=r"tokenizer_config\.json: field 'eos_token'; found"):
        Tokenizer(byte_level(), {"eos_token": value})


@pytest.mark.parametrize(
    ("single", "flags", "before", "behind"),
    [
        (None, {}, [], []),
        (None, {"add_bos_token": True}, [0], []),
        (None, {"add_bos_token": False, "add_eos_token": True}, [], [1]),
        ("<s> $A", {}, [0], []),
        ("<s> $A", {"add_bos_token": True}, [0], []),
        ("<s> $A", {"add_bos_token": False}, [0], []),
        ("<s> $A", {"add_bos_token": None, "add_eos_token": True}, [0], [1]),
        ("$A </s>", {"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ("<s> $A </s>", {}, [0], [1]),
    ],
)
def test_special_tokens_are_added_once_and_only_when_asked(
    single: str | None, flags: dict[str, Any], before: list[int], behind: list[int]
) -> None:
    backend = byte_level(None if single is None else template(single))
    tokenizer = Tokenizer(backend, CONFIG | flags)
    plain = backend.encode("the fox", add_special_tokens=False).ids
    assert tokenizer.encode("the fox") == [*before, *plain, *behind]
    assert tokenizer.encode("the fox", add_special_tokens=False) == plain
    assert tokenizer.encode("") == [*before, *behind]
    # A rendered chat brings its own first token.
    assert tokenizer.encode("<s>the fox") == [0, *plain, *behind]


@pytest.mark.parametrize("single", ["$A", "<s> $A", "$A </s>", "<s> $A </s>", "<s> <s> $A"])
@pytest.mark.parametrize("text", ["", "a", "the quick\n fox</s> 🤗", " x "])
def test_without_flags_ids_are_those_of_the_library(single: str, text: str) -> None:
    backend = byte_level(template(single))
    assert Tokenizer(backend, CONFIG).encode(text) == backend.encode(text).ids


def test_a_named_token_of_the_plain_vocabulary_counts_as_special() -> None:
    backend = Backend(models.WordLevel({"a": 0, "<end>": 1}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(backend, {"eos_token": "<end>"})
    assert tokenizer.encode("a<end>") == [0, 1]
    assert tokenizer.decode([0, 1]) == "a"
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "a <end>"


def test_a_vocabulary_without_unknown_token() -> None:
    backend = Backend(models.WordLevel({"b": 0, "<s>": 1}))
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer(backend, {})
    assert tokenizer.encode("b") == [1, 0]
    with pytest.raises(InputError, match=r"the tokenizer cannot encode the text: .*; found 'c'"):
        tokenizer.encode("c")


def test_truncation_and_padding_of_the_file_are_off() -> None:
    backend = byte_level()
    plain = backend.encode("the quick brown fox").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=64, pad_id=2, pad_token="<pad>")
    assert Tokenizer(backend, CONFIG).encode("the quick brown fox") == plain


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InputError, match=r"no valid Unicode text; found 'a\\ud800'"):
        Tokenizer(byte_level(), CONFIG).encode("a\ud800")


# Round trips


@given(st.text())
def test_byte_level_round_trip(text: str) -> None:
    for special in ("<s>", "</s>", "<pad>"):
        text = text.replace(special, "")
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


BYTE_LEVEL = Tokenizer(byte_level(), CONFIG)


@pytest.mark.parametrize("text", ["fox", " fox", "日本 fox", "🤗", "fox  fox", ""])
def test_sentencepiece_style_round_trip(tmp_path: Path, text: str) -> None:
    sentencepiece_style().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")


# Files


def test_from_folder(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).eos_token_id is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer.from_folder(str(tmp_path), vocab_size=500)
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 500)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    for content in ("", "{}", "version https://git-lfs.github.com/spec/v1"):
        file.write_text(content)
        with pytest.raises(PackageError, match=r"tokenizer\.json is not a tokenizer"):
            Tokenizer.from_folder(tmp_path)
    byte_level().save(str(file))
    for content in (b"{", b"[]", b"\xff"):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(PackageError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


@pytest.mark.real_model
def test_real_tokenizer_against_transformers(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from onnxlm.models import checkpoint

    for name, data in checkpoint.read(smollm2).tokenizer_files.items():
        (tmp_path / name).write_bytes(data)
    ours = Tokenizer.from_folder(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    for text in (
        "The capital of France is",
        " x\n\n\ty",
        "日本語 🤗 été 12345",
        "<|im_start|>user\nHi<|im_end|>",
    ):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        for skip in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip) == expected
