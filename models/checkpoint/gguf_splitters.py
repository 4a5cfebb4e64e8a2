"""Pieces that merges never cross, one splitter a `tokenizer.ggml.pre` (llama.cpp, `llama-vocab.cpp`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tokenizers import Regex, pre_tokenizers

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# o200k (OpenAI, tiktoken, `openai_public.py`): a capital behind a small letter begins another word.
_BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[%(upper)s]*[%(lower)s]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[%(upper)s]+[%(lower)s]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[%(behind)s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# BLOOM: runs without spaces and without full stops and commas of several scripts.
_SENTENCES = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
# DeepSeek's first tokenizer has a pattern for letters of its own, here by their numbers: a-b, or one alone.
_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 "
    "1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec "
    "1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 "
    "213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b "
    "a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f "
    "104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)


def _class(ranges: str) -> str:
    """Ranges of code points in hex -> the inside of a character class."""
    bounds = (one.split("-") for one in ranges.split())
    return "".join("-".join(chr(int(bound, 16)) for bound in pair) for pair in bounds)


# One after the other: each splits the pieces that those before have left.
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_class(_LETTERS)}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pieces(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _words(digits: int) -> pre_tokenizers.PreTokenizer:
    return _pieces(_WORDS % digits)


def _o200k() -> pre_tokenizers.PreTokenizer:
    return _pieces(_BY_CASE % {"upper": _UPPER, "lower": _LOWER, "behind": r"\r\n/"})


def _kimi() -> pre_tokenizers.PreTokenizer:
    """o200k's with Chinese characters apart (Moonshot AI, Kimi K2, `tokenization_kimi.py`)."""
    other = r"&&[^\p{Han}]"
    words = {"upper": _UPPER + other, "lower": _LOWER + other, "behind": r"\r\n"}
    return _pieces(r"\p{Han}+|" + _BY_CASE % words)


def _punctuation_then_gpt2() -> pre_tokenizers.PreTokenizer:
    """Digits in threes, too."""
    marks = pre_tokenizers.Split(Regex(_PUNCTUATION), "isolated")
    threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
    return pre_tokenizers.Sequence([marks, _gpt2(), threes])


SPLITTERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _digits_then_gpt2),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), lambda: _words(3)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), lambda: _words(1)),
    **dict.fromkeys(("gpt-4o", "llama4"), _o200k),
    "kimi-k2": _kimi,
    "deepseek-llm": lambda: _pieces(*_DEEPSEEK_LLM),
    "deepseek-v3": lambda: _pieces(*_DEEPSEEK_V3),
    "bloom": lambda: _pieces(_SENTENCES),
    "falcon": _punctuation_then_gpt2,
}
