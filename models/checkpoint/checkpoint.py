"""What a checkpoint of any format is to the rest of the project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onnxlm.models.checkpoint.tensors import StoredTensor
from onnxlm.models.config import ModelConfig
from onnxlm.models.registry import Architecture
from onnxlm.quantized_tensor import QuantizedTensor


@dataclass(frozen=True)
class Checkpoint:
    """A trained model on disk: checked, its weights not read yet.

    Attributes:
        path: The folder or file.
        kind: "huggingface", "gguf" or "package".
        raw_config: The config in Hugging Face's keys.
        config: The same, parsed.
        architecture: The model family.
        generation_config: Hugging Face's keys; token ids and sampling defaults.
        tokenizer_files: tokenizer.json, tokenizer_config.json and chat_template.jinja, those there are.
        quantized: Block-quantized tensors in exact form by parameter name, unpacked at each access.
        provenance: File names and sizes, and what the file says of its origin.
        tensors: Stored tensors by parameter name; a tied weight appears once.
    """

    path: Path
    kind: str
    raw_config: Mapping[str, Any]
    config: ModelConfig
    architecture: Architecture
    generation_config: Mapping[str, Any]
    tokenizer_files: Mapping[str, bytes]
    quantized: Mapping[str, QuantizedTensor]
    provenance: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Parameter names and values in the file's dtype (float32 for block-quantized), one at a time."""
        for name, tensor in self.tensors.items():
            yield name, tensor.read()
