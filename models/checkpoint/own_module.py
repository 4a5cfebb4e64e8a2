"""A user's own model as a checkpoint: a module made of this project's blocks, and a file with its weights.

Naming such a source runs its Python file; nothing else that this project reads is ever executed.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onnxlm.errors import CheckpointError, ConfigError
from onnxlm.models.checkpoint.checkpoint import Checkpoint
from onnxlm.models.checkpoint.huggingface import read_side_files
from onnxlm.models.checkpoint.matching import match
from onnxlm.models.checkpoint.safetensors_file import read_file
from onnxlm.models.checkpoint.tensors import StoredTensor
from onnxlm.models.config import ConfigReader, ModelConfig
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.registry import Architecture

MODEL_TYPE = "custom"
_SPEC = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)(?:@(?P<weights>.+))?")


@dataclass(frozen=True)
class ModuleSource:
    """A source spelled `file.py:function` or `file.py:function@weights.safetensors`.

    Attributes:
        file: The Python file.
        function: A function without arguments that returns a `DecoderLM`.
        weights: A safetensors file with the module's parameters by their names; the module's own values when
            None.
    """

    file: Path
    function: str
    weights: Path | None

    @classmethod
    def parse(cls, source: str) -> ModuleSource | None:
        """The parts of a source; None where it is of another kind."""
        found = _SPEC.fullmatch(source)
        if found is None:
            return None
        weights = found["weights"]
        return cls(Path(found["file"]), found["function"], Path(weights) if weights else None)

    def __str__(self) -> str:
        behind = "" if self.weights is None else f"@{self.weights}"
        return f"{self.file}:{self.function}{behind}"


def read_module(source: ModuleSource) -> Checkpoint:
    """Build the module and look at its weights' file.

    Tokenizer files and generation_config.json are taken from the weights' folder, or else the Python file's.

    Raises:
        CheckpointError: The file, the function or the weights are missing, or do not fit together.
        ConfigError: What the module is does not say how long its context is.
    """
    build = _function(source)
    model = _built(build, source)
    folder = (source.weights or source.file).parent
    generation_config, tokenizer_files = read_side_files(folder)
    checkpoint = from_module(
        model,
        name=str(source),
        generation_config=generation_config,
        tokenizer_files=tokenizer_files,
        build=lambda: _built(build, source),
    )
    if source.weights is None:
        return checkpoint
    tensors = match(
        read_file(source.weights),
        {},
        checkpoint.architecture,
        checkpoint.config,
        source.weights.name,
    )
    size = {source.weights.name: source.weights.stat().st_size}
    return dataclasses.replace(checkpoint, tensors=tensors, provenance={"files": size})


def from_module(
    model: DecoderLM,
    *,
    name: str = "a module",
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_files: Mapping[str, bytes] | None = None,
    build: Callable[[], DecoderLM] | None = None,
) -> Checkpoint:
    """A checkpoint of a module in memory, for `onnxlm.export.export`.

    Args:
        model: Made of this project's blocks; its parameters are referred to, not copied.
        name: What the package's manifest calls its source.
        generation_config: Hugging Face's keys.
        tokenizer_files: tokenizer.json, tokenizer_config.json, chat_template.jinja; what there is.
        build: Makes another such module.

    Raises:
        ConfigError: It cannot be told how long the context is.
    """
    config = _config(model, name)

    def another() -> DecoderLM:
        # New modules around the same parameters: what is done to them leaves the caller's model alone.
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, memo=shared)

    return Checkpoint(
        path=Path(name),
        kind="module",
        raw_config=dataclasses.asdict(config),
        config=config,
        architecture=Architecture(
            parse_config=_parse_config,
            build=lambda _: another() if build is None else build(),
            rules={},
            tiny={},
        ),
        generation_config=generation_config or {},
        tokenizer_files=tokenizer_files or {},
        quantized={},
        provenance={},
        tensors={n: _in_memory(n, value, name) for n, value in model.named_parameters()},
    )


def _parse_config(reader: ConfigReader) -> ModelConfig:
    config = ModelConfig(**reader.model_fields())
    reader.finish()
    return config


def _function(source: ModuleSource) -> Callable[[], Any]:
    if not source.file.is_file():
        raise CheckpointError(f"{source.file}: no such file")
    spec = importlib.util.spec_from_file_location(source.file.stem, source.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look a module up by its name.
    sys.modules.setdefault(source.file.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does
        raise CheckpointError(f"{source.file}: cannot be run", found=repr(error)) from error
    function = getattr(module, source.function, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise CheckpointError(
            f"{source.file}: has no function '{source.function}'", allowed=", ".join(names) or None
        )
    found: Callable[[], Any] = function
    return found


def _built(build: Callable[[], Any], source: ModuleSource) -> DecoderLM:
    try:
        model = build()
    except Exception as error:  # whatever the user's function does
        raise CheckpointError(
            f"{source.file}: {source.function}() failed", found=repr(error)
        ) from error
    if not isinstance(model, DecoderLM):
        raise CheckpointError(
            f"{source.file}: {source.function}() returns no model",
            found=type(model).__name__,
            allowed="an onnxlm.models.layers.decoder.DecoderLM",
        )
    return model


def _config(model: DecoderLM, name: str) -> ModelConfig:
    positions = model.max_positions
    if positions is None:
        raise ConfigError(
            f"{name}: nothing in the model limits its context",
            fix="give DecoderLM Positions(limit=...)",
        )
    first: Any = model.layers[0]
    return ModelConfig(
        model_type=MODEL_TYPE,
        vocab_size=model.lm_head.weight.shape[0],
        hidden_size=first.self_attn.o_proj.weight.shape[0],
        num_hidden_layers=len(model.layers),
        num_attention_heads=first.self_attn.spec.num_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=model.lm_head.weight is model.embed_tokens.weight,
    )


def _in_memory(name: str, value: Tensor, source: str) -> StoredTensor:
    nbytes = value.numel() * value.element_size()
    return StoredTensor(name, source, tuple(value.shape), nbytes, value.detach)


def spelled(source: str, weights: Path | None) -> str:
    """A source with its weights' file, as one text.

    Raises:
        CheckpointError: Weights are given for another kind of source.
    """
    if weights is None:
        return source
    parsed = ModuleSource.parse(source)
    if parsed is None:
        raise CheckpointError(
            "a file of weights goes with a module", found=source, allowed="file.py:function"
        )
    return str(ModuleSource(parsed.file, parsed.function, weights))
