"""Streamed text is the one-shot decode of the `tokenizers` library, cut into pieces: for every decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from onnxlm.errors import InputError
from onnxlm.runtime.row_text import RowText
from onnxlm.runtime.streaming import TextStream
from onnxlm.runtime.tokenizer import Tokenizer

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "the", "▁fox", "ing", "né", "##ing", "##", ".", "n't", "?", " ", "a"]
WORDS += ["x</w>", "</w>", ""]


def byte_level() -> Backend:
    """A trained byte-level BPE: every byte is a token, so any byte string can be forced."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
    )
    text = ["the quick brown fox jumps over the lazy dog", "日本語 日本 été 🤗🤗 été"] * 4
    backend.train_from_iterator(text, trainer)
    backend.add_tokens([AddedToken("<think>"), AddedToken("two words"), AddedToken("日本")])
    return backend


def pieces(decoder: decoders.Decoder | None) -> Backend:
    """A vocabulary of byte tokens and words in front of `decoder`."""
    backend = Backend(models.WordLevel({text: i for i, text in enumerate(BYTE_TOKENS + WORDS)}))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return backend


def llama() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


STREAMED: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level,
    "llama": lambda: pieces(llama()),
    "gemma": lambda: pieces(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "fused_replace": lambda: pieces(
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])
    ),
    "byte_fallback_metaspace": lambda: pieces(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "metaspace": lambda: pieces(decoders.Metaspace()),
    "metaspace_never": lambda: pieces(decoders.Metaspace(prepend_scheme="never")),
    "word_piece": lambda: pieces(decoders.WordPiece()),
    "word_piece_verbatim": lambda: pieces(decoders.WordPiece(cleanup=False)),
    "bpe": lambda: pieces(decoders.BPEDecoder()),
    "regex": lambda: pieces(decoders.Replace(Regex("▁+|n"), "_")),
    "strip": lambda: pieces(decoders.Strip("▁", 2, 0)),
    "none": lambda: pieces(None),
}
# Their text comes at the end only, yet is the same.
AT_THE_END: dict[str, Callable[[], Backend]] = {
    "ctc": lambda: pieces(decoders.CTC(pad_token="a", word_delimiter_token="▁")),
    "fused_long_replace": lambda: pieces(
        decoders.Sequence([decoders.Fuse(), decoders.Replace("the▁", "_")])
    ),
    "fused_strip_end": lambda: pieces(
        decoders.Sequence([decoders.Fuse(), decoders.Strip("x", 0, 1)])
    ),
}
BACKENDS = {name: build() for name, build in (STREAMED | AT_THE_END).items()}


def streamed(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_concatenate_to_the_one_shot_decode(name: str, data: st.DataObject) -> None:
    backend = BACKENDS[name]
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=30))
    if name == "fused_strip_end":
        ids = [
            backend.token_to_id("a"),
            *ids,
        ]  # the library panics on a text shorter than the strip
    skip = data.draw(st.booleans())
    got = streamed(Tokenizer(backend, {}), ids, skip)
    assert "".join(got) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", sorted(set(STREAMED) - {"bpe"}))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_text_that_goes_on(name: str, data: st.DataObject) -> None:
    """What comes behind a beginning is what the library has behind it when it decodes both at once."""
    backend = BACKENDS[name]
    word = st.integers(0, backend.get_vocab_size() - 1)
    if name != "byte_level":  # bytes that spell nothing make others of what went before
        word = st.integers(len(BYTE_TOKENS), backend.get_vocab_size() - 1)
    begun, new = (data.draw(st.lists(word, max_size=8)) for _ in range(2))
    before, whole = backend.decode(begun), backend.decode([*begun, *new])
    assume(whole.startswith(before))
    row = RowText(Tokenizer(backend, {}), (), begun)
    for token_id in new:
        row.push(token_id)
    row.finish()
    assert row.text == whole[len(before) :]


@pytest.mark.parametrize("name", ["byte_level", "llama"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_utf8_cut_anywhere_and_broken_anywhere(name: str, data: st.DataObject) -> None:
    """Whole characters as single bytes, with stray bytes between them: the hard case, drawn often."""
    backend = BACKENDS[name]
    text = data.draw(st.text(max_size=6)).encode()
    position = data.draw(st.integers(0, len(text)))
    stray = data.draw(st.binary(max_size=2))
    raw = text[:position] + stray + text[position:]
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    ids = [byte_id(backend, byte) for byte in raw]
    got = "".join(streamed(Tokenizer(backend, {}), ids))
    assert got == backend.decode(ids)


def _byte_ids() -> dict[int, int]:
    """Token of each byte in the byte-level vocabulary, by how the library spells a text with that byte."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = {byte: chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}  # in no UTF-8 text
    for text in map(chr, [*range(0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 64)]):
        spelled |= dict(zip(text.encode(), level.pre_tokenize_str(text)[0][0], strict=True))
    return {byte: BACKENDS["byte_level"].token_to_id(text) for byte, text in spelled.items()}


BYTE_IDS = _byte_ids()


def byte_id(backend: Backend, byte: int) -> int:
    """The token that is this one byte."""
    fallback: int | None = backend.token_to_id(f"<0x{byte:02X}>")
    return BYTE_IDS[byte] if fallback is None else fallback


@pytest.mark.parametrize("name", STREAMED)
def test_words_come_at_once(name: str) -> None:
    """No token waits longer than the decoder makes it: one more token at most."""
    backend = BACKENDS[name]
    word = backend.token_to_id("the")
    got = streamed(Tokenizer(backend, {}), [word] * 5)
    assert all(text.count("the") <= 1 for text in got)
    assert got[-1].count("the") <= 1
    assert "".join(got).count("the") == 5


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
@pytest.mark.parametrize("skip", [True, False])
def test_cut_after_every_prefix(name: str, skip: bool) -> None:
    """Emoji of one and of seven code points, kanji, a special token inside a character, a stray byte."""
    backend = BACKENDS[name]
    special = backend.token_to_id("<|end|>" if name == "byte_level" else "<s>")
    family = [byte_id(backend, byte) for byte in "日本語 🤗👨‍👩‍👧é".encode()]
    words = [backend.token_to_id("▁fox" if name != "byte_level" else "the")]
    stray = [byte_id(backend, 0xFF)]
    ids = [
        special,
        *words,
        *family,
        *words,
        special,
        *family[:4],
        special,
        *stray,
        *family[4:],
        *words,
    ]
    tokenizer = Tokenizer(backend, {})
    whole = backend.decode(ids, skip_special_tokens=skip)
    for length in range(len(ids) + 1):
        *pushed, rest = streamed(tokenizer, ids[:length], skip)
        shown = "".join(pushed)
        assert shown + rest == backend.decode(ids[:length], skip_special_tokens=skip)
        assert whole.startswith(shown), "what was shown is never taken back"
    assert "👨‍👩‍👧" in whole


def test_a_character_comes_with_its_last_byte() -> None:
    backend = BACKENDS["byte_level"]
    ids = [BYTE_IDS[byte] for byte in "é🤗x".encode()]
    assert streamed(Tokenizer(backend, {}), ids) == ["", "é", "", "", "", "🤗", "x", ""]


def test_an_invalid_byte_does_not_hold_back_the_text_behind_it() -> None:
    backend = BACKENDS["byte_level"]
    ids = [BYTE_IDS[byte] for byte in b"a\x80b\xf0\x9fc"]
    assert streamed(Tokenizer(backend, {}), ids) == ["a", "\ufffd", "b", "", "", "\ufffdc", ""]


def test_unfinished_character_at_the_end_becomes_replacement_marks() -> None:
    backend = BACKENDS["byte_level"]
    ids = [BYTE_IDS[byte] for byte in "🤗".encode()[:3]]
    assert streamed(Tokenizer(backend, {}), ids) == ["", "", "", "\ufffd"]
    fallback = BACKENDS["llama"]
    ids = [byte_id(fallback, byte) for byte in "🤗".encode()[:3]]
    assert streamed(Tokenizer(fallback, {}), ids) == ["", "", "", "\ufffd" * 3]


def test_byte_run_is_one_text_or_marks_for_every_byte() -> None:
    """What the library decides over a whole run can only be said when the run ends."""
    backend = BACKENDS["llama"]
    run = [byte_id(backend, byte) for byte in "你".encode()]
    fox = backend.token_to_id("▁fox")
    tokenizer = Tokenizer(backend, {})
    assert streamed(tokenizer, [*run, fox]) == ["", "", "", "你 fox", ""]
    broken = [*run, byte_id(backend, 0xFF), fox]
    assert "".join(streamed(tokenizer, broken)) == "\ufffd" * 4 + " fox"


def test_leading_space_is_dropped_at_the_start_only() -> None:
    backend = BACKENDS["llama"]
    fox, start = backend.token_to_id("▁fox"), backend.token_to_id("<s>")
    assert streamed(Tokenizer(backend, {}), [start, fox, start, fox]) == ["", "fox", "", " fox", ""]


def test_special_token_inside_a_character_is_skipped() -> None:
    backend = BACKENDS["byte_level"]
    end = backend.token_to_id("<|end|>")
    first, second = (BYTE_IDS[byte] for byte in "é".encode())
    assert streamed(Tokenizer(backend, {}), [first, end, second]) == ["", "", "é", ""]
    shown = streamed(Tokenizer(backend, {}), [first, end, second], skip=False)
    assert "".join(shown) == "\ufffd<|end|>\ufffd"


def test_ids_without_a_token_have_no_text_and_ids_outside_are_refused() -> None:
    backend = BACKENDS["byte_level"]
    size = backend.get_vocab_size()
    stream = TextStream(Tokenizer(backend, {}, vocab_size=size + 8))
    assert stream.push(size + 7) == ""
    with pytest.raises(InputError, match=f"found {size + 8}; allowed: 0 to {size + 7}"):
        stream.push(size + 8)
    with pytest.raises(InputError, match="found -1"):
        stream.push(-1)


def test_two_streams_share_nothing() -> None:
    backend = BACKENDS["llama"]
    tokenizer = Tokenizer(backend, {})
    rows = [[byte_id(backend, byte) for byte in text.encode()] for text in ("你好你", "éé日日é")]
    streams = [TextStream(tokenizer), TextStream(tokenizer)]
    texts = ["", ""]
    for step in range(max(map(len, rows))):
        for row, ids in enumerate(rows):
            if step < len(ids):
                texts[row] += streams[row].push(ids[step])
    texts = [text + stream.finish() for text, stream in zip(texts, streams, strict=True)]
    assert texts == ["你好你", "éé日日é"]


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_work_does_not_grow_with_the_text(name: str) -> None:
    """A hundred thousand unfinished bytes: a stream that decodes what it holds again would not return."""
    backend = BACKENDS[name]
    ids = [byte_id(backend, 0x80)] * 100_000
    assert "".join(streamed(Tokenizer(backend, {}), ids)) == "\ufffd" * 100_000


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from onnxlm.models import checkpoint

    folder = tmp_path_factory.mktemp("tokenizer")
    for name, data in checkpoint.read(smollm2).tokenizer_files.items():
        (folder / name).write_bytes(data)
    return Tokenizer.from_folder(folder)


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [("🤗", 3), ("👨‍👩‍👧", 13), ("日本語", 6), (" Hello,\n  world 🤗日本é", None)],
)
def test_real_tokenizer_cut_after_every_token(
    smollm2_tokenizer: Tokenizer, text: str, tokens: int | None
) -> None:
    ids = smollm2_tokenizer.encode(text)
    assert tokens is None or len(ids) == tokens
    assert "".join(streamed(smollm2_tokenizer, ids)) == text
    for length in range(len(ids)):
        assert "".join(streamed(smollm2_tokenizer, ids[:length])) == smollm2_tokenizer.decode(
            ids[:length]
        )


@pytest.mark.real_model
@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=24))
def test_real_tokenizer_on_random_ids(smollm2_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(smollm2_tokenizer, ids)) == smollm2_tokenizer.decode(ids)
