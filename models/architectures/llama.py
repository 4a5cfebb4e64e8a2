"""Llama 1-3 and every checkpoint of `model_type` "llama" (SmolLM2, TinyLlama, Vicuna, ...).

Source: Touvron et al., "LLaMA" (2023); Dubey et al., "The Llama 3 Herd of Models" (2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import LAYER, OUTER, gated_mlp, rms_norm, rotary_lm
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


def _parse_config(reader: ConfigReader) -> RotaryConfig:
    # What the model's makers and other programs note down.
    reader.unused("is_llama_config", "max_sequence_length")
    reader.only("rope_interleaved", False)
    reader.same("num_key_value_heads", "num_attention_heads")
    config = RotaryConfig(**reader.rotary_fields(rope=reader.rope(longrope=True)))
    reader.finish()
    return config


def _build(config: RotaryConfig) -> DecoderLM:
    spec = AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        scale=config.head_dim**-0.5,
    )
    options = AttentionOptions(qkv_bias=config.attention_bias, out_bias=config.attention_bias)

    def layer() -> DecoderLayer:
        return DecoderLayer(
            Attention(config.hidden_size, config.head_dim, spec, options),
            gated_mlp(config),
            rms_norm(config),
            rms_norm(config),
        )

    return rotary_lm(config, [layer() for _ in range(config.num_hidden_layers)], rms_norm(config))


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    return {
        **gguf.rotary_config(own, "llama", "LlamaForCausalLM"),
        "attention_bias": gguf.attention_biases(own),
        "mlp_bias": gguf.in_first_layer(own, MODEL_TENSOR.FFN_GATE, "bias"),
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={**OUTER, **under("model.layers.{i}", LAYER)},
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.LLAMA),
        config=_gguf_config,
        rules=gguf.named(gguf.LAYER),
        permuted=gguf.PERMUTED,
        applies=lambda own: not own.get(Keys.LLM.EXPERT_COUNT, 0),
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
    variants={
        "biases, one KV head, llama3": {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        "untied, all KV heads, narrow, yarn": {
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
            "head_dim": 24,  # a width that GroupQueryAttention does not rotate
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    },
)
