"""What a user may name as a model, and which reader takes it."""

from __future__ import annotations

from pathlib import Path

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.checkpoint import Checkpoint
from onnxlm.models.checkpoint.gguf_checkpoint import read_gguf


def read(source: str | Path) -> Checkpoint:
    """Read a checkpoint's config, tokenizer and tensor list; the weights stay on disk."""
    path = Path(source)
    if path.is_file():
        return read_gguf(path)
    raise CheckpointError(f"{source}: not a model")
