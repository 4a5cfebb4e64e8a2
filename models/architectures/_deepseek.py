"""What the generations of DeepSeek share: latent attention, and experts beside shared ones.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), sections 2.1 and 2.2; Dai et al., "DeepSeekMoE" (2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from onnxlm.errors import ConfigError
from onnxlm.models.architectures._common import MLP, NORMS, OUTER, PROJECTIONS, embedding_and_head
from onnxlm.models.architectures._mixture import UNUSED, expert_rules
from onnxlm.models.config import ConfigReader, ModelConfig
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.mla import LatentAttention, LatentSpec
from onnxlm.models.layers.mlp import GatedMLP
from onnxlm.models.layers.moe import Experts, SparseMLP
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotary import RopeConfig, rope_tables, yarn_score_factor
from onnxlm.models.weight_rules import Cut, Rules, under


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """All generations' numbers, by Hugging Face key name.

    Attributes:
        n_group: Groups that the experts are in; 1 where they are in none.
        topk_group: Groups that a token may use.
    """

    intermediate_size: int
    moe_intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_interleave: bool
    attention_bias: bool
    mlp_bias: bool = False
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


def common_fields(reader: ConfigReader, positions: int) -> dict[str, Any]:
    """Fields of `DeepseekConfig` whose keys all generations share.

    Args:
        reader: The config.
        positions: `max_position_embeddings` where the config does not say.
    """
    # They follow from the others, or stand for nothing in latent attention.
    reader.unused("num_key_value_heads", "head_dim", "qk_head_dim")
    # Of training, or of where experts run.
    reader.unused(*UNUSED, "ep_size", "seq_aux", "aux_loss_alpha")
    reader.only("hidden_act", "silu")
    reader.only("moe_layer_freq", 1)
    return reader.model_fields(positions=positions) | {
        "intermediate_size": reader.positive("intermediate_size"),
        "moe_intermediate_size": reader.positive("moe_intermediate_size"),
        "rms_norm_eps": reader.get("rms_norm_eps", float, 1e-6),
        "rope": reader.rope(),
        "attention_bias": reader.get("attention_bias", bool, False),
        "q_lora_rank": reader.optional("q_lora_rank", int, 1536),
        "kv_lora_rank": reader.positive("kv_lora_rank", 512),
        "qk_rope_head_dim": reader.positive("qk_rope_head_dim", 64),
        "qk_nope_head_dim": reader.positive("qk_nope_head_dim", 128),
        "v_head_dim": reader.positive("v_head_dim", 128),
        "n_routed_experts": reader.positive("n_routed_experts"),
        "num_experts_per_tok": reader.positive("num_experts_per_tok"),
    }


def check_groups(config: DeepseekConfig, source: str = "config.json") -> None:
    """Refuse groups that do not hold the experts which a token needs.

    Raises:
        ConfigError: Names the numbers.
    """
    size, odd = divmod(config.n_routed_experts, config.n_group)
    if odd or config.topk_group > config.n_group:
        raise ConfigError(
            f"{source}: groups of experts",
            found=f"n_group {config.n_group}, topk_group {config.topk_group}",
            allowed=f"n_group divides {config.n_routed_experts}, topk_group at most n_group",
        )
    if config.num_experts_per_tok > size * config.topk_group:
        raise ConfigError(
            f"{source}: field 'num_experts_per_tok'",
            found=config.num_experts_per_tok,
            allowed=f"at most {size * config.topk_group}: topk_group {config.topk_group} times {size}, "
            f"which is n_routed_experts {config.n_routed_experts} / n_group {config.n_group}",
        )


def build(config: DeepseekConfig, router: Callable[[], nn.Module]) -> DecoderLM:
    """The model, with a router of its generation in every layer that has experts."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    spec = _latent_spec(config)

    def sparse() -> SparseMLP:
        width = config.moe_intermediate_size
        shared = GatedMLP(hidden, width * config.n_shared_experts, config.mlp_bias)
        return SparseMLP(router(), Experts(hidden, width, config.n_routed_experts), shared)

    def layer(index: int) -> DecoderLayer:
        mlp: nn.Module = (
            GatedMLP(hidden, config.intermediate_size, config.mlp_bias)
            if index < config.first_k_dense_replace
            else sparse()
        )
        return DecoderLayer(
            LatentAttention(hidden, spec), mlp, RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        )

    embedding, head = embedding_and_head(config)
    width, positions = config.qk_rope_head_dim, config.max_position_embeddings
    return DecoderLM(
        embedding,
        [layer(index) for index in range(config.num_hidden_layers)],
        RMSNorm(hidden, eps),
        head,
        Positions(rope={"default": rope_tables(config.rope, width, positions)}),
    )


def _latent_spec(config: DeepseekConfig) -> LatentSpec:
    query_width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return LatentSpec(
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


# Templates of the maps that attention makes of a latent's.
K_UP, V_UP = "layers.{i}.self_attn.k_up.weight", "layers.{i}.self_attn.v_up.weight"


def cut_kv(stored: Tensor, config: DeepseekConfig) -> Sequence[Tensor]:
    """[H * (N + V), C] -> what each head does to its query, [H, N, C], and makes of a latent, [H, C, V]."""
    heads = stored.reshape(config.num_attention_heads, -1, stored.shape[1])
    width = config.qk_nope_head_dim
    return heads[:, :width], heads[:, width:].transpose(1, 2)


_ATTENTION = {
    f"self_attn.{name}": f"self_attn.{name}"
    for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "o_proj")
}
_PREFIX = "model.layers.{i}"
# Of the layers that predict further tokens, beside what any layer has.
_FURTHER = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
RULES: Rules = {
    **OUTER,
    **under(_PREFIX, _ATTENTION | {"self_attn.kv_a_proj_with_mqa": "self_attn.kv_a_proj"}),
    **under(_PREFIX, dict(MLP) | dict(NORMS)),
    **under(_PREFIX, {f"mlp.shared_experts.{p}": f"mlp.shared_expert.{p}" for p in PROJECTIONS}),
    f"{_PREFIX}.self_attn.kv_b_proj.weight": Cut((K_UP, V_UP), cut_kv),
    f"{_PREFIX}.mlp.gate.weight": "layers.{i}.mlp.router.gate.weight",
    f"{_PREFIX}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.router.correction_bias",
    **expert_rules(f"{_PREFIX}.mlp.experts"),
    **{f"{_PREFIX}.{name}.weight": None for name in _FURTHER},
}
