"""DeepSeek-V3, R1 and Kimi K2: latent attention, many small experts behind a sigmoid router.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1. Modules that predict further tokens
(section 2.2) take no part in a forward pass and are not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from onnxlm.models.architectures._common import MLP, NORMS, OUTER, PROJECTIONS, embedding_and_head
from onnxlm.models.config import ConfigReader, ModelConfig
from onnxlm.models.layers.decoder import DecoderLayer, DecoderLM
from onnxlm.models.layers.mla import LatentAttention, LatentSpec
from onnxlm.models.layers.mlp import GatedMLP
from onnxlm.models.layers.moe import Experts, GroupRouter, SparseMLP
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotary import RopeConfig, rope_tables, yarn_score_factor
from onnxlm.models.registry import Architecture
from onnxlm.models.weight_rules import Cut, Rules, Stack, under


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """Both generations' numbers, by Hugging Face key name."""

    intermediate_size: int
    moe_intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_interleave: bool
    attention_bias: bool
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


def _parse_config(reader: ConfigReader) -> DeepseekConfig:
    fields = reader.model_fields()
    for key in ("num_key_value_heads", "head_dim", "qk_head_dim"):
        reader.unused(key)  # follow from the others, or stand for nothing in latent attention
    for key in ("num_nextn_predict_layers", "num_mtp_layers", "output_router_logits", "ep_size"):
        reader.unused(key)  # of training, or of modules that are not loaded
    reader.only("hidden_act", "silu")
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    reader.only("moe_layer_freq", 1)
    config = DeepseekConfig(
        **fields,
        intermediate_size=reader.positive("intermediate_size"),
        moe_intermediate_size=reader.positive("moe_intermediate_size"),
        rms_norm_eps=reader.get("rms_norm_eps", float, 1e-6),
        rope=reader.rope(),
        rope_interleave=reader.get("rope_interleave", bool, True),
        attention_bias=reader.get("attention_bias", bool, False),
        q_lora_rank=reader.optional("q_lora_rank", int),
        kv_lora_rank=reader.positive("kv_lora_rank"),
        qk_rope_head_dim=reader.positive("qk_rope_head_dim"),
        qk_nope_head_dim=reader.positive("qk_nope_head_dim"),
        v_head_dim=reader.positive("v_head_dim"),
        first_k_dense_replace=reader.get("first_k_dense_replace", int, 3),
        n_shared_experts=reader.positive("n_shared_experts", 1),
        n_routed_experts=reader.positive("n_routed_experts"),
        num_experts_per_tok=reader.positive("num_experts_per_tok"),
        n_group=reader.positive("n_group"),
        topk_group=reader.positive("topk_group"),
        norm_topk_prob=reader.get("norm_topk_prob", bool, True),
        routed_scaling_factor=reader.get("routed_scaling_factor", float, 2.5),
    )
    reader.finish()
    return config


def _router(config: DeepseekConfig) -> GroupRouter:
    return GroupRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        groups=config.n_group,
        chosen_groups=config.topk_group,
        scores="sigmoid",
        group_top=2,
        bias=True,
        normalize=config.norm_topk_prob,
        factor=config.routed_scaling_factor,
    )


def _sparse(config: DeepseekConfig) -> SparseMLP:
    width = config.moe_intermediate_size
    return SparseMLP(
        _router(config),
        Experts(config.hidden_size, width, config.n_routed_experts),
        GatedMLP(config.hidden_size, width * config.n_shared_experts),
    )


def _build(config: DeepseekConfig) -> DecoderLM:
    query_width = config.qk_nope_head_dim + config.qk_rope_head_dim
    spec = LatentSpec(
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        scale=query_width**-0.5 * yarn_score_factor(config.rope),
        eps=1e-6,  # of the inner norms, whatever the config says of the outer ones
        interleaved=config.rope_interleave,
        bias=config.attention_bias,
    )

    def layer(index: int) -> DecoderLayer:
        dense = index < config.first_k_dense_replace
        mlp: nn.Module = (
            GatedMLP(config.hidden_size, config.intermediate_size) if dense else _sparse(config)
        )
        return DecoderLayer(
            LatentAttention(config.hidden_size, spec),
            mlp,
            RMSNorm(config.hidden_size, config.rms_norm_eps),
            RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    embedding, head = embedding_and_head(config)
    width, positions = config.qk_rope_head_dim, config.max_position_embeddings
    return DecoderLM(
        embedding,
        [layer(index) for index in range(config.num_hidden_layers)],
        RMSNorm(config.hidden_size, config.rms_norm_eps),
        head,
        {"default": rope_tables(config.rope, width, positions)},
    )


def _cut_kv(stored: Tensor, config: DeepseekConfig) -> Sequence[Tensor]:
    """[H * (N + V), C] -> what each head does to its query, [H, N, C], and makes of a latent, [H, C, V]."""
    heads = stored.reshape(config.num_attention_heads, -1, stored.shape[1])
    width = config.qk_nope_head_dim
    return heads[:, :width], heads[:, width:].transpose(1, 2)


_ATTENTION = {
    f"self_attn.{name}": f"self_attn.{name}"
    for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "o_proj")
}
_PREFIX = "model.layers.{i}"
_EXPERT = f"{_PREFIX}.mlp.experts.{{e}}"
RULES: Rules = {
    **OUTER,
    **under(_PREFIX, _ATTENTION | {"self_attn.kv_a_proj_with_mqa": "self_attn.kv_a_proj"}),
    **under(_PREFIX, dict(MLP) | dict(NORMS)),
    **under(_PREFIX, {f"mlp.shared_experts.{p}": f"mlp.shared_expert.{p}" for p in PROJECTIONS}),
    f"{_PREFIX}.self_attn.kv_b_proj.weight": Cut(
        ("layers.{i}.self_attn.k_up.weight", "layers.{i}.self_attn.v_up.weight"), _cut_kv
    ),
    f"{_PREFIX}.mlp.gate.weight": "layers.{i}.mlp.router.gate.weight",
    f"{_PREFIX}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.router.correction_bias",
    f"{_EXPERT}.gate_proj.weight": Stack("layers.{i}.mlp.experts.gate_up", 0, 2),
    f"{_EXPERT}.up_proj.weight": Stack("layers.{i}.mlp.experts.gate_up", 1, 2),
    f"{_EXPERT}.down_proj.weight": Stack("layers.{i}.mlp.experts.down"),
}

ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=RULES,
    tiny={
        "model_type": "deepseek_v3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
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
