"""Checkpoints that were saved from the inner module alone: names without `model.`, `transformer.`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hot import hot_model, oracle_logits, save_folder
from support.parity import assert_logits_close
from support.plain import find_plain
from support.refusals import refusal

from onnxlm.models import load
from onnxlm.models.registry import architecture_names, find_architecture

FAMILIES = architecture_names()
HEADS = ("lm_head.", "embed_out.")
IDS = [(37 * position + 11) % 89 for position in range(12)]


def without_outer_module(folder: Path) -> list[str]:
    """Rename a folder's tensors, all but the head's; returns the new names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (outer,) = {name.partition(".")[0] for name in tensors if not name.startswith(HEADS)}
    renamed = {name.removeprefix(f"{outer}."): value for name, value in tensors.items()}
    save_file(renamed, path)
    return list(renamed)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_without_the_outer_module_mean_the_same(tmp_path: Path, family: str) -> None:
    oracle = hot_model(find_architecture(family).tiny)
    names = without_outer_module(save_folder(oracle, tmp_path))
    assert not any(name.startswith(("model.", "transformer.", "gpt_neox.")) for name in names)
    assert_logits_close(load(tmp_path).logits(IDS), oracle_logits(oracle, IDS))


@pytest.mark.parametrize("family", [name for name in FAMILIES if find_plain(name) is None])
def test_the_base_model_of_transformers(tmp_path: Path, family: str) -> None:
    """It is the model without its head: whole where head and embedding are one."""
    oracle = hot_model(find_architecture(family).tiny)
    folder = save_folder(oracle.base_model, tmp_path)
    if oracle.config.tie_word_embeddings:
        assert_logits_close(load(folder).logits(IDS), oracle_logits(oracle, IDS))
    else:
        head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
        assert f"tensors are missing: {head}" in refusal(folder) or "lm_head.bias" in refusal(
            folder
        )


def test_a_familys_own_names_are_no_checkpoints(tmp_path: Path) -> None:
    """Nothing goes around a rule: it would load the tensor as it lies."""
    save_folder(hot_model(find_architecture("gpt2").tiny), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.0.mlp.up_proj.weight"] = torch.ones(256, 64)
    save_file(tensors, path)
    assert "no place for; found layers.0.mlp.up_proj.weight" in refusal(tmp_path)


def test_a_tensor_that_is_there_twice(tmp_path: Path) -> None:
    save_folder(hot_model(find_architecture("gemma").tiny), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, path)
    assert "no place for; found " in (message := refusal(tmp_path))
    assert "norm.weight" in message
