"""What llama.cpp's converter does with each family (`conversion/`), told by Hugging Face's names and keys.

The metadata that a family's file has, the tensors that it holds in another form, and configs that such a
file can say in full: what has no key in GGUF is what llama.cpp takes for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf.constants import MODEL_ARCH, Keys
from numpy.typing import NDArray

Array = NDArray[np.float32]
Change = Callable[[str, Array, Any], Mapping[str, Array]]


@dataclass(frozen=True)
class Convention:
    """One family.

    Attributes:
        arch: Its name in the gguf package.
        change: (name, values, config) -> the tensors that one becomes, by name.
        keys: Config key -> metadata key, besides those that most families have.
        constants: Metadata that says the same for every model.
        cases: Changes to the family's tiny config by a name, each a model that a file can say.
    """

    arch: MODEL_ARCH
    change: Change = lambda name, array, config: {name: array}
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"tiny": {}})


def interleave(rows: Array, heads: int) -> Array:
    """Halves of each head's rows in turns: row r and row r + D/2 become neighbours."""
    width = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, width, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _interleaved(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    if ".q_proj." in name:
        return {name: interleave(array, config.num_attention_heads)}
    if ".k_proj." in name:
        return {name: interleave(array, config.num_key_value_heads)}
    return _experts(name, array, config)


def _raised(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    return {name: array + 1 if name.endswith("norm.weight") else array}


def _turned(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    products = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {name: array.T if name.endswith(products) else array}


def _regrouped(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    """Q, K and V of each head in turn -> all of Q, all of K, all of V."""
    if (
        config.model_type == "bloom"
    ):  # is converted as its checkpoints are, without the outer module
        name = name.removeprefix("transformer.")
    if "query_key_value" not in name:
        return {name: array}
    heads = config.num_attention_heads
    groups = getattr(config, "num_kv_heads", heads)
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        groups = 1
    rest = array.shape[1:]
    parts = array.reshape(groups, heads // groups + 2, config.hidden_size // heads, *rest)
    split = (parts[:, :-2], parts[:, -2], parts[:, -1])
    return {name: np.concatenate([part.reshape(-1, *rest) for part in split])}


def _experts(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    """Gate and up matrices of all experts in a tensor each."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        gate, up = np.split(array, 2, axis=1)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if last == "down_proj":
        return {f"{name}.weight": array}
    return {name: array}


_EXPERTS = {
    "moe_intermediate_size": Keys.LLM.EXPERT_FEED_FORWARD_LENGTH,
    "num_experts": Keys.LLM.EXPERT_COUNT,
    "num_local_experts": Keys.LLM.EXPERT_COUNT,
    "num_experts_per_tok": Keys.LLM.EXPERT_USED_COUNT,
}
_ROWS = {"vocab_size": Keys.LLM.VOCAB_SIZE}
_WINDOW = {"sliding_window": Keys.Attention.SLIDING_WINDOW}
_CAPS = {
    "attn_logit_softcapping": Keys.LLM.ATTN_LOGIT_SOFTCAPPING,
    "final_logit_softcapping": Keys.LLM.FINAL_LOGIT_SOFTCAPPING,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 20.0,
    "beta_slow": 2.0,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
# For heads of 16 widths, half of which turn.
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 4.0, 7.5],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}

CONVENTIONS: Mapping[str, Convention] = {
    "bloom": Convention(MODEL_ARCH.BLOOM, _regrouped),
    "cohere": Convention(
        MODEL_ARCH.COMMAND_R,
        keys={"logit_scale": Keys.LLM.LOGIT_SCALE},
        constants={Keys.Rope.SCALING_TYPE: "none"},
        cases={"head norms": {"use_qk_norm": True}, "plain": {"use_qk_norm": False}},
    ),
    "cohere2": Convention(
        MODEL_ARCH.COHERE2,
        keys={"logit_scale": Keys.LLM.LOGIT_SCALE, **_WINDOW, **_ROWS},
        constants={Keys.Rope.SCALING_TYPE: "none"},
        cases={"tiny": {"attention_bias": False, "num_hidden_layers": 4, "layer_types": None}},
    ),
    "falcon": Convention(
        MODEL_ARCH.FALCON,
        _regrouped,
        constants={Keys.LLM.TENSOR_DATA_LAYOUT: "jploski"},
        cases={
            "groups, two norms": {"ffn_hidden_size": 256},
            "groups, one norm": {"ffn_hidden_size": 256, "num_ln_in_parallel_attn": 1},
            "one KV head": {
                "ffn_hidden_size": 256,
                "new_decoder_architecture": False,
                "num_ln_in_parallel_attn": None,
                "num_kv_heads": 1,
            },
        },
    ),
    "gemma": Convention(MODEL_ARCH.GEMMA, _raised),
    "gemma2": Convention(
        MODEL_ARCH.GEMMA2,
        _raised,
        keys={**_CAPS, **_WINDOW},
        cases={"tiny": {"query_pre_attn_scalar": 32, "layer_types": None}},
    ),
    "gemma3_text": Convention(
        MODEL_ARCH.GEMMA3,
        _raised,
        keys={"final_logit_softcapping": Keys.LLM.FINAL_LOGIT_SOFTCAPPING, **_WINDOW},
        cases={
            "caps, seven layers": {
                "query_pre_attn_scalar": 32,
                "num_hidden_layers": 7,
                "layer_types": None,
                "final_logit_softcapping": 20.0,
            },
            "scaled": {
                "query_pre_attn_scalar": 32,
                "num_hidden_layers": 6,
                "layer_types": None,
                "rope_parameters": {
                    "full_attention": _LINEAR,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
            },
        },
    ),
    "gpt2": Convention(
        MODEL_ARCH.GPT2,
        _turned,
        cases={"tiny": {"n_inner": None}, "untied": {"tie_word_embeddings": False}},
    ),
    "gpt_neox": Convention(
        MODEL_ARCH.GPTNEOX,
        _regrouped,
        keys={"use_parallel_residual": Keys.LLM.USE_PARALLEL_RESIDUAL},
        cases={"side by side": {}, "in turn": {"use_parallel_residual": False}},
    ),
    "granite": Convention(
        MODEL_ARCH.GRANITE,
        _interleaved,
        keys={
            **_ROWS,
            "attention_multiplier": Keys.Attention.SCALE,
            "embedding_multiplier": Keys.LLM.EMBEDDING_SCALE,
            "residual_multiplier": Keys.LLM.RESIDUAL_SCALE,
            "logits_scaling": Keys.LLM.LOGIT_SCALE,
        },
        cases={"tiny": {}, "biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "llama": Convention(
        MODEL_ARCH.LLAMA,
        _interleaved,
        keys=_ROWS,
        cases={
            "one KV head": {"num_key_value_heads": 1},
            "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
            "llama3": {"rope_parameters": _LLAMA3},
            "yarn": {"rope_parameters": _YARN},
            "linear": {"rope_parameters": _LINEAR},
        },
    ),
    "mixtral": Convention(
        MODEL_ARCH.LLAMA,
        _interleaved,
        {**_EXPERTS, **_ROWS},
        cases={"tiny": {}, "tied": {"tie_word_embeddings": True, "num_local_experts": 5}},
    ),
    "olmo2": Convention(MODEL_ARCH.OLMO2),
    "phi": Convention(
        MODEL_ARCH.PHI2, cases={"tiny": {"intermediate_size": 256, "qk_layernorm": False}}
    ),
    "phi3": Convention(
        MODEL_ARCH.PHI3,
        keys=_WINDOW,
        cases={
            "window": {},
            "longrope": {
                "rope_parameters": _LONG,
                "original_max_position_embeddings": 16,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "hidden_size": 64,
            },
        },
    ),
    "qwen2": Convention(
        MODEL_ARCH.QWEN2,
        cases={"tiny": {}, "untied": {"tie_word_embeddings": False, "rope_parameters": _YARN}},
    ),
    "qwen2_moe": Convention(
        MODEL_ARCH.QWEN2MOE,
        _experts,
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH,
        },
    ),
    "qwen3": Convention(MODEL_ARCH.QWEN3, cases={"tiny": {}, "biases": {"attention_bias": True}}),
    "qwen3_moe": Convention(MODEL_ARCH.QWEN3MOE, _experts, _EXPERTS),
    "smollm3": Convention(
        MODEL_ARCH.SMOLLM3,
        _interleaved,
        keys=_ROWS,
        cases={"tiny": {"num_hidden_layers": 4, "no_rope_layer_interval": 4}},
    ),
    "stablelm": Convention(
        MODEL_ARCH.STABLELM,
        keys={"use_parallel_residual": Keys.LLM.USE_PARALLEL_RESIDUAL},
        cases={
            "in turn": {},
            "head norms": {"qk_layernorm": True, "use_qkv_bias": True},
            "side by side": {"use_parallel_residual": True},
        },
    ),
}
