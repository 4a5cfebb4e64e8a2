"""What a user may name as a model, and which reader takes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gguf.constants import GGUF_MAGIC

from onnxlm.errors import CheckpointError
from onnxlm.manifest import is_package
from onnxlm.models.checkpoint.checkpoint import Checkpoint
from onnxlm.models.checkpoint.gguf_checkpoint import read_gguf
from onnxlm.models.checkpoint.gguf_shards import one_a_model
from onnxlm.models.checkpoint.hub import fetch, is_hub_id
from onnxlm.models.checkpoint.huggingface import CONFIG, read_huggingface
from onnxlm.models.checkpoint.matching import listed
from onnxlm.models.checkpoint.own_module import ModuleSource, read_module
from onnxlm.models.checkpoint.package import read_package
from onnxlm.models.checkpoint.safetensors_file import has_weights

ACCEPTED = (
    "a folder with config.json and safetensors, a GGUF file or a folder with one, "
    "a full-precision package, a Hub id (org/name), or a function that builds a model (file.py:function)"
)


def read(source: str | Path) -> Checkpoint:
    """Read a checkpoint's config, tokenizer and tensor list, and check them; weights stay on disk.

    Args:
        source: A Hugging Face folder, a GGUF file, a folder with one GGUF model, a package, a Hub id, or
            `file.py:function@weights.safetensors`, see `own_module`.

    Raises:
        CheckpointError: The source is none of these, or is incomplete or damaged.
        ConfigError: Its config lacks a field or asks for what is not supported.
    """
    module = ModuleSource.parse(str(source))
    if module is not None:
        return read_module(module)
    path = Path(source)
    if path.is_dir():
        return _read_folder(path)
    if path.exists():
        return _read_file(path)
    if isinstance(source, str) and is_hub_id(source):
        folder = fetch(source)
        checkpoint = _read_folder(folder)
        origin = {"hub_id": source, "revision": folder.name}
        return replace(checkpoint, provenance={**checkpoint.provenance, **origin})
    raise CheckpointError(f"{source}: no such file or folder", allowed=ACCEPTED)


def _read_folder(folder: Path) -> Checkpoint:
    if is_package(folder):
        return read_package(folder)
    gguf_files = one_a_model(sorted(folder.glob("*.gguf")))
    has_config = (folder / CONFIG).exists()
    if len(gguf_files) == 1 and not (has_config and has_weights(folder)):
        return read_gguf(gguf_files[0])
    if has_config:
        return read_huggingface(folder)
    if gguf_files:
        raise CheckpointError(
            f"{folder}: several GGUF files",
            found=listed(file.name for file in gguf_files),
            fix="name one of them",
        )
    raise CheckpointError(f"{folder}: no model in this folder", allowed=ACCEPTED)


def _read_file(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == GGUF_MAGIC.to_bytes(4, "little"):
        return read_gguf(path)
    raise CheckpointError(
        f"{path}: not a model file",
        allowed=ACCEPTED,
        fix=f"give the folder: {path.parent}" if path.suffix == ".safetensors" else None,
    )
