"""Reads trained models from disk: Hugging Face folders and GGUF files."""

from onnxlm.models.checkpoint.checkpoint import Checkpoint
from onnxlm.models.checkpoint.own_module import from_module, spelled
from onnxlm.models.checkpoint.source import read

__all__ = ["Checkpoint", "from_module", "read", "spelled"]
