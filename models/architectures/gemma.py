"""Gemma: norms stored as their difference to 1, embeddings times the root of their width, GeGLU.

Source: Gemma Team, "Gemma: Open Models Based on Gemini Research and Technology" (2024), section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import NORMS, gated_mlp, rms_norm, rotary_lm
from onnxlm.models.architectures._gemma import GELU, gemma_fields, gemma_rules
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Scaling
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.registry import Architecture, GgufFamily

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


def _parse_config(reader: ConfigReader) -> RotaryConfig:
    # The first release says "gelu" and means its tanh form; a later one named that in a key of its own.
    reader.only("hidden_act", GELU, "gelu")
    reader.only("hidden_activation", None, GELU)
    fields = gemma_fields(reader, positions=8192, rope=reader.rope(longrope=True))
    config = RotaryConfig(**fields | {"hidden_act": GELU})
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

    layers = [layer() for _ in range(config.num_hidden_layers)]
    scaling = Scaling(embedding=config.hidden_size**0.5)
    return rotary_lm(config, layers, rms_norm(config), scaling=scaling)


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.rotary_config(own, "gemma", "GemmaForCausalLM")
    return config | {"hidden_act": GELU, "attention_bias": gguf.attention_biases(own)}


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=gemma_rules(NORMS),
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.GEMMA),
        config=_gguf_config,
        rules=gguf.named(gguf.LAYER),  # 1 is added to the norms' weights already
    ),
    tiny={
        "model_type": "gemma",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    variants={
        "biases, all KV heads, untied": {
            "attention_bias": True,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    },
)
