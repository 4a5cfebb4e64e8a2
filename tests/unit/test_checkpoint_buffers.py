"""Tensors that a model has no use for may be of any type; those that it needs may not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hot import hot_model, oracle_logits, save_folder
from support.parity import assert_logits_close
from support.refusals import refusal

from onnxlm.models import load
from onnxlm.models.registry import find_architecture

IDS = [5, 17, 3, 91, 44, 2, 60, 8]
BUFFERS = {  # as published: Pythia U8, GPT-2 and GPT-Neo BOOL
    "gpt_neox": "gpt_neox.layers.{}.attention.bias",
    "gpt2": "h.{}.attn.bias",
    "gpt_neo": "transformer.h.{}.attn.attention.bias",
    "gptj": "transformer.h.{}.attn.bias",
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("family", BUFFERS)
def test_causal_masks_are_skipped(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    oracle = hot_model(find_architecture(family).tiny)
    path = save_folder(oracle, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    mask = torch.ones(1, 1, 16, 16).tril().to(dtype)
    tensors |= {BUFFERS[family].format(layer): mask.clone() for layer in range(2)}
    save_file(tensors, path)
    assert_logits_close(load(tmp_path).logits(IDS), oracle_logits(oracle, IDS))


@pytest.mark.parametrize(("dtype", "shown"), [(torch.uint8, "U8"), (torch.int64, "I64")])
def test_a_weight_of_such_a_type_is_refused(tmp_path: Path, dtype: torch.dtype, shown: str) -> None:
    path = save_folder(hot_model(find_architecture("gpt2").tiny), tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.1.ln_1.bias"] = torch.ones(64, dtype=dtype)
    save_file(tensors, path)
    message = refusal(tmp_path)
    assert f"cannot be read; found transformer.h.1.ln_1.bias is {shown}" in message
    assert "allowed: BF16, F16, F32" in message
