"""What families that descend from Llama share: names of their tensors, embedding and head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from onnxlm.models.config import ModelConfig
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


def embedding_and_head(
    config: ModelConfig, head_bias: bool = False
) -> tuple[nn.Embedding, nn.Linear]:
    """Token table and LM head, one weight where the config ties them."""
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=head_bias)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    return embedding, head
