"""Reads trained models from disk: Hugging Face folders and GGUF files."""

from onnxlm.models.checkpoint.checkpoint import Checkpoint
from onnxlm.models.checkpoint.source import read

__all__ = ["Checkpoint", "read"]
