"""Write a Hugging Face folder from any source that onnxlm reads (a GGUF file), for tools that need one.

python benchmarks/hf_folder.py model.gguf folder
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onnxlm.models.checkpoint import read


def write_folder(source: str, folder: Path) -> None:
    """De-quantize a checkpoint into a fresh fp32 model of transformers; save it with its tokenizer."""
    checkpoint = read(source)
    keys = dict(checkpoint.raw_config)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {_hf_name(name): value.float() for name, value in checkpoint.state()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        raise SystemExit(f"{source}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.save_pretrained(folder)
    _keep_keys(folder / "config.json", checkpoint.raw_config)
    for name, content in checkpoint.tokenizer_files.items():
        (folder / name).write_bytes(content)


def _keep_keys(file: Path, keys: Mapping[str, Any]) -> None:
    """Add the checkpoint's own keys: transformers 5 writes rope_theta where 4, in some peers, looks not."""
    saved = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**keys, **saved}, indent=2) + "\n", encoding="utf-8")


def _hf_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="GGUF file or anything else that onnxlm reads")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    write_folder(arguments.source, arguments.folder)


if __name__ == "__main__":
    main()
