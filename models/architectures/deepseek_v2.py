"""DeepSeek-V2 and V2-Lite: latent attention, many small experts behind a softmax router.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), sections 2.1 and 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from onnxlm.models.architectures._deepseek import (
    RULES,
    DeepseekConfig,
    build,
    check_groups,
    common_fields,
)
from onnxlm.models.architectures._deepseek_gguf import gguf_family, groups
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.moe import GroupRouter, GroupSpec, SoftmaxRouter
from onnxlm.models.registry import Architecture

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


def _parse_config(reader: ConfigReader) -> DeepseekConfig:
    reader.only("scoring_func", "softmax")
    reader.only("topk_method", "greedy", "group_limited_greedy")
    # DeepSeek's own code would normalize; transformers' does not, and no published model asks for it.
    reader.only("norm_topk_prob", False)
    grouped = reader.get("topk_method", str, "greedy") == "group_limited_greedy"
    if not grouped:
        reader.unused("n_group", "topk_group")
    config = DeepseekConfig(
        **common_fields(reader, positions=2048),
        rope_interleave=True,
        mlp_bias=reader.get("mlp_bias", bool, False),
        first_k_dense_replace=reader.get("first_k_dense_replace", int, 0),
        n_shared_experts=reader.positive("n_shared_experts", 2),
        n_group=reader.positive("n_group") if grouped else 1,
        topk_group=reader.positive("topk_group") if grouped else 1,
        norm_topk_prob=False,
        routed_scaling_factor=reader.get("routed_scaling_factor", float, 1.0),
    )
    reader.finish()
    check_groups(config)
    return config


def _build(config: DeepseekConfig) -> DecoderLM:
    hidden, count, top_k = (
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
    )
    factor = config.routed_scaling_factor

    def router() -> nn.Module:
        if config.n_group == config.topk_group:
            return SoftmaxRouter(hidden, count, top_k, normalize=False, factor=factor)
        spec = GroupSpec(
            groups=config.n_group,
            chosen_groups=config.topk_group,
            scores="softmax",
            group_top=1,
            bias=False,
            normalize=False,
            factor=factor,
        )
        return GroupRouter(hidden, count, top_k, spec)

    return build(config, router)


def _gguf_routing(own: FamilyMetadata) -> dict[str, Any]:
    count, used = groups(own)
    return {
        "scoring_func": "softmax",
        # By a group's best expert, as published; llama.cpp takes DeepSeek-V3's two for both generations.
        "topk_method": "group_limited_greedy" if count > 1 else "greedy",
        "n_group": count,
        "topk_group": used,
        "mlp_bias": False,
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=RULES,
    gguf=gguf_family("deepseek_v2", "DeepseekV2ForCausalLM", False, _gguf_routing),
    tiny={
        "model_type": "deepseek_v2",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 2,
        "n_routed_experts": 8,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "qk_nope_head_dim": 16,
        "topk_method": "greedy",
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
    },
    variants={
        "groups, narrow queries, biases, scaled, dense first, yarn": {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "routed_scaling_factor": 3.0,
            "first_k_dense_replace": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
        },
    },
)
