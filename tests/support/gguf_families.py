"""What llama.cpp's converter does with each family (`conversion/`), told by Hugging Face's names and keys.

The metadata that a family's file has, the tensors that it holds in another form, and configs that such a
file can say in full: what has no key in GGUF is what llama.cpp takes for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf.constants import MODEL_ARCH, ExpertGatingFuncType, Keys

from support.gguf_forms import (
    Form,
    experts,
    in_turns,
    interleaved,
    latent,
    latent_metadata,
    raised,
    regrouped,
    turned,
)


@dataclass(frozen=True)
class Convention:
    """One family.

    Attributes:
        arch: Its name in the gguf package.
        change: (name, values, config) -> the tensors that one becomes, by name.
        keys: Config key -> metadata key, besides those that most families have.
        constants: Metadata that says the same for every model.
        derived: config -> metadata that is made of several of its keys, or in place of what is usual.
        cases: Changes to the family's tiny config by a name, each a model that a file can say.
    """

    arch: MODEL_ARCH
    change: Form = lambda name, array, config: {name: array}
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"tiny": {}})


_EXPERTS = {
    "moe_intermediate_size": Keys.LLM.EXPERT_FEED_FORWARD_LENGTH,
    "num_experts": Keys.LLM.EXPERT_COUNT,
    "num_local_experts": Keys.LLM.EXPERT_COUNT,
    "num_experts_per_tok": Keys.LLM.EXPERT_USED_COUNT,
}
_LATENT = {
    **_EXPERTS,
    "vocab_size": Keys.LLM.VOCAB_SIZE,
    "kv_lora_rank": Keys.Attention.KV_LORA_RANK,
    "q_lora_rank": Keys.Attention.Q_LORA_RANK,
    "first_k_dense_replace": Keys.LLM.LEADING_DENSE_BLOCK_COUNT,
    "n_routed_experts": Keys.LLM.EXPERT_COUNT,
    "n_shared_experts": Keys.LLM.EXPERT_SHARED_COUNT,
    "n_group": Keys.LLM.EXPERT_GROUP_COUNT,
    "topk_group": Keys.LLM.EXPERT_GROUP_USED_COUNT,
    "norm_topk_prob": Keys.LLM.EXPERT_WEIGHTS_NORM,
    "routed_scaling_factor": Keys.LLM.EXPERT_WEIGHTS_SCALE,
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
    "bloom": Convention(MODEL_ARCH.BLOOM, regrouped),
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
    "deepseek_v2": Convention(
        MODEL_ARCH.DEEPSEEK2,
        latent,
        _LATENT,
        {Keys.LLM.EXPERT_GATING_FUNC: int(ExpertGatingFuncType.SOFTMAX)},
        latent_metadata,
        {
            "plain queries": {},
            "groups, narrow queries, scaled, dense first, yarn": {
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "q_lora_rank": 24,
                "routed_scaling_factor": 3.0,
                "first_k_dense_replace": 1,
                "tie_word_embeddings": True,
                "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
            },
        },
    ),
    "deepseek_v3": Convention(
        MODEL_ARCH.DEEPSEEK2,
        latent,
        _LATENT,
        {Keys.LLM.EXPERT_GATING_FUNC: int(ExpertGatingFuncType.SIGMOID)},
        latent_metadata,
        {
            "groups, dense first": {},
            "one group, plain queries, yarn": {
                "n_group": 1,
                "topk_group": 1,
                "q_lora_rank": None,
                "norm_topk_prob": False,
                "n_shared_experts": 2,
                "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
            "yarn without a temperature": {"rope_parameters": _YARN},
        },
    ),
    "falcon": Convention(
        MODEL_ARCH.FALCON,
        regrouped,
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
    "gemma": Convention(MODEL_ARCH.GEMMA, raised),
    "gemma2": Convention(
        MODEL_ARCH.GEMMA2,
        raised,
        keys={**_CAPS, **_WINDOW},
        cases={"tiny": {"query_pre_attn_scalar": 32, "layer_types": None}},
    ),
    "gemma3_text": Convention(
        MODEL_ARCH.GEMMA3,
        raised,
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
        turned,
        cases={"tiny": {"n_inner": None}, "untied": {"tie_word_embeddings": False}},
    ),
    "gpt_neox": Convention(
        MODEL_ARCH.GPTNEOX,
        regrouped,
        keys={"use_parallel_residual": Keys.LLM.USE_PARALLEL_RESIDUAL},
        cases={"side by side": {}, "in turn": {"use_parallel_residual": False}},
    ),
    "gpt_oss": Convention(
        MODEL_ARCH.GPT_OSS,
        in_turns,
        {**_EXPERTS, **_WINDOW, "intermediate_size": Keys.LLM.EXPERT_FEED_FORWARD_LENGTH},
        cases={
            "scaled as published": {},
            "plain positions, tied, three layers": {
                "tie_word_embeddings": True,
                "num_hidden_layers": 3,
                "layer_types": None,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
    ),
    "granite": Convention(
        MODEL_ARCH.GRANITE,
        interleaved,
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
        interleaved,
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
        interleaved,
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
        experts,
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH,
        },
    ),
    "qwen3": Convention(MODEL_ARCH.QWEN3, cases={"tiny": {}, "biases": {"attention_bias": True}}),
    "qwen3_moe": Convention(MODEL_ARCH.QWEN3MOE, experts, _EXPERTS),
    "smollm3": Convention(
        MODEL_ARCH.SMOLLM3,
        interleaved,
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
