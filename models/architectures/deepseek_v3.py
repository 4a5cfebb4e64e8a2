"""DeepSeek-V3 and R1: latent attention, many small experts behind a sigmoid router.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1. Modules that predict further tokens
(section 2.2) take no part in a forward pass and are not loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from onnxlm.models.layers.moe import GroupRouter, GroupSpec
from onnxlm.models.registry import Architecture

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


def _parse_config(reader: ConfigReader) -> DeepseekConfig:
    reader.spelled({"num_nextn_predict_layers": "num_mtp_layers"})
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    config = DeepseekConfig(
        **common_fields(reader, positions=4096),
        further_layers=reader.get("num_nextn_predict_layers", int, 1),
        rope_interleave=reader.get("rope_interleave", bool, True),
        first_k_dense_replace=reader.get("first_k_dense_replace", int, 3),
        n_shared_experts=reader.positive("n_shared_experts", 1),
        n_group=reader.positive("n_group", 8),
        topk_group=reader.positive("topk_group", 4),
        norm_topk_prob=reader.get("norm_topk_prob", bool, True),
        routed_scaling_factor=reader.get("routed_scaling_factor", float, 2.5),
    )
    reader.finish()
    check_groups(config)
    return config


def _build(config: DeepseekConfig) -> DecoderLM:
    def router() -> GroupRouter:
        spec = GroupSpec(
            groups=config.n_group,
            chosen_groups=config.topk_group,
            scores="sigmoid",
            group_top=2,
            bias=True,
            normalize=config.norm_topk_prob,
            factor=config.routed_scaling_factor,
        )
        experts, top_k = config.n_routed_experts, config.num_experts_per_tok
        return GroupRouter(config.hidden_size, experts, top_k, spec)

    return build(config, router)


def _gguf_routing(own: FamilyMetadata) -> dict[str, Any]:
    count, used = groups(own)
    return {
        "n_group": count,
        "topk_group": used,
        "rope_interleave": True,
        # llama.cpp's converter leaves out the layers that predict further tokens.
        "num_nextn_predict_layers": 0,
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=RULES,
    gguf=gguf_family("deepseek_v3", "DeepseekV3ForCausalLM", True, _gguf_routing),
    tiny={
        "model_type": "deepseek_v3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "qk_nope_head_dim": 16,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_interleave": True,
        "attention_bias": False,
    },
    variants={
        "plain queries, biases, halves, two shared, yarn": {
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
            },
        },
    },
)
