"""Packages that the runtime is tried on, each exported once a test session.

* hot: every weight matters, a chat template, 640 positions: across two chunks of a prompt and two growths of
  a cache;
* windowed: as hot, but that queries see 20 tokens, so that caches lose tokens long before the context ends;
* counting: greedy decoding gives the alphabet from the prompt's last letter on, 16 positions;
* wide: a vocabulary of 131,072.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from onnxlm.export import export
from onnxlm.models.registry import find_architecture
from onnxlm.package import Package, PackageWriter
from onnxlm.runtime import LanguageModel, load
from support.hot import hot_model, oracle_logits, save_folder
from support.hot_packages import LETTERS, new_folder

MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HOT_CONTEXT = 640
END = len(LETTERS) + MARKS.index("<|end|>")
_TINY = dict(find_architecture("llama").tiny)
HOT_CONFIG = _TINY | {
    "vocab_size": len(LETTERS) + len(MARKS),
    "max_position_embeddings": HOT_CONTEXT,
    "attention_bias": True,
    "mlp_bias": True,
    "bos_token_id": None,
    "eos_token_id": END,
}

WINDOW = 20
WINDOWED_CONFIG = dict(find_architecture("mistral").tiny) | {
    **{key: HOT_CONFIG[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")},
    "max_position_embeddings": HOT_CONTEXT,
    "sliding_window": WINDOW,
}

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef"
COUNTING_CONTEXT = 16
COUNTING_CONFIG = _TINY | {
    "vocab_size": len(ALPHABET),
    "hidden_size": len(ALPHABET),
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": COUNTING_CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

WIDE_VOCABULARY = 1 << 17
WIDE_CONFIG = _TINY | {
    "vocab_size": WIDE_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
}


@functools.cache
def hot_oracle() -> PreTrainedModel:
    """The hot model in transformers."""
    return hot_model(HOT_CONFIG)


def at_once(ids: Sequence[int]) -> Tensor:
    """float32 [len(ids), vocab_size] of the hot model: one row, alone, without a cache, in transformers."""
    return oracle_logits(hot_oracle(), list(ids))


@functools.cache
def hot_package(lowering: str = "ort") -> Package:
    """The hot model."""
    return _export_chat(hot_oracle(), lowering)


@functools.cache
def windowed_oracle() -> PreTrainedModel:
    """The windowed model in transformers."""
    return hot_model(WINDOWED_CONFIG)


@functools.cache
def windowed_package(lowering: str = "ort") -> Package:
    """The windowed model."""
    return _export_chat(windowed_oracle(), lowering)


def _export_chat(model: PreTrainedModel, lowering: str) -> Package:
    tokenizer = _letters(LETTERS)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    return _export(model, tokenizer, config, lowering)


@functools.cache
def counting_package() -> Package:
    """The counting model."""
    model = hot_model(COUNTING_CONFIG)
    size = len(ALPHABET)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        # The row of a letter reads the letter before it.
        model.lm_head.weight.copy_(torch.eye(size).roll(1, dims=0))
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return _export(model, _letters(ALPHABET), {}, "ort")


@functools.cache
def wide_package() -> Package:
    """A freshly initialised model: only its sizes matter."""
    keys = dict(WIDE_CONFIG)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    return _export(AutoModelForCausalLM.from_config(config), _letters(LETTERS), {}, "ort")


@functools.cache
def loaded(path: Path, threads: int = 1) -> LanguageModel:
    """The package in a folder, opened once a test session."""
    return load(path, threads=threads)


def changed(
    source: Package, files: Mapping[str, Mapping[str, Any] | None], **manifest: Any
) -> Package:
    """A copy of a package with other JSON files (None: without), and other fields of its manifest."""
    with PackageWriter(new_folder() / "model") as writer:
        for name in source.manifest.files.keys() - files.keys():
            shutil.copy(source.path / name, writer.path / name)
        for name, content in files.items():
            if content is not None:
                (writer.path / name).write_text(json.dumps(content), encoding="utf-8")
        return writer.finish(dataclasses.replace(source.manifest, **manifest))


def _letters(letters: str) -> Tokenizer:
    """One token a character."""
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _export(
    model: PreTrainedModel, tokenizer: Tokenizer, config: Mapping[str, Any], lowering: str
) -> Package:
    source = save_folder(model, new_folder())
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return export(source, new_folder() / "model", lowering=lowering)
