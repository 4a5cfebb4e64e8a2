"""Values of config keys: what no model can have is refused by name, what changes nothing is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.hot import hot_model, oracle_logits, save_folder
from support.parity import assert_logits_close
from support.refusals import refusal
from transformers import AutoModelForCausalLM

from onnxlm.errors import ConfigError
from onnxlm.models import load
from onnxlm.models.checkpoint.matching import outline
from onnxlm.models.config import ConfigReader
from onnxlm.models.registry import find_architecture

IDS = [5, 17, 3, 91, 44, 2, 60, 8]
NAN = float("nan")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tried(family: str, **changes: Any) -> None:
    """Read a config and lay the model out, as every command does first."""
    architecture = find_architecture(family)
    raw = {**architecture.tiny, **changes}
    outline(architecture, architecture.parse_config(ConfigReader(raw, "config.json")))


def scaled(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {**settings, **changes}}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [[1, 2], "dynamic", 4.0])
@pytest.mark.parametrize("family", ["llama", "stablelm", "gemma3_text"])
def test_rotary_settings_that_are_no_object(family: str, key: str, value: object) -> None:
    changes = {"rope_parameters": None, key: value}
    with pytest.raises(ConfigError, match=f"field '{key}' has a wrong type; found .*an object"):
        tried(family, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (scaled(YARN, original_max_position_embeddings=0), "'original_max_position_embeddings'"),
        (scaled(YARN, beta_slow=0), "'beta_slow'"),
        (
            scaled(YARN, factor=-4.0),
            "'factor' has a wrong value; found -4.0; allowed: a number above 0",
        ),
        (
            scaled(YARN, mscale=-1.0),
            "'mscale' has a wrong value; found -1.0; allowed: a number from 0 up",
        ),
        (scaled(YARN, truncate=1), "'truncate' has a wrong value; found 1; allowed: true or false"),
        (scaled({"type": "linear", "factor": 0}), "'factor' has a wrong value; found 0"),
        (scaled({"type": "linear", "factor": True}), "'factor' has a wrong value; found True"),
        (scaled({"type": "linear", "factor": NAN}), "'factor' has a wrong value; found nan"),
        (scaled({"type": "linear", "factor": "2"}), "'factor' has a wrong value; found '2'"),
        (
            scaled({"type": "linear", "factor": 2.0}) | {"rope_theta": 0},
            "'rope_theta' has a wrong value; found 0",
        ),
        (scaled({}) | {"rope_theta": -5.0}, "'rope_theta' has a wrong value; found -5.0"),
        (scaled({}) | {"rope_theta": "10000"}, "'rope_theta' has a wrong value; found '10000'"),
        (
            scaled(YARN) | {"rope_theta": 1.0},
            "of type 'yarn' give no frequencies; found rope_theta",
        ),
        (
            scaled(LLAMA3, low_freq_factor=2.0, high_freq_factor=2.0, factor=1e-320),
            "of type 'llama3' give no frequencies",
        ),
    ],
)
def test_rotary_numbers_without_frequencies(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tried("llama", **changes)
    assert named in str(raised.value)


def test_temperatures_of_zero_are_none() -> None:
    """`if mscale and mscale_all_dim` (transformers, modeling_rope_utils.py)."""
    tried("llama", **scaled(YARN, mscale=0, mscale_all_dim=0.0, truncate=False))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gemma2", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar'; found 0.0; allowed: above"),
        ("gemma3_text", {"query_pre_attn_scalar": -1}, "'query_pre_attn_scalar'; found -1.0"),
        ("granite", {"logits_scaling": 0}, "'logits_scaling'; found 0.0; allowed: above 0"),
        ("llama", {"rms_norm_eps": NAN}, "'rms_norm_eps'; found nan; allowed: a finite number"),
        ("gpt2", {"layer_norm_epsilon": float("inf")}, "'layer_norm_epsilon'; found inf"),
        ("llama", {"num_key_value_heads": 3}, "no multiple of 'num_key_value_heads'; found 4 and 3"),
        ("mixtral", {"num_experts_per_tok": 99}, "'num_experts_per_tok'; found 99; allowed: at most"),
        ("qwen2_moe", {"num_experts_per_tok": 99}, "'num_experts_per_tok'; found 99"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, "'num_experts_per_tok'; found 99"),
        ("gpt_oss", {"num_experts_per_tok": 99}, "'experts_per_token'; found 99"),
        ("deepseek_v2", {"num_experts_per_tok": 99}, "'num_experts_per_tok'; found 99"),
        ("phi", {"rope_parameters": {"partial_rotary_factor": 0}}, "'partial_rotary_factor'; found 0"),
        ("phi", {"rope_parameters": {"partial_rotary_factor": "x"}}, "'partial_rotary_factor'"),
        ("phi3", {"full_attn_mod": 2}, "'full_attn_mod' is not supported with this value; found 2"),
        ("phi3", {"interpolate_factor": 4}, "'interpolate_factor' is not supported"),
        ("qwen3_moe", {"use_qk_norm": False}, "'use_qk_norm' is not supported"),
        ("opt", {"learned_embeddings": False}, "'learned_embeddings' is not supported"),
        ("falcon", {"ff_factor": 3}, "'ff_factor' is not supported with this value; found 3"),
        ("mistral", {"num_key_value_heads": None}, "'num_key_value_heads' is missing"),
    ],
)  # fmt: skip
def test_values_that_no_model_can_have(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tried(family, **changes)
    message = str(raised.value)
    assert named in message
    assert "\n" not in message


EVERYWHERE = {
    "_num_labels": 1,
    "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.Pipeline", "pt": "x"}},
    "output_past": True,
    "unsloth_fixed": True,
    "unsloth_version": "2024.9",
}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"is_llama_config": True, "rope_interleaved": False}),  # SmolLM2
        ("llama", {"max_sequence_length": 16384}),  # Vicuna 1.5 16k
        ("llama", EVERYWHERE),
        ("gpt_neox", EVERYWHERE),  # Dolly 2
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1}),  # Phi-4 mini
        ("qwen3_moe", {"use_qk_norm": True}),  # Qwen3-Coder
        ("gpt2", {"predict_special_tokens": True, "output_past": True}),
        ("opt", {"learned_embeddings": True}),  # Galactica
        ("falcon", {"ff_factor": 1.5}),  # Falcon 11B has 4, the ratio of its widths
        ("cohere2", {"use_parallel_embedding": True, "use_embedding_sharing": True}),  # Command R7B
    ],
)
def test_keys_of_published_configs_that_change_nothing(
    tmp_path: Path, family: str, keys: dict[str, Any]
) -> None:
    oracle = hot_model(find_architecture(family).tiny)
    save_folder(oracle, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    # Read back with the keys: transformers says that they change nothing.
    theirs = oracle_logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), IDS)
    assert_logits_close(load(tmp_path).logits(IDS), theirs)


@pytest.mark.parametrize(
    "family", ["llama", "granite", "olmo2", "phi", "phi3", "cohere", "cohere2"]
)
def test_as_many_key_value_heads_as_heads_where_transformers_means_that(
    tmp_path: Path, family: str
) -> None:
    tiny = find_architecture(family).tiny
    heads = tiny["num_attention_heads"]
    oracle = hot_model({**tiny, "num_key_value_heads": heads})
    path = save_folder(oracle, tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    del raw["num_key_value_heads"]
    path.write_text(json.dumps(raw))
    assert_logits_close(load(tmp_path).logits(IDS), oracle_logits(oracle, IDS))


def test_the_line_of_a_refused_folder(tmp_path: Path) -> None:
    save_folder(hot_model(find_architecture("llama").tiny), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": [1]}))
    assert refusal(tmp_path) == (
        "config.json: field 'rope_parameters' has a wrong type; found [1]; allowed: an object"
    )
