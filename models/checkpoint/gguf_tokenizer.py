"""Tokenizer of a GGUF file, rebuilt from its metadata as Hugging Face tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from onnxlm.models.checkpoint.gguf_tokenizer_models import (
    LLAMA3_SPLITTERS,
    Vocabulary,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from onnxlm.models.checkpoint.huggingface import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG

# Kinds of tokens that are matched before the text is split (ggml, `include/llama.h`, llama_token_type).
_CONTROL, _USER_DEFINED = 3, 4
_ADDED = (_CONTROL, _USER_DEFINED)
# Added tokens that end a turn, whatever the metadata's ids say (llama.cpp, `src/llama-vocab.cpp`,
# special_eog_ids): files name one end, and models were trained to write another (Phi-3's `<|end|>`).
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "[EOT]", "[EOS]"),
        *("<|return|>", "<|call|>"),
    }
)
# Vocabularies with both of these have turns of several messages, and `<|end|>` closes one of them only.
_HARMONY = frozenset({"<|return|>", "<|call|>"})
_MESSAGE_END = "<|end|>"
_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_MODELS: Mapping[str, Callable[[Vocabulary], Tokenizer]] = {
    "gpt2": byte_level_tokenizer,
    "llama": sentencepiece_tokenizer,
}


def generation_ids(vocabulary: Vocabulary) -> dict[str, Any]:
    """Ids of a generation_config: bos, pad, and every id that ends a turn.

    Raises:
        CheckpointError: An id is outside the vocabulary.
    """
    ids: dict[str, Any] = {}
    for key, name in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        value = vocabulary.token_id(name)
        if value is not None:
            ids[key] = value
    ends = _ends(vocabulary)
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def _ends(vocabulary: Vocabulary) -> list[int]:
    """Ids that end a turn: those that the metadata names first, then those of known texts."""
    added = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in _ADDED
    }
    named = [vocabulary.token_id(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    ends = [*named, *(index for token, index in added.items() if token in _ENDS)]
    if added.keys() >= _HARMONY:
        ends = [end for end in ends if end != added.get(_MESSAGE_END)]
    return list(dict.fromkeys(end for end in ends if end is not None))


def tokenizer_files(vocabulary: Vocabulary, chat_template: str | None) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and, when there is one, chat_template.jinja.

    Raises:
        CheckpointError: The metadata lacks a field or names a kind that cannot be rebuilt.
    """
    kind = vocabulary.field("model")
    if kind not in _MODELS:
        raise vocabulary.unsupported("model", _MODELS)
    tokenizer = _MODELS[kind](vocabulary)
    added = [
        AddedToken(token, normalized=False, special=token_type == _CONTROL)
        for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if token_type in _ADDED
    ]
    tokenizer.add_tokens(added)
    # What llama.cpp takes a file to mean that does not say (`src/llama-vocab.cpp`, add_bos).
    adds_bos = kind == "llama" or vocabulary.get("pre") in LLAMA3_SPLITTERS
    _add_template(tokenizer, vocabulary, adds_bos)
    files = {
        TOKENIZER: tokenizer.to_str(pretty=True).encode(),
        TOKENIZER_CONFIG: json.dumps(_tokenizer_config(vocabulary), indent=2).encode(),
    }
    if chat_template is not None:
        files[CHAT_TEMPLATE] = chat_template.encode()
    return files


def read_vocabulary(metadata: Mapping[str, Any], source: str) -> Vocabulary | None:
    """The vocabulary of a file's metadata; None for a file without a tokenizer.

    Raises:
        CheckpointError: Its lists are missing or differ in length.
    """
    prefix = "tokenizer.ggml."
    fields = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    return Vocabulary(fields, source) if fields.get("model", "none") != "none" else None


def _add_template(tokenizer: Tokenizer, vocabulary: Vocabulary, adds_bos: bool) -> None:
    """Put bos before and eos behind a text where the file says so.

    Args:
        tokenizer: Changed in place.
        vocabulary: Says what to add.
        adds_bos: What holds when the file does not say.
    """
    template, special = ["$A"], []
    for flag, default, name in (
        ("add_bos_token", adds_bos, "bos_token_id"),
        ("add_eos_token", False, "eos_token_id"),
    ):
        token_id = vocabulary.token_id(name)
        if not vocabulary.get(flag, default) or token_id is None:
            continue
        token = vocabulary.tokens[token_id]
        special.append((token, token_id))
        template.insert(0 if name.startswith("bos") else len(template), token)
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(dict(special).items())
        )


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key in ("add_bos_token", "add_eos_token"):
        if vocabulary.get(key) is not None:
            config[key] = vocabulary.get(key)
    for key, name in _IDS.items():
        token_id = vocabulary.token_id(name)
        if token_id is not None:
            config[key] = vocabulary.tokens[token_id]
    return config
