"""What transformers makes of a conversation with the hot model."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedTokenizerFast

from support.runtime_models import TEMPLATE, hot_package


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    file = str(hot_package().path / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, chat_template=TEMPLATE)


def rendered(messages: list[dict[str, Any]]) -> list[int]:
    """Ids of a conversation up to the next answer, by transformers."""
    text = _tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(_tokenizer()(text, add_special_tokens=False)["input_ids"])


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
