"""The eager Llama against transformers in fp32, at every position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hot import hot_model, oracle_logits, rounded, save_folder
from support.parity import assert_logits_close
from transformers import AutoModelForCausalLM

from onnxlm.errors import ConfigError
from onnxlm.models import load
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.registry import find_architecture

TINY = dict(find_architecture("llama").tiny)
VARIANTS = {
    "tied, head_dim 32 of hidden 64": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "multi-query": {"num_key_value_heads": 1},
    "multi-head, narrow heads": {"num_key_value_heads": 4, "head_dim": 8},
    "five heads of 22, hidden 100": {
        "hidden_size": 100,
        "intermediate_size": 150,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 22,
    },
}
PROMPT = [5, 17, 3, 91, 44, 2, 60, 60, 8, 33, 71, 12]


def _saved(folder: Path, config: dict[str, Any], **kwargs: Any) -> tuple[DecoderLM, Any]:
    oracle = hot_model(config)
    return load(save_folder(oracle, folder, **kwargs)), oracle


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_of_every_position(tmp_path: Path, change: dict[str, Any]) -> None:
    model, oracle = _saved(tmp_path, {**TINY, **change})
    assert_logits_close(model.logits(PROMPT), oracle_logits(oracle, PROMPT))
    tied = model.lm_head.weight is model.embed_tokens.weight
    assert tied == oracle.config.tie_word_embeddings


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_types_and_shards(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    stored = rounded(hot_model(TINY), dtype)
    model = load(save_folder(stored, tmp_path, shards))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    # Read anew: `stored.float()` would keep rotary frequencies rounded to the stored type.
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_logits_close(model.logits(PROMPT), oracle_logits(oracle, PROMPT))


def test_loads_in_another_type(tmp_path: Path) -> None:
    model = load(save_folder(hot_model(TINY), tmp_path), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_solo_rows(tmp_path: Path, side: str) -> None:
    model, oracle = _saved(tmp_path, TINY)
    rows = [PROMPT[:3], PROMPT[:7], PROMPT[1:]]
    width = max(map(len, rows)) + 5
    ids = torch.zeros((len(rows), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(len(row))
        ids[index, columns] = torch.tensor(row)
        mask[index, columns] = 1
    with torch.inference_mode():
        logits, _ = model(ids, mask)
    for index, row in enumerate(rows):
        assert_logits_close(logits[index][mask[index].bool()], oracle_logits(oracle, row))


@pytest.mark.parametrize("chunks", [[5, 1, 6], [1] * 12, [4, *[1] * 8]])
def test_cached_chunks_equal_one_run(tmp_path: Path, chunks: list[int]) -> None:
    model, oracle = _saved(tmp_path, TINY)
    cache, parts = None, []
    with torch.inference_mode():
        for chunk in torch.tensor([PROMPT]).split(chunks, dim=1):
            logits, cache = model(chunk, past_key_values=cache)
            parts.append(logits[0])
    assert_logits_close(torch.cat(parts), oracle_logits(oracle, PROMPT))


def test_left_padded_batch_decodes_like_solo_rows(tmp_path: Path) -> None:
    model, oracle = _saved(tmp_path, TINY)
    rows, steps = [PROMPT[:3], PROMPT[4:]], [[7, 8, 9], [90, 4, 41]]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode():
        _, cache = model(ids, mask)
        for step in range(3):
            mask = torch.cat((mask, mask.new_ones((2, 1))), dim=1)
            new = torch.tensor([[tokens[step]] for tokens in steps])
            logits, cache = model(new, mask, cache)
            for index, row in enumerate(rows):
                whole = oracle_logits(oracle, row + steps[index][: step + 1])
                assert_logits_close(logits[index], whole[-1:])


ROPE_TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},  # changes nothing within the context
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn with options": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "attention_factor": 1.5,
    },
    "yarn with mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
}


def _rope_folder(folder: Path, name: str, spelling: str) -> Path:
    """A hot model whose config.json spells its rope settings the old or the new way."""
    rope = {"rope_type": name.split(maxsplit=1)[0], **ROPE_TYPES[name]}
    config = {**TINY, "max_position_embeddings": 64}
    config["rope_parameters"] = {**rope, "rope_theta": 500.0}
    save_folder(hot_model(config), folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    if spelling == "rope_parameters":
        raw["rope_parameters"] = {**rope, "rope_theta": 500.0}
    else:
        raw["rope_theta"] = 500.0
        rope["type" if spelling == "rope_scaling.type" else "rope_type"] = rope.pop("rope_type")
        raw["rope_scaling"] = None if name == "default" else rope
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "rope_scaling.type"])
@pytest.mark.parametrize("name", ROPE_TYPES)
def test_rope_types_in_every_spelling(tmp_path: Path, name: str, spelling: str) -> None:
    folder = _rope_folder(tmp_path, name, spelling)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [(7 * position) % 96 for position in range(60)]
    model = load(folder)
    whole = oracle_logits(oracle, ids)
    assert_logits_close(model.logits(ids), whole)
    with torch.inference_mode():  # decode across the original context of 16
        logits, cache = model(torch.tensor([ids[:15]]))
        for position in range(15, 24):
            logits, cache = model(torch.tensor([[ids[position]]]), past_key_values=cache)
            assert_logits_close(logits[0], whole[position : position + 1])


@pytest.mark.parametrize("name", [n for n in ROPE_TYPES if n not in ("default", "dynamic")])
def test_hot_weights_show_a_dropped_rope_scaling(tmp_path: Path, name: str) -> None:
    scaled = load(_rope_folder(tmp_path, name, "rope_parameters"))
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ids = [(7 * position) % 96 for position in range(60)]
    assert (load(tmp_path).logits(ids) - scaled.logits(ids)).abs().max() > 0.1


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_unknown_rope_type_is_named(tmp_path: Path, key: str) -> None:
    folder = _rope_folder(tmp_path, "linear", key)
    raw = json.loads((folder / "config.json").read_text())
    raw[key]["rope_type"] = "banana"
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"found 'banana'.*default, linear, llama3, yarn"):
        load(folder)


def test_trains(tmp_path: Path) -> None:
    """One step of gradient descent lowers the loss, and the tied table takes both gradients."""
    model, _ = _saved(tmp_path, TINY)
    ids = torch.tensor([PROMPT])

    def loss() -> torch.Tensor:
        logits = model(ids)[0][0, :-1]
        return torch.nn.functional.cross_entropy(logits, ids[0, 1:])

    before = loss()
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=1e-3)
    assert loss() < before
