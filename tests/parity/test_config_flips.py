"""Every boolean of a config flipped, every number scaled, every key left out, one at a time, in every family.

With each change either the loader refuses, or its logits are those of transformers with that change: no key
is silently ignored, and no default is another one than that of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exported import variants
from support.hot import hot_model, oracle_logits, save_folder
from support.parity import assert_logits_close
from support.plain import find_plain
from transformers import AutoConfig, PretrainedConfig

from onnxlm.errors import OnnxlmError
from onnxlm.models import load
from onnxlm.models.config import ConfigReader
from onnxlm.models.ignored_keys import IGNORED_KEYS
from onnxlm.models.layers.activation import ACTIVATIONS
from onnxlm.models.registry import architecture_names, find_architecture

FAMILIES = architecture_names()
IDS = [(37 * position + 11) % 89 for position in range(24)]
# Words and ids of a vocabulary, which a forward pass does not look at, and the form of what it returns.
_SKIPPED = ("token_id", "label", "transformers_version", "return_dict")
# Of every config of transformers alike: one family is enough.
_COMMON = IGNORED_KEYS & PretrainedConfig().to_dict().keys()
# What has to be scaled together with a number, in some families, for there to be a model.
_PARTNERS = {
    "num_attention_heads": ("num_key_value_heads", "num_kv_heads"),
    "num_key_value_heads": ("num_attention_heads",),
    "hidden_size": ("head_dim", "num_attention_heads"),
    "head_dim": ("qk_rope_head_dim",),
    "qk_rope_head_dim": ("head_dim",),
}
# There is no model whichever way it is scaled: GPT-Neo lists its layers by kind.
_UNMADE = {"num_layers"}

Change = tuple[tuple[str, ...], Any]


def changes(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[list[Change]]:
    """For each boolean, number and activation of a config, other values to try until one makes a model."""
    for key, value in config.items():
        place = (*path, key)
        if any(word in key for word in _SKIPPED):
            continue
        if isinstance(value, dict):
            yield from changes(value, place)
        else:
            others = [(place, other) for other in _others(value)]
            if others:
                yield others


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value // 2] if value else [1]
    if isinstance(value, float):  # an epsilon has to be scaled by more to be seen
        return [1.5 * value, 0.75 * value, 2 * value] if value > 1e-3 else [1e4 * value or 0.5]
    if isinstance(value, str) and value in ACTIVATIONS:
        return ["gelu" if value == "relu" else "relu"]
    return []


def at(config: Mapping[str, Any], place: tuple[str, ...]) -> Any:
    """What stands there; None where nothing does."""
    inner: Any = config
    for key in place:
        inner = inner.get(key) if isinstance(inner, dict) else None
    return inner


def changed(config: Mapping[str, Any], change: Change) -> Iterator[dict[str, Any]]:
    """The config with one change; then with its partners scaled alike."""
    place, value = change
    made = _copy(config)
    outer = at(made, place[:-1])
    layers = outer[place[-1]]
    outer[place[-1]] = value
    yield made
    partners = [key for key in _PARTNERS.get(place[-1], ()) if isinstance(made.get(key), int)]
    for key in partners:
        yield {**made, key: made[key] * value // layers}
    lists = {k: v for k, v in made.items() if isinstance(v, list) and len(v) == layers}
    if place == ("num_hidden_layers",) and lists:
        yield made | {key: (kinds * 2)[:value] for key, kinds in lists.items()}


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(config))
    return copied


def whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with every key that transformers gives it."""
    full = hot_model(config).config
    keys = full if isinstance(full, dict) else full.to_dict()
    return {**_copy(keys), "model_type": config["model_type"]}


def made(config: Mapping[str, Any], folder: Path) -> tuple[torch.Tensor, Path] | None:
    """The oracle's logits and its checkpoint; None where transformers takes it for no model either."""
    try:
        oracle = hot_model(config)
        logits = oracle_logits(oracle, IDS)
        saved = save_folder(oracle, folder)
    except Exception:
        return None
    return (logits, saved) if torch.isfinite(logits).all() else None


def fault(expected: torch.Tensor, folder: Path, key: str) -> str | None:
    """What is wrong with what the loader makes of a checkpoint, if anything."""
    try:
        model = load(folder)
    except OnnxlmError as refusal:
        # Refused for what was changed, not for some other key that transformers writes.
        return None if key in str(refusal) else str(refusal)
    try:
        assert_logits_close(model.logits(IDS), expected)
    except AssertionError as difference:
        return str(difference)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_is_refused_or_made(family: str, tmp_path: Path) -> None:
    tried: list[tuple[tuple[str, ...], Any]] = []
    compared, unmade, wrong = set(), set(), []
    for config in variants(family).values():
        base = whole(config)
        for others in changes(base):
            place = others[0][0]
            key = place[-1]
            if (place, at(base, place)) in tried:  # the same as in another variant
                continue
            tried.append((place, at(base, place)))
            if key in _COMMON and family != FAMILIES[0]:
                continue
            if find_plain(family) and isinstance(others[0][1], str):
                continue  # a formula has one activation
            configs = [new for change in others for new in changed(base, change)]
            found = next(
                filter(None, (made(new, tmp_path / str(len(tried))) for new in configs)), None
            )
            if found is None:
                unmade.add(key)
                continue
            compared.add(key)
            said = fault(*found, key)
            if said is not None:
                wrong.append(f"{'.'.join(place)}: {said}")
    assert wrong == []
    assert unmade - compared <= _UNMADE, "not one change of these makes a model"
    assert {"vocab_size", "tie_word_embeddings"} <= compared


TRANSFORMERS = [family for family in FAMILIES if find_plain(family) is None]


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_a_key_left_out_has_the_default_of_transformers(family: str) -> None:
    """Published configs have fewer keys than those that transformers writes."""
    parse = find_architecture(family).parse_config
    compared = 0
    for config in variants(family).values():
        for left_out in config.keys() - {"model_type"}:
            some = {key: value for key, value in config.items() if key != left_out}
            try:
                full = AutoConfig.for_model(**some).to_dict()
            except Exception:  # no model to transformers
                continue
            try:
                ours = parse(ConfigReader(some, "config.json"))
            except OnnxlmError:  # it cannot be left out
                continue
            theirs = ConfigReader({**_copy(full), "model_type": family}, "config.json")
            assert ours == parse(theirs), left_out
            compared += 1
    assert compared > 3
