"""What families that descend from Llama share: names of their tensors, the parts around their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from onnxlm.models.config import ModelConfig, RotaryConfig
from onnxlm.models.layers.decoder import DecoderLM, Positions, Scaling
from onnxlm.models.layers.mlp import GatedMLP
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotary import longrope_switch, rope_tables
from onnxlm.models.weight_rules import Rules

# Tensors outside of the layers, and one that old checkpoints carry though it follows from the config.
OUTER: Rules = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "model.layers.{i}.self_attn.rotary_emb.inv_freq": None,
}
# Modules of a layer, called the same here and there.
ATTENTION: Mapping[str, str] = {
    name: name for name in (f"self_attn.{part}_proj" for part in ("q", "k", "v", "o"))
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MLP: Mapping[str, str] = {f"mlp.{name}": f"mlp.{name}" for name in PROJECTIONS}
NORMS: Mapping[str, str] = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
LAYER: Mapping[str, str] = {**ATTENTION, **MLP, **NORMS}
# Of families that norm queries and keys.
QK_NORMS: Mapping[str, str] = {name: name for name in ("self_attn.q_norm", "self_attn.k_norm")}


def embedding_and_head(
    config: ModelConfig, head_bias: bool = False
) -> tuple[nn.Embedding, nn.Linear]:
    """Token table and LM head, one weight where the config ties them."""
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=head_bias)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    return embedding, head


_UNSCALED = Scaling()


def rms_norm(config: RotaryConfig) -> RMSNorm:
    """A norm of the residual stream."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps)


def gated_mlp(config: RotaryConfig) -> GatedMLP:
    """The feed-forward block of a layer."""
    return GatedMLP(
        config.hidden_size, config.intermediate_size, config.mlp_bias, config.hidden_act
    )


def rotary_lm(
    config: RotaryConfig,
    layers: Sequence[nn.Module],
    norm: nn.Module,
    *,
    rotary_width: int | None = None,
    scaling: Scaling = _UNSCALED,
) -> DecoderLM:
    """A model whose layers share one pair of rotary tables, LongRoPE's too.

    Args:
        config: Sizes, ties and rotary settings.
        layers: The decoder layers.
        norm: The final norm.
        rotary_width: Widths of a head that turn; all when None.
        scaling: Constants around the layers.
    """
    embedding, head = embedding_and_head(config)
    width, positions = rotary_width or config.head_dim, config.max_position_embeddings
    return DecoderLM(
        embedding,
        layers,
        norm,
        head,
        Positions(
            rope={"default": rope_tables(config.rope, width, positions)},
            switch=longrope_switch(config.rope, positions),
        ),
        scaling=scaling,
    )
