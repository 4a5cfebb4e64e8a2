"""Tokenizer of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SPECIAL = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids by Hugging Face key."""
    return {key: metadata[name] for key, name in _SPECIAL.items() if name in metadata}


def read_tokenizer(metadata: Mapping[str, Any], source: str) -> dict[str, bytes]:
    return {}
