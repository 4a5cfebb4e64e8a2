"""Hugging Face folder -> Checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxlm.errors import ConfigError
from onnxlm.models.checkpoint.checkpoint import Checkpoint
from onnxlm.models.checkpoint.folder import inside, read_json
from onnxlm.models.checkpoint.matching import match
from onnxlm.models.checkpoint.safetensors_file import read_folder
from onnxlm.models.checkpoint.tensors import LazyQuantized
from onnxlm.models.config import ConfigReader
from onnxlm.models.registry import find_architecture

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_TOKEN_IDS = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
# What some writers put for no token, and for a top-k that is off; the runtime knows null and 0.
_NONE = -1


def read_huggingface(folder: Path) -> Checkpoint:
    """Read everything of a Hugging Face folder but the weights' values.

    Raises:
        CheckpointError: A file is absent, damaged, or does not fit the others.
        ConfigError: A field is missing or asks for what is not supported.
    """
    described = describe_folder(folder, "huggingface")
    stored, files = read_folder(folder)
    tensors = match(
        stored,
        described.architecture.rules,
        described.architecture,
        described.config,
        str(folder),
    )
    return dataclasses.replace(
        described,
        quantized=LazyQuantized(tensors),
        provenance={"files": {path.name: path.stat().st_size for path in files}},
        tensors=tensors,
    )


def describe_folder(folder: Path, kind: str) -> Checkpoint:
    """Config, generation config and tokenizer of a folder that has them as Hugging Face does; no tensors."""
    raw_config = known_token_ids(read_json(inside(folder, CONFIG)), CONFIG)
    reader = ConfigReader(raw_config, CONFIG)
    architecture = find_architecture(reader.get("model_type", str))
    config = architecture.parse_config(reader)
    # How the weights lie in this folder: of no concern once they are read.
    raw_config.pop("quantization_config", None)
    generation_config, tokenizer_files = read_side_files(folder)
    return Checkpoint(
        path=folder,
        kind=kind,
        raw_config=raw_config,
        config=config,
        architecture=architecture,
        generation_config=generation_config,
        tokenizer_files=tokenizer_files,
        quantized={},
        provenance={},
        tensors={},
    )


def read_side_files(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """generation_config.json and the tokenizer's files, what there is of them.

    Raises:
        CheckpointError, ConfigError: One of them is damaged.
    """
    generation_config: dict[str, Any] = {}
    if (folder / GENERATION_CONFIG).exists():
        raw = read_json(inside(folder, GENERATION_CONFIG))
        generation_config = known_token_ids(raw, GENERATION_CONFIG)
        if generation_config.get("top_k") == _NONE:
            generation_config["top_k"] = 0
    return generation_config, _read_tokenizer_files(folder)


def known_token_ids(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields, a token id of -1 ("there is none") as null.

    Raises:
        ConfigError: A token id is neither null, an id nor a list of ids; names the field and the value.
    """
    known = dict(values)
    for key in sorted(_TOKEN_IDS & values.keys()):
        value = values[key]
        ids = value if isinstance(value, list) else [value]
        if value is not None and not all(type(item) is int and item >= _NONE for item in ids):
            raise ConfigError(
                f"{source}: field '{key}' is no token id",
                found=repr(value),
                allowed="an int from 0 up, a list of them, or null (-1 too)",
            )
        if _NONE in ids:
            known[key] = [item for item in ids if item != _NONE] or None
    return known


def _read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        if (folder / name).exists():
            path = inside(folder, name)
            read_json(path)
            files[name] = path.read_bytes()
    if (folder / CHAT_TEMPLATE).exists():
        files[CHAT_TEMPLATE] = inside(folder, CHAT_TEMPLATE).read_bytes()
    elif TOKENIZER_CONFIG in files:
        template = default_template(json.loads(files[TOKENIZER_CONFIG]).get("chat_template"))
        if template is not None:
            files[CHAT_TEMPLATE] = template.encode()
    return files


def default_template(value: Any) -> str | None:
    """The chat template of a tokenizer config: a text, or the one called "default" of a list."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
