"""Llama 1-3 and every checkpoint of `model_type` "llama" (SmolLM2, TinyLlama, Vicuna, ...).

Source: Touvron et al., "LLaMA" (2023); Dubey et al., "The Llama 3 Herd of Models" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from onnxlm.models.config import ConfigReader, ModelConfig
from onnxlm.models.layers.attention import GroupedQueryAttention
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLayer, DecoderLM
from onnxlm.models.layers.mlp import GatedMLP
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotary import rope_tables
from onnxlm.models.registry import Architecture, GgufFamily

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


def _parse_config(reader: ConfigReader) -> ModelConfig:
    heads = reader.positive("num_attention_heads")
    hidden = reader.positive("hidden_size")
    reader.only("hidden_act", "silu")
    config = ModelConfig(
        model_type="llama",
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        num_hidden_layers=reader.positive("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=reader.positive("num_key_value_heads"),
        head_dim=reader.positive("head_dim", hidden // heads),
        max_position_embeddings=reader.positive("max_position_embeddings", 2048),
        rms_norm_eps=reader.get("rms_norm_eps", float, 1e-6),
        rope=reader.rope(),
        tie_word_embeddings=reader.get("tie_word_embeddings", bool, False),
        attention_bias=reader.get("attention_bias", bool, False),
        mlp_bias=reader.get("mlp_bias", bool, False),
    )
    reader.finish()
    return config


def _build(config: ModelConfig) -> DecoderLM:
    spec = AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        scale=config.head_dim**-0.5,
    )

    def layer() -> DecoderLayer:
        return DecoderLayer(
            GroupedQueryAttention(
                config.hidden_size, config.head_dim, spec, bias=config.attention_bias
            ),
            GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias),
            RMSNorm(config.hidden_size, config.rms_norm_eps),
            RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    return DecoderLM(
        embedding,
        [layer() for _ in range(config.num_hidden_layers)],
        RMSNorm(config.hidden_size, config.rms_norm_eps),
        head,
        (config.num_key_value_heads, config.head_dim),
        rope_tables(config.rope, config.head_dim, config.max_position_embeddings),
    )


_LAYER_TENSORS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
_WEIGHT_MAP: dict[str, str | None] = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "model.layers.{i}.self_attn.rotary_emb.inv_freq": None,
}
for _name in _LAYER_TENSORS:
    for _part in ("weight", "bias"):
        _WEIGHT_MAP[f"model.layers.{{i}}.{_name}.{_part}"] = f"layers.{{i}}.{_name}.{_part}"


def _gguf_config(own: FamilyMetadata, everything: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = own["attention.head_count"], own["embedding_length"]
    head_dim = own.get("attention.key_length", hidden // heads)
    own.only("attention.value_length", head_dim)
    own.only("rope.dimension_count", head_dim)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": own.get("vocab_size", len(everything.get("tokenizer.ggml.tokens", ()))),
        "hidden_size": hidden,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
    }
    scaling = own.get("rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": own["rope.scaling.factor"]}
        original = own.get("rope.scaling.original_context_length")
        if original is not None:
            config["rope_scaling"]["original_max_position_embeddings"] = original
    return config


_GGUF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    weight_map=_WEIGHT_MAP,
    gguf=GgufFamily(
        architecture="llama",
        config=_gguf_config,
        weight_map={
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
            **{
                f"blk.{{i}}.{short}.{part}": f"model.layers.{{i}}.{name}.{part}"
                for short, name in _GGUF_LAYER.items()
                for part in ("weight", "bias")
            },
        },
        permuted={
            "model.layers.{i}.self_attn.q_proj.weight": "num_attention_heads",
            "model.layers.{i}.self_attn.k_proj.weight": "num_key_value_heads",
            "model.layers.{i}.self_attn.q_proj.bias": "num_attention_heads",
            "model.layers.{i}.self_attn.k_proj.bias": "num_key_value_heads",
        },
        flags={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"},
    ),
    tiny={
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    },
)
