"""Architectures by file name: `architectures/<model_type>.py` exposes one `ARCHITECTURE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onnxlm.errors import ConfigError
from onnxlm.models import architectures
from onnxlm.models.config import ConfigReader, ModelConfig
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.weight_rules import Rules
from onnxlm.plugins import Registry

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True)
class Architecture:
    """Everything the project knows of one model family.

    Attributes:
        parse_config: Reads a Hugging Face config; refuses what would change numbers unread.
        build: Makes the eager module, weights uninitialised or default-initialised.
        rules: What becomes of a checkpoint's tensors, by name template, see `weight_rules`.
        tiny: A Hugging Face config of a model small enough for tests.
        variants: Changes to it, by a name, that together switch on every option that changes numbers; each
            is tested like `tiny`.
        gguf: Reads a GGUF file's metadata into a Hugging Face config; None when GGUF has no such family.
    """

    parse_config: Callable[[ConfigReader], ModelConfig]
    build: Callable[[Any], DecoderLM]
    rules: Rules
    tiny: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gguf: GgufFamily | None = None


@dataclass(frozen=True)
class GgufFamily:
    """How one family lies in a GGUF file.

    Attributes:
        architecture: The file's `general.architecture`.
        config: Metadata -> Hugging Face config.
        rules: What becomes of the file's tensors, by name template; "{e}" stands for the number of a matrix
            in a tensor that holds one for each expert.
        permuted: Name template -> config field of its head count: rows stored in llama.cpp's interleaved
            rotary order that loading must undo.
        applies: Which files it reads, where families share one `general.architecture`.
    """

    architecture: str
    config: Callable[[FamilyMetadata], dict[str, Any]]
    rules: Rules
    permuted: Mapping[str, str] = field(default_factory=dict)
    applies: Callable[[FamilyMetadata], bool] = lambda own: True


_ARCHITECTURES = Registry(
    architectures.__name__,
    "ARCHITECTURE",
    Architecture,
    "model_type is not supported",
    ConfigError,
)


def architecture_names() -> list[str]:
    """Supported `model_type` values."""
    return _ARCHITECTURES.names()


def find_architecture(model_type: str) -> Architecture:
    """The architecture whose file is called `model_type`.

    Raises:
        ConfigError: There is no such file (a broken file raises its own error).
    """
    return _ARCHITECTURES.find(model_type)
