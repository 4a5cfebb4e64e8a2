"""Every boolean of a config flipped and every number scaled, one at a time, in every family.

With each change either the loader refuses, or its logits are those of transformers with that change: no key
is silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hot import hot_model, oracle_logits, save_folder
from support.parity import assert_logits_close
from support.plain import find_plain

from onnxlm.errors import OnnxlmError
from onnxlm.models import load
from onnxlm.models.registry import architecture_names, find_architecture

FAMILIES = [name for name in architecture_names() if find_plain(name) is None]
IDS = [(37 * position + 11) % 89 for position in range(24)]
# Words and ids of a vocabulary, which a forward pass does not look at.
_WORDS = ("token_id", "num_labels", "label", "transformers_version")


def changes(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Where a config has a boolean or a number, and another value for it."""
    for key, value in config.items():
        place = (*path, key)
        if any(word in key for word in _WORDS):
            continue
        if isinstance(value, dict):
            yield from changes(value, place)
        elif isinstance(value, bool):
            yield place, not value
        elif isinstance(value, int) and value > 0:
            yield place, 2 * value
            yield place, value // 2
        elif isinstance(value, float):
            yield place, 1.5 * value if value else 0.5


def changed(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(config))
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_is_refused_or_made(family: str, tmp_path: Path) -> None:
    tiny = dict(find_architecture(family).tiny)
    everything = {**hot_model(tiny).config.to_dict(), "model_type": family}
    followed, wrong = [], []
    for number, (place, value) in enumerate(changes(everything)):
        config = changed(everything, place, value)
        try:
            oracle = hot_model(config)
            expected = oracle_logits(oracle, IDS)
        except Exception:  # not a model to transformers either
            continue
        if not torch.isfinite(expected).all():
            continue
        name = ".".join(place)
        try:
            model = load(save_folder(oracle, tmp_path / str(number)))
        except OnnxlmError as refusal:
            # Refused for what was changed, not for some other key that transformers writes.
            if place[-1] not in str(refusal) and "tensors" not in str(refusal):
                wrong.append(f"{name}={value!r}: {refusal}")
            continue
        try:
            assert_logits_close(model.logits(IDS), expected)
        except AssertionError as difference:
            wrong.append(f"{name}={value!r}: {difference}")
        followed.append(name)
    assert wrong == []
    assert {"vocab_size", "tie_word_embeddings"} <= set(followed)
