"""GGUF file -> Checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from gguf.constants import MODEL_TENSOR, TENSOR_NAMES

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.checkpoint import Checkpoint
from onnxlm.models.checkpoint.gguf_file import (
    GgufFile,
    rotary_row_order,
    stored_tensor,
)
from onnxlm.models.checkpoint.gguf_metadata import find_family
from onnxlm.models.checkpoint.gguf_shards import open_shards
from onnxlm.models.checkpoint.gguf_tokenizer import generation_ids, read_vocabulary, tokenizer_files
from onnxlm.models.checkpoint.matching import NameMap, listed, match
from onnxlm.models.checkpoint.tensors import LazyQuantized, StoredTensor
from onnxlm.models.config import ConfigReader, ModelConfig
from onnxlm.models.registry import GgufFamily

HEAD = f"{TENSOR_NAMES[MODEL_TENSOR.OUTPUT]}.weight"


def read_gguf(path: Path) -> Checkpoint:
    """Read everything of a GGUF file (or of several that hold one model) but the weights' values.

    Raises:
        CheckpointError: The file is damaged, or its tensors do not fit its metadata.
        ConfigError: Metadata is missing or asks for what is not supported.
    """
    file = open_shards(path)
    architecture, family, own = find_family(file)
    raw_config = family.config(own)
    own.finish()
    # llama.cpp writes no head for a model whose embedding serves as one.
    raw_config["tie_word_embeddings"] = not own.has(HEAD)
    vocabulary = read_vocabulary(file.metadata, path.name)
    ids = {} if vocabulary is None else generation_ids(vocabulary)
    raw_config |= ids
    config = architecture.parse_config(ConfigReader(raw_config, path.name))
    tokenizer: dict[str, bytes] = {}
    if vocabulary is not None:
        vocabulary.fits(config.vocab_size)
        tokenizer = tokenizer_files(vocabulary, file.metadata.get("tokenizer.chat_template"))
    stored = _stored(file, own.vectors, family, config)
    tensors = match(stored, family.rules, architecture, config, path.name)
    return Checkpoint(
        path=path,
        kind="gguf",
        raw_config=raw_config,
        config=config,
        architecture=architecture,
        generation_config=ids,
        tokenizer_files=tokenizer,
        quantized=LazyQuantized(tensors),
        provenance=_provenance(file),
        tensors=tensors,
    )


def _stored(
    file: GgufFile, vectors: Set[str], family: GgufFamily, config: ModelConfig
) -> dict[str, StoredTensor]:
    """The file's tensors by name, rows in the order that the module has, experts' tensors one by one.

    Args:
        file: The file.
        vectors: Tensors that are part of the config.
        family: Says which tensors there may be.
        config: Head counts.
    """
    known, head_counts = NameMap(family.rules), NameMap(family.permuted)
    stored: dict[str, StoredTensor] = {}
    for name in file.tensors:
        if name not in vectors:
            permuted = head_counts.find(name)
            heads = None if permuted is None else getattr(config, permuted[0])
            one_each = known.find(_of_expert(name, 0)) is not None
            stored |= _by_expert(file, name) if one_each else {name: _whole(file, name, heads)}
    unknown = {tensor.name for name, tensor in stored.items() if known.find(name) is None}
    if unknown:
        raise CheckpointError(
            f"{file.path.name}: tensors that this architecture does not know",
            found=listed(unknown),
            fix="the file asks for something this version does not compute",
        )
    return stored


def _of_expert(name: str, expert: int) -> str:
    """What a family's rules call an expert's part of a tensor: `a.weight` -> `a.0.weight`."""
    stem, _, part = name.rpartition(".")
    return f"{stem}.{expert}.{part}"


def _by_expert(file: GgufFile, name: str) -> dict[str, StoredTensor]:
    """The matrices (or the biases) of a tensor that has one for each expert."""
    tensor = file.tensors[name]
    return {
        _of_expert(name, expert): stored_tensor(file, tensor, expert)
        for expert in range(int(tensor.shape[-1]))
    }


def _whole(file: GgufFile, name: str, heads: int | None) -> StoredTensor:
    tensor = file.tensors[name]
    if heads is None:
        return stored_tensor(file, tensor)
    return stored_tensor(
        file, tensor, _row_order(name, int(tensor.shape[-1]), heads, file.path.name)
    )


def _row_order(name: str, rows: int, heads: int, source: str) -> Any:
    if rows % (2 * heads):
        raise CheckpointError(
            f"{source}: rows of {name} do not divide into its heads",
            found=f"{rows} rows",
            allowed=f"a multiple of {2 * heads}",
        )
    return rotary_row_order(rows, heads)


def _provenance(file: GgufFile) -> Mapping[str, Any]:
    general = {key: value for key, value in file.metadata.items() if key.startswith("general.")}
    return {"files": {path.name: path.stat().st_size for path in file.paths}, **general}
