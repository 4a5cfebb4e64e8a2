"""What inspection counts: shapes against transformers, caches against formulas worked by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hot import hot_model, save_folder
from transformers import AutoConfig, AutoModelForCausalLM

from onnxlm.components import Component, component_of, components_of
from onnxlm.config_inspection import states_of
from onnxlm.errors import ConfigError, InputError
from onnxlm.inspection import inspect, kv_cache_of
from onnxlm.models.registry import architecture_names, find_architecture

TINY = dict(find_architecture("llama").tiny)


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("embed_tokens.weight", "embedding"),
        ("embed_tokens.weight.q8_rows", "embedding"),
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("transformer.wpe.weight", "positions"),
        ("embed_positions.weight", "positions"),
        ("layers.3.self_attn.qkv_proj.weight", "attention"),
        ("layers.3.self_attn.o_proj.bias", "attention"),
        ("transformer.h.0.attn.c_attn.weight", "attention"),
        ("gpt_neox.layers.1.attention.query_key_value.weight", "attention"),
        ("layers.3.self_attn.q_norm.weight", "norms"),
        ("layers.3.input_layernorm.weight", "norms"),
        ("transformer.h.0.ln_1.weight", "norms"),
        ("norm.weight", "norms"),
        ("layers.3.mlp.gate_up_proj.weight.scale", "mlp"),
        ("model.layers.0.block_sparse_moe.experts.7.w1.weight", "mlp"),
        ("lm_head.weight", "head"),
        ("embed_out.weight", "head"),
        ("rope_default_cos", "rotary tables"),
        ("split_1536_1536", "other"),
        ("val_67", "other"),
    ],
)
def test_names_tell_the_component(name: str, component: str) -> None:
    assert component_of(name) == component


def test_components_are_summed() -> None:
    sizes = {"embed_tokens.weight.q8": 70, "embed_tokens.weight.scale": 8, "rope_default_cos": 16}
    shapes = {"embed_tokens.weight": (7, 10), "norm.weight": (10,)}
    assert components_of(sizes, shapes, tied=True) == (
        Component("embedding", 70, 78, 0),
        Component("norms", 10, 0, 0),
        Component("head", 0, 0, 0, tied_to="embedding"),
        Component("rotary tables", 0, 16, 0),
    )


def test_biases_of_products_are_counted_among_the_parameters() -> None:
    """A norm's bias is not one of them."""
    shapes = {"self_attn.q_proj.weight": (4, 4), "self_attn.q_proj.bias": (4,), "norm.bias": (4,)}
    shapes["mlp.experts.gate_up_bias"] = (3, 8)
    assert components_of({}, shapes, tied=False) == (
        Component("attention", 20, 0, 4),
        Component("mlp", 24, 0, 24),
        Component("norms", 4, 0, 0),
    )


def test_without_shapes_parameters_are_not_known() -> None:
    (part,) = components_of({"norm.weight": 40}, {}, tied=False)
    assert part == Component("norms", None, 40)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_those_of_transformers(tmp_path: Path, tied: bool, bias: bool) -> None:
    config = TINY | {"tie_word_embeddings": tied, "attention_bias": bias, "mlp_bias": bias}
    found = inspect(write_config(tmp_path / "model", config))
    keys = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **keys))
    expected: Counter[str] = Counter()
    for name, parameter in model.named_parameters():  # a tied one comes once, by its first name
        place = name.split(".")[1 if "layers" not in name else 3]
        part = {"embed_tokens": "embedding", "self_attn": "attention", "weight": "head"}
        expected[part.get(place, place if place == "mlp" else "norms")] += parameter.numel()
    counted = {part.name: part.parameters for part in found.components if part.parameters}
    assert counted == dict(expected)
    head = next(part for part in found.components if part.name == "head")
    assert head.tied_to == ("embedding" if tied else None)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_bytes_of_a_checkpoint_are_those_of_its_file(
    tmp_path: Path, dtype: str, width: int
) -> None:
    model = hot_model(TINY).to(getattr(torch, dtype))
    folder = save_folder(model, tmp_path / "model")
    total = sum(parameter.numel() for parameter in model.parameters())
    stored = inspect(folder)
    assert stored.kind == "huggingface"
    assert sum(part.bytes for part in stored.components) == width * total
    alone = inspect(folder / "config.json")
    assert alone.kind == "config"
    assert alone.components == stored.components


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_without_weights_the_cache_is_of_their_type(tmp_path: Path, dtype: str, width: int) -> None:
    found = inspect(write_config(tmp_path / "model", TINY | {"dtype": dtype}))
    assert found.kv_cache is not None
    assert found.kv_cache.bytes_per_token == 2 * 2 * 2 * 32 * width  # layers, two, heads, width


def test_what_a_token_uses_of_a_mixture(tmp_path: Path) -> None:
    """Of five experts one: 4/5 of three matrices a layer are idle."""
    tiny = dict(find_architecture("mixtral").tiny)
    tiny |= {"num_local_experts": 5, "num_experts_per_tok": 1}
    found = inspect(write_config(tmp_path / "model", tiny))
    whole = sum(part.parameters or 0 for part in found.components)
    matrices = 3 * tiny["hidden_size"] * tiny["intermediate_size"] * tiny["num_hidden_layers"]
    assert found.active_parameters == whole - 4 * matrices
    everything = tiny | {"num_experts_per_tok": 5}
    assert inspect(write_config(tmp_path / "other", everything)).active_parameters is None


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "name"),
    [(4, 4, "MHA"), (4, 2, "GQA"), (4, 1, "MQA"), (1, 1, "MHA")],
)
def test_cache(query_heads: int, kv_heads: int, name: str) -> None:
    layers = [{"key": (kv_heads, 20), "value": (kv_heads, 20)}] * 3
    cache = kv_cache_of(states_of(layers, [0] * len(layers)), query_heads, [1, 7, 1000], 64)
    assert cache is not None
    token = 3 * 2 * kv_heads * 20 * 4  # layers, key and value, heads, width, bytes of a float32
    assert (cache.attention, cache.bytes_per_token) == (name, token)
    assert cache.bytes_at == {1: token, 7: 7 * token, 1000: 1000 * token}


def test_usual_lengths_end_at_the_context() -> None:
    for context, lengths in ((64, [64]), (1024, [1024]), (8192, [1024, 4096, 8192])):
        cache = kv_cache_of(states_of([{"key": (1, 8), "value": (1, 8)}], [0]), 1, None, context)
        assert cache is not None
        assert list(cache.bytes_at) == lengths


def test_a_length_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="length of a cache; found 0; allowed: 1 and more"):
        inspect(write_config(tmp_path / "model", TINY), [4, 0])


FOREIGN = {
    # model_type: (config keys, layers * 2 * key-value heads * head width, worked by hand)
    "codegen": ({"n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 128}, 3 * 2 * 4 * 16),
    "gpt_bigcode": ({"n_layer": 2, "n_head": 4, "n_embd": 32, "multi_query": True}, 2 * 2 * 1 * 8),
    "mpt": ({"n_layers": 2, "n_heads": 4, "d_model": 48}, 2 * 2 * 4 * 12),
    "olmo": (
        {
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "hidden_size": 128,
        },
        5 * 2 * 2 * 16,
    ),
}


@pytest.mark.parametrize("model_type", sorted(FOREIGN.keys() - set(architecture_names())))
def test_families_that_cannot_be_exported_yet_have_a_cache(tmp_path: Path, model_type: str) -> None:
    keys, values = FOREIGN[model_type]
    config = {"model_type": model_type, "architectures": ["XForCausalLM"], **keys}
    found = inspect(write_config(tmp_path / "model", config), [1, 10])
    assert found.kv_cache is not None
    assert found.kv_cache.bytes_at == {1: 4 * values, 10: 40 * values}
    assert found.components == ()
    assert any("cannot be exported yet" in text for text in found.notes)


def test_stored_weights_are_counted_by_their_names(tmp_path: Path) -> None:
    """GPT-BigCode: one key-value head of 8 beside 4 query heads."""
    config = {
        "model_type": "gpt_bigcode",
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "n_positions": 40,
        "vocab_size": 50,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    found = inspect(save_folder(hot_model(config), tmp_path / "model"))
    counted = {part.name: part.parameters for part in found.components}
    assert counted == {
        "embedding": 50 * 32,
        "positions": 40 * 32,
        "attention": 2 * (32 * 48 + 48 + 32 * 32 + 32),
        "mlp": 2 * (32 * 128 + 128 + 128 * 32 + 32),
        "norms": (2 * 2 + 1) * 2 * 32,
        "head": 0,
    }
    assert found.context_length == 40


def test_an_encoder_has_no_cache(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    assert inspect(write_config(tmp_path / "model", config)).kv_cache is None


@pytest.mark.parametrize("config", [{"model_type": "banana"}, {}, {"model_type": 3}])
def test_a_config_nothing_is_known_of(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="model_type"):
        inspect(write_config(tmp_path / "model", config))
